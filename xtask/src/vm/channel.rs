//! The guest's `status` port: a few lines (`ready`, `file INDEX SIZE` and its bytes, `missing INDEX`, `exit
//! CODE`).
//! Never trusts a size: bytes are taken as they come, and files are written only where the caller asked.

use anyhow::{Context, Result, bail};

/// What the guest reported.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The script starts now.
    Ready,
    /// A file that was asked for, by its place in the list.
    File(usize, Vec<u8>),
    /// A file that was asked for and is not there.
    Missing(usize),
    /// The script ended.
    Exit(u8),
}

/// Cuts the port's bytes into reports.
#[derive(Default)]
pub(crate) struct Decoder {
    pending: Vec<u8>,
    file: Option<(usize, usize)>,
}

impl Decoder {
    /// Takes bytes in whatever pieces, and returns the reports that are complete.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Report>> {
        self.pending.extend_from_slice(bytes);
        let mut reports = Vec::new();
        loop {
            if let Some((index, size)) = self.file {
                if self.pending.len() < size {
                    return Ok(reports);
                }
                let contents = self.pending.drain(..size).collect();
                self.file = None;
                reports.push(Report::File(index, contents));
            } else {
                let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') else {
                    return Ok(reports);
                };
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                reports.extend(self.line(line.trim())?);
            }
        }
    }

    fn line(&mut self, line: &str) -> Result<Option<Report>> {
        let words: Vec<&str> = line.split(' ').collect();
        let number =
            |word: &str| word.parse::<usize>().with_context(|| format!("the guest reported `{line}`"));
        Ok(match words[..] {
            ["ready"] => Some(Report::Ready),
            ["file", index, size] => {
                self.file = Some((number(index)?, number(size)?));
                None
            }
            ["missing", index] => Some(Report::Missing(number(index)?)),
            ["exit", code] => Some(Report::Exit(u8::try_from(number(code)?)?)),
            _ => bail!("the guest reported `{line}`"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_may_arrive_in_any_pieces() {
        let stream = b"ready\nfile 1 6\nab\ncd\nfile 0 0\nmissing 2\nexit 7\n";
        let expected = [
            Report::Ready,
            Report::File(1, b"ab\ncd\n".to_vec()),
            Report::File(0, vec![]),
            Report::Missing(2),
            Report::Exit(7),
        ];
        for size in 1..stream.len() {
            let mut decoder = Decoder::default();
            let got: Vec<Report> =
                stream.chunks(size).flat_map(|piece| decoder.feed(piece).unwrap()).collect();
            assert_eq!(got, expected, "pieces of {size}");
        }
    }

    #[test]
    fn nonsense_is_an_error() {
        assert!(Decoder::default().feed(b"exit lots\n").is_err());
        assert!(Decoder::default().feed(b"exit 256\n").is_err());
        assert!(Decoder::default().feed(b"hello\n").is_err());
    }
}
