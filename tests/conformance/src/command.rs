//! Running programs with a time limit, so that a hang is a failure with a name.
//! Must never wait for ever, and never leave a program of its own behind.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Emulated machines are 50 times slower than real ones; nothing here takes this long when it works.
const LIMIT: Duration = Duration::from_secs(120);

/// What a program said and how it ended.
#[derive(Debug)]
pub(crate) struct Output {
    /// How it ended.
    pub(crate) status: ExitStatus,
    /// Its standard output.
    pub(crate) stdout: String,
    /// Its standard error.
    pub(crate) stderr: String,
}

/// Builds a command from its words.
pub(crate) fn command(words: &[&str]) -> Command {
    let mut command = Command::new(words.first().copied().unwrap_or_default());
    command.args(words.iter().skip(1));
    command
}

/// Runs to the end, whatever the exit code.
pub(crate) fn run(mut command: Command) -> Result<Output> {
    let said = format!("{command:?}").replace('"', "");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {said}"))?;
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let status = wait(&mut child).with_context(|| said.clone())?;
    // A daemon that inherited the pipe keeps it open for ever; a user's `$(becket attach ...)` would hang.
    let patience = Duration::from_secs(10);
    let read = |pipe: mpsc::Receiver<String>| pipe.recv_timeout(patience);
    match (read(stdout), read(stderr)) {
        (Ok(stdout), Ok(stderr)) => Ok(Output { status, stdout, stderr }),
        _ => bail!("{said}: ended, but something that it started holds its output open"),
    }
}

/// Runs to the end and demands exit code 0.
pub(crate) fn succeed(command: Command) -> Result<Output> {
    let said = format!("{command:?}").replace('"', "");
    let output = run(command)?;
    if !output.status.success() {
        bail!("{said}: {}\n{}{}", output.status, output.stdout, output.stderr);
    }
    Ok(output)
}

/// Runs these words and demands exit code 0.
pub(crate) fn sh(words: &[&str]) -> Result<Output> {
    succeed(command(words))
}

fn collect(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut text = Vec::new();
        if let Some(mut pipe) = pipe {
            // What was read before an error is still the best report there is.
            let _ = pipe.read_to_end(&mut text);
        }
        let _ = sender.send(String::from_utf8_lossy(&text).into_owned());
    });
    receiver
}

fn wait(child: &mut Child) -> Result<ExitStatus> {
    let started = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if started.elapsed() > LIMIT {
            child.kill()?;
            bail!("no end after {} s; killed", LIMIT.as_secs());
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_exit_code_come_back() {
        let output = run(command(&["sh", "-c", "echo out; echo err >&2; exit 3"])).unwrap();
        assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("out\n", "err\n"));
        assert_eq!(output.status.code(), Some(3));
        assert!(succeed(command(&["false"])).is_err());
        assert!(sh(&["/does/not/exist"]).is_err());
    }
}
