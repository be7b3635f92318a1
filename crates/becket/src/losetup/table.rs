//! A list as people, scripts and programs read it: aligned, raw, or JSON, byte for byte as libsmartcols
//! writes them. Never measures a terminal: what is piped and what is seen are the same.

use super::columns::{Column, Shape};
use std::io::Write as _;

/// How a list looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Style {
    #[default]
    Aligned,
    Raw,
    Json,
}

/// A cell; the text of a list is bytes, for file names are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Text(Vec<u8>),
    Number(u64),
    Flag(bool),
    /// A device number; in aligned lists the major part is at least so wide.
    Pair(u32, u32, usize),
}

/// A line of a list.
pub(super) type Row = Vec<Option<Value>>;

/// The whole list. `utf8` says that letters beyond ASCII are letters here.
pub(super) fn render(columns: &[Column], rows: &[Row], style: Style, headings: bool, utf8: bool) -> Vec<u8> {
    let mut out = Vec::new();
    if style == Style::Json {
        json(&mut out, columns, rows);
        return out;
    }
    if rows.is_empty() {
        return out;
    }
    let head = columns.iter().map(|column| column.name().as_bytes().to_vec()).collect();
    let mut lines: Vec<Vec<Vec<u8>>> = vec![head];
    lines.extend(rows.iter().map(|row| {
        let reported =
            |cell: &Option<Value>| cell.as_ref().map_or_else(Vec::new, |cell| cell.reported(style));
        row.iter().map(reported).collect()
    }));
    match style {
        Style::Raw => lines.iter_mut().flatten().for_each(|cell| *cell = nonblank(cell)),
        _ => lines.iter_mut().flatten().for_each(|cell| *cell = printable(cell, utf8)),
    }
    // The heads count even where they are not shown.
    let widths: Vec<usize> =
        (0..columns.len()).map(|at| lines.iter().map(|line| width(&line[at])).max().unwrap_or(0)).collect();
    for line in lines.iter().skip(usize::from(!headings)) {
        for (at, cell) in line.iter().enumerate() {
            let last = at + 1 == columns.len();
            let pad = if style == Style::Raw { 0 } else { widths[at] - width(cell) };
            match columns[at].kind() {
                Shape::Text if last => out.extend(cell),
                // An empty cell at the end of a line is not even blanks.
                _ if last && cell.is_empty() => {}
                Shape::Text => {
                    out.extend(cell);
                    blanks(&mut out, pad);
                }
                Shape::Number | Shape::Flag => {
                    blanks(&mut out, pad);
                    out.extend(cell);
                }
            }
            if !last {
                out.push(b' ');
            }
        }
        out.push(b'\n');
    }
    out
}

impl Value {
    fn reported(&self, style: Style) -> Vec<u8> {
        match self {
            Value::Text(text) => text.clone(),
            Value::Number(number) => number.to_string().into_bytes(),
            Value::Flag(flag) => vec![b'0' + u8::from(*flag)],
            Value::Pair(major, minor, wide) if style == Style::Aligned => {
                format!("{major:>wide$}:{minor:<3}").into_bytes()
            }
            Value::Pair(major, minor, _) => format!("{major}:{minor}").into_bytes(),
        }
    }
}

fn blanks(out: &mut Vec<u8>, count: usize) {
    out.resize(out.len() + count, b' ');
}

/// The places that a cell takes. Only [`printable`] text comes here, so what is no text counts by its bytes.
fn width(cell: &[u8]) -> usize {
    std::str::from_utf8(cell).map_or(cell.len(), |text| text.chars().count())
}

fn escape(out: &mut Vec<u8>, byte: u8) {
    // Writing to memory cannot fail.
    let _ = write!(out, "\\x{byte:02x}");
}

/// For raw lists: no blanks within a cell, nothing beyond ASCII.
fn nonblank(cell: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(cell.len());
    for &byte in cell {
        if byte.is_ascii_graphic() && byte != b'\\' { out.push(byte) } else { escape(&mut out, byte) }
    }
    out
}

/// For aligned lists: nothing that drives a terminal, and no text that looks like an escape of ours.
fn printable(cell: &[u8], utf8: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(cell.len());
    for chunk in cell.utf8_chunks() {
        for (at, letter) in chunk.valid().char_indices() {
            let fake = letter == '\\' && chunk.valid()[at + 1..].starts_with('x');
            let plain = !letter.is_control() && !fake && (utf8 || letter.is_ascii());
            let mut buffer = [0; 4];
            let bytes = letter.encode_utf8(&mut buffer).as_bytes();
            if plain { out.extend(bytes) } else { bytes.iter().for_each(|&byte| escape(&mut out, byte)) }
        }
        chunk.invalid().iter().for_each(|&byte| escape(&mut out, byte));
    }
    out
}

fn json(out: &mut Vec<u8>, columns: &[Column], rows: &[Row]) {
    out.extend(b"{\n   \"loopdevices\": [\n");
    for (number, row) in rows.iter().enumerate() {
        out.extend(if number == 0 { &b"      {\n"[..] } else { b",{\n" });
        for (at, (column, cell)) in columns.iter().zip(row).enumerate() {
            out.extend(b"         ");
            quote(out, column.name().to_ascii_lowercase().as_bytes());
            out.extend(b": ");
            let text = cell.as_ref().map(|cell| cell.reported(Style::Json)).unwrap_or_default();
            match column.kind() {
                Shape::Flag => out.extend(if text == b"1" { &b"true"[..] } else { b"false" }),
                _ if text.is_empty() => out.extend(b"null"),
                Shape::Number => out.extend(text),
                Shape::Text => quote(out, &text),
            }
            out.extend(if at + 1 < columns.len() { &b",\n"[..] } else { b"\n" });
        }
        out.extend(b"      }");
    }
    out.extend(b"\n   ]\n}\n");
}

/// A string of JSON. Bytes that are not UTF-8 stay as they are: a file's name is what it is.
fn quote(out: &mut Vec<u8>, text: &[u8]) {
    out.push(b'"');
    for &byte in text {
        match byte {
            b'"' | b'\\' => out.extend([b'\\', byte]),
            b'\x08' => out.extend(b"\\b"),
            b'\t' => out.extend(b"\\t"),
            b'\n' => out.extend(b"\\n"),
            b'\x0c' => out.extend(b"\\f"),
            b'\r' => out.extend(b"\\r"),
            0..0x20 => {
                let _ = write!(out, "\\u00{byte:02x}");
            }
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Option<Value> {
        Some(Value::Text(text.into()))
    }

    fn shown(columns: &[Column], rows: &[Row], style: Style, headings: bool) -> String {
        String::from_utf8(render(columns, rows, style, headings, true)).unwrap()
    }

    #[test]
    fn lists_are_aligned_as_scripts_expect() {
        let columns = [Column::Name, Column::SizeLimit, Column::MajMin, Column::BackFile, Column::LogSec];
        let rows = [
            vec![
                text("/dev/loop3"),
                Some(Value::Number(0)),
                Some(Value::Pair(7, 3, 3)),
                text("/a b\tü"),
                Some(Value::Number(512)),
            ],
            vec![text("/dev/loop12"), None, None, None, None],
        ];
        assert_eq!(
            shown(&columns, &rows, Style::Aligned, true),
            concat!(
                "NAME        SIZELIMIT MAJ:MIN BACK-FILE LOG-SEC\n",
                "/dev/loop3          0   7:3   /a b\\x09ü     512\n",
                "/dev/loop12                             \n",
            )
        );
        assert_eq!(
            shown(&columns, &rows[..1], Style::Raw, false),
            "/dev/loop3 0 7:3 /a\\x20b\\x09\\xc3\\xbc 512\n"
        );
        let names = [Column::LogSec, Column::Name];
        let rows = [vec![Some(Value::Number(512)), text("/dev/loop3")]];
        assert_eq!(shown(&names, &rows, Style::Aligned, false), "    512 /dev/loop3\n");
        assert_eq!(shown(&names, &[], Style::Aligned, true), "");
    }

    #[test]
    fn letters_depend_on_the_locale_and_escapes_are_never_faked() {
        assert_eq!(printable("ü\\x\\y".as_bytes(), true), "ü\\x5cx\\y".as_bytes());
        assert_eq!(printable("ü".as_bytes(), false), b"\\xc3\\xbc");
        assert_eq!(printable(b"\xff\x1b", true), b"\\xff\\x1b");
    }

    #[test]
    fn json_is_as_libsmartcols_writes_it() {
        let columns = [Column::Name, Column::Ro, Column::Offset, Column::BackFile];
        assert_eq!(shown(&columns, &[], Style::Json, true), "{\n   \"loopdevices\": [\n\n   ]\n}\n");
        let rows = [
            vec![text("/dev/loop0"), Some(Value::Flag(true)), Some(Value::Number(5)), text("a\"\\\n\u{1}ü")],
            vec![text("/dev/loop1"), None, None, None],
        ];
        let reported = shown(&columns, &rows, Style::Json, true);
        assert!(reported.starts_with(
            "{\n   \"loopdevices\": [\n      {\n         \"name\": \"/dev/loop0\",\n         \"ro\": true,\n"
        ));
        assert!(
            reported.contains("\"back-file\": \"a\\\"\\\\\\n\\u0001ü\"\n      },{\n         \"name\""),
            "{reported}"
        );
        let value: serde_json::Value = serde_json::from_str(&reported).unwrap();
        assert_eq!(
            value["loopdevices"][1],
            serde_json::json!({
                "name": "/dev/loop1", "ro": false, "offset": null, "back-file": null
            })
        );
    }
}
