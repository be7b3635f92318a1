//! Reads the guest kernel's console and notices when the kernel has failed.
//! Never sees what the script prints: that comes over a channel of its own, so a test may print "Oops".

/// How much of the console is kept for the error, in bytes.
const KEPT: usize = 256 * 1024;

/// What the kernel says when it cannot go on, or would not without our parameters.
const FATAL: [&str; 14] = [
    "Kernel panic",
    "BUG:",
    "kernel BUG at",
    "Oops:",
    "general protection fault",
    "Unable to handle kernel",
    "unable to handle page fault",
    "soft lockup",
    "hard LOCKUP",
    "detected stall",
    "self-detected stall",
    "KASAN:",
    "possible circular locking",
    "Attempted to kill init",
];

/// The console so far.
#[derive(Default)]
pub(crate) struct Console {
    kept: Vec<u8>,
    line: Vec<u8>,
    trouble: Option<String>,
}

impl Console {
    /// Takes bytes as they come, in whatever pieces.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.kept.extend_from_slice(bytes);
        if self.kept.len() > 2 * KEPT {
            let cut = self.kept.len() - KEPT;
            self.kept.drain(..cut);
        }
        for &byte in bytes {
            if byte == b'\n' {
                let line = String::from_utf8_lossy(&self.line).trim_end().to_owned();
                self.line.clear();
                if self.trouble.is_none() && is_fatal(&line) {
                    self.trouble = Some(line);
                }
            } else {
                self.line.push(byte);
            }
        }
    }

    /// The first line that says that the kernel is broken.
    pub(crate) fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// The console as text: everything, or its end when it is long.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).replace('\r', "")
    }
}

fn is_fatal(line: &str) -> bool {
    let hung = line.contains("INFO: task ") && line.contains(" blocked for more than");
    hung || FATAL.iter().any(|sign| line.contains(sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trouble(text: &str) -> Option<String> {
        let mut console = Console::default();
        // Byte by byte: a sign may be cut anywhere.
        text.bytes().for_each(|byte| console.feed(&[byte]));
        console.trouble().map(str::to_owned)
    }

    #[test]
    fn what_kernels_say_when_they_break_is_noticed() {
        for line in [
            "[    9.1] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100",
            "[    9.1] BUG: kernel NULL pointer dereference, address: 0000000000000010",
            "[    9.1] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI",
            "[  120.1] INFO: task kworker/0:1:12 blocked for more than 60 seconds.",
            "[   40.1] watchdog: BUG: soft lockup - CPU#0 stuck for 26s! [fio:99]",
            "[   40.1] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
            "[   40.1] kernel BUG at drivers/block/ublk_drv.c:99!",
        ] {
            let found = trouble(&format!("booting\r\n{line}\r\nCall Trace:\r\n"));
            assert_eq!(found.as_deref(), Some(line));
        }
    }

    #[test]
    fn ordinary_lines_are_not_trouble() {
        let text = "[ 0.1] Linux version 7.3.4\n[ 0.2] EXT4-fs (vdd): mounted filesystem\n[ 1] loop0: detected capacity change\n[ 2] I/O error, dev ublkb0, sector 8\n[ 3] task blocked\n";
        assert_eq!(trouble(text), None);
    }

    #[test]
    fn the_first_trouble_is_kept_and_an_unfinished_line_waits() {
        assert_eq!(trouble("Oops: one\nBUG: two\n").as_deref(), Some("Oops: one"));
        assert_eq!(trouble("Oops: unfinished"), None);
    }

    #[test]
    fn a_long_console_keeps_its_end() {
        let mut console = Console::default();
        for number in 0..100_000 {
            console.feed(format!("line {number}\n").as_bytes());
        }
        assert!(console.text().len() <= 2 * KEPT);
        assert!(console.text().ends_with("line 99999\n"));
    }
}
