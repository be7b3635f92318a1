//! Where words go: results to standard output, words for people to standard error; plain, coloured or JSON.
//! Never mixes the two: what a program reads from standard output is only paths, tables or JSON.

use crate::{args::Global, failure::Failure, progress::silence};
use becket_device::DeviceInfo;
use becket_image::is_hidden;
use serde::Serialize;
use serde_json::{
    Value, json,
    ser::{CompactFormatter, Formatter, PrettyFormatter},
};
use std::{
    fmt::Write as _,
    io::{self, BufWriter, IsTerminal as _, Write as _},
};

/// How this run of becket talks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ui {
    pub(crate) json: bool,
    pub(crate) verbose: bool,
    colour_out: bool,
    colour_err: bool,
}

/// The few colours that becket uses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Colour {
    Red = 31,
    Green = 32,
    Cyan = 36,
}

impl Ui {
    pub(crate) fn new(global: Global) -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Self {
            json: global.json,
            verbose: global.verbose,
            colour_out: wanted && io::stdout().is_terminal(),
            colour_err: wanted && io::stderr().is_terminal(),
        }
    }

    /// One line of result.
    pub(crate) fn line(&self, text: impl AsRef<str>) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", text.as_ref())?;
        Ok(out.flush()?)
    }

    /// The one JSON value that a command prints.
    pub(crate) fn value(&self, value: &Value) -> Result<(), Failure> {
        self.document(value)
    }

    /// The same of anything: a long one takes no memory for its text.
    pub(crate) fn document(&self, value: &impl Serialize) -> Result<(), Failure> {
        let mut out = BufWriter::new(io::stdout().lock());
        write_json(&mut out, value)?;
        writeln!(out)?;
        Ok(out.flush()?)
    }

    /// One JSON value of many, on a line of its own.
    pub(crate) fn record(&self, value: &Value) -> Result<(), Failure> {
        let mut text = Vec::new();
        let shown = Shown(CompactFormatter);
        value
            .serialize(&mut serde_json::Serializer::with_formatter(&mut text, shown))
            .map_err(io::Error::from)?;
        text.push(b'\n');
        let mut out = io::stdout().lock();
        out.write_all(&text)?;
        Ok(out.flush()?)
    }

    /// Lines of result, each as it comes.
    pub(crate) fn lines<T: AsRef<str>>(&self, lines: impl IntoIterator<Item = T>) -> Result<(), Failure> {
        let mut out = BufWriter::new(io::stdout().lock());
        lines.into_iter().try_for_each(|line| writeln!(out, "{}", line.as_ref()))?;
        Ok(out.flush()?)
    }

    /// A sentence for people.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        silence();
        // If standard error is gone, there is nowhere to report to.
        let _ = writeln!(io::stderr(), "becket: {}", printable(text.as_ref()));
    }

    /// What went well but should be known; and with `-v` what was taken and why.
    pub(crate) fn explain(&self, info: &DeviceInfo) {
        for warning in &info.warnings {
            self.note(format!("warning: {warning}"));
        }
        if self.verbose {
            let direct = if info.direct_io { "on" } else { "off" };
            self.note(format!(
                "{}: transport {}: {}",
                info.device.display(),
                info.transport,
                info.spec.reason
            ));
            self.note(format!("{}: direct I/O {direct}: {}", info.device.display(), info.direct_io_reason));
            if let Some(queues) = queues(info) {
                self.note(format!("{}: {queues}", info.device.display()));
            }
        }
    }

    /// What may be lost with a device that was detached. Says whether anything may.
    pub(crate) fn unsaved(&self, info: &DeviceInfo) -> bool {
        if info.unsaved.is_some()
            && let Some(warning) = info.warnings.last()
        {
            self.note(format!("warning: {warning}"));
        }
        info.unsaved.is_some()
    }

    /// A failure, for people.
    pub(crate) fn failure(&self, failure: &Failure) {
        if failure.kind == crate::failure::BROKEN_PIPE {
            return;
        }
        silence();
        let mut text =
            format!("{} {}\n", paint(self.colour_err, Colour::Red, "becket:"), printable(&failure.message));
        if let Some(hint) = &failure.hint {
            let word = paint(self.colour_err, Colour::Cyan, "hint:");
            // Cannot fail: it writes to a string.
            let _ = writeln!(text, "  {word} {}", printable(hint));
        }
        let _ = io::stderr().write_all(text.as_bytes());
    }

    /// The failure of a whole command; for programs also on standard output.
    pub(crate) fn fatal(&self, failure: &Failure) {
        self.failure(failure);
        if self.json && failure.kind != crate::failure::BROKEN_PIPE {
            let _ = self.value(&json!({ "error": failure.to_json() }));
        }
    }

    /// Whether standard output shows colours.
    pub(crate) fn colours(&self) -> bool {
        self.colour_out
    }

    /// A word for a table on standard output.
    pub(crate) fn paint(&self, colour: Colour, word: &str) -> String {
        paint(self.colour_out, colour, word)
    }
}

fn paint(wanted: bool, colour: Colour, word: &str) -> String {
    if wanted { format!("\x1b[{}m{word}\x1b[0m", colour as u8) } else { word.to_owned() }
}

/// The queues of a device that has its own, in words: how many, how deep, and how data reaches them.
pub(crate) fn queues(info: &DeviceInfo) -> Option<String> {
    let (queues, depth, mode) = (info.spec.queues?, info.spec.depth?, info.spec.mode?);
    Some(format!("queues {queues}, requests in flight in each {depth}, mode {mode}"))
}

/// Writes JSON in which a terminal finds nothing to obey: JSON itself allows most of that.
fn write_json(out: &mut impl io::Write, value: &impl Serialize) -> io::Result<()> {
    Ok(value.serialize(&mut serde_json::Serializer::with_formatter(out, Shown(PrettyFormatter::new())))?)
}

/// JSON whose strings have all that is hidden escaped.
struct Shown<F>(F);

impl<F: Formatter> Formatter for Shown<F> {
    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, out: &mut W, text: &str) -> io::Result<()> {
        let mut rest = text;
        while let Some((at, letter)) = rest.char_indices().find(|(_, letter)| is_hidden(*letter)) {
            let (plain, hidden) = rest.split_at(at);
            out.write_all(plain.as_bytes())?;
            letter.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}"))?;
            rest = hidden.get(letter.len_utf8()..).unwrap_or_default();
        }
        out.write_all(rest.as_bytes())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.begin_array(out)
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.end_array(out)
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_array_value(out, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.end_array_value(out)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.begin_object(out)
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.end_object(out)
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_object_key(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.begin_object_value(out)
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.end_object_value(out)
    }
}

/// File names are not trusted: no control character or invisible character of them reaches the terminal.
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_hidden(letter) {
            out.extend(letter.escape_default());
        } else {
            out.push(letter);
        }
    }
    out
}

/// Columns as wide as their widest cell; the last one ends where its text ends.
pub(crate) fn table(rows: &[Vec<String>], right: &[usize]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let pad = " ".repeat(width - cell.chars().count());
            let gap = if column == 0 { "" } else { "  " };
            line += gap;
            line += &(if right.contains(&column) { pad + cell } else { cell.clone() + &pad });
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align() {
        let rows = [["NAME", "SIZE", "IMAGE"], ["a", "512", "/x y"], ["longer", "1", "/z"]]
            .map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&rows, &[1]), "NAME    SIZE  IMAGE\na        512  /x y\nlonger     1  /z\n");
    }

    #[test]
    fn json_cannot_drive_the_terminal() {
        let value = json!({ "na\u{9b}me": ["\u{1b}[2J\u{7f}\u{9b}2J\u{9f}\u{a0}ü", "\u{202e}\u{e0041}\"\n"], "n": {} });
        let mut text = Vec::new();
        write_json(&mut text, &value).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.chars().all(|letter| letter == '\n' || !letter.is_control()), "{text:?}");
        assert!(text.contains("\\u009b2J\\u009f\u{a0}ü"), "{text}");
        assert!(text.contains("\\u202e\\udb40\\udc41\\\"\\n"), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }

    #[test]
    fn names_cannot_drive_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\tü\n\u{202e}"), "a\\u{1b}[2Jb\\tü\\n\\u{202e}");
    }
}
