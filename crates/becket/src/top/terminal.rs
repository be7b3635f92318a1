//! The terminal while `becket top` has it: keys one by one, and a screen of its own.
//! Never leaves it changed: dropping it brings back what was there.

use super::screen::{Line, Look};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::{
    fmt::Write as _,
    io::{self, Write as _},
};

/// The terminal of standard input and output.
pub(super) struct Terminal {
    before: Termios,
    colour: bool,
}

impl Terminal {
    /// Takes the terminal.
    ///
    /// # Errors
    /// Standard input is none.
    pub(super) fn open(colour: bool) -> io::Result<Terminal> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Flush, &raw)?;
        let terminal = Terminal { before, colour };
        // The alternate screen, and no cursor (xterm's control sequences, private modes 1049 and 25).
        write!(io::stdout(), "\x1b[?1049h\x1b[?25l")?;
        Ok(terminal)
    }

    /// Columns and lines.
    pub(super) fn size() -> (usize, usize) {
        match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
            _ => (80, 24),
        }
    }

    /// Shows these lines and nothing else, by one write: a slow line flickers otherwise.
    pub(super) fn show(&self, lines: &[Line]) -> io::Result<()> {
        let mut text = String::from("\x1b[H");
        for (place, line) in lines.iter().enumerate() {
            let (on, off) = match (line.look, self.colour) {
                (Look::Plain, _) => ("", ""),
                // Reverse video is not a colour, and the selection must be seen.
                (Look::Selected | Look::Head, false) | (Look::Selected, true) => ("\x1b[7m", "\x1b[0m"),
                (Look::Head, true) => ("\x1b[1m", "\x1b[0m"),
                (Look::Bad, true) => ("\x1b[31m", "\x1b[0m"),
                (Look::Bad, false) => ("", ""),
            };
            let end = if place == 0 { "" } else { "\r\n" };
            // Cannot fail: it writes to a string.
            let _ = write!(text, "{end}{on}{}{off}\x1b[K", line.text);
        }
        text.push_str("\x1b[J");
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // If the terminal is gone, nothing is left to bring back.
        let _ = write!(io::stdout(), "\x1b[?25h\x1b[?1049l").and_then(|()| io::stdout().flush());
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.before);
    }
}
