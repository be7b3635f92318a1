//! The columns of `becket top`: their words, widths and values.
//! Knows no screen.

use super::rates::{Rate, Row};
use crate::units::format_time;

/// Narrowest and widest name.
pub(super) const NAME: (usize, usize) = (12, 30);

/// What the devices are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Column {
    #[default]
    Name,
    Reads,
    Writes,
    BytesRead,
    BytesWritten,
    ReadTime,
    WriteTime,
    Depth,
    Hits,
}

impl Column {
    pub(crate) const ALL: [Column; 9] = [
        Column::Name,
        Column::Reads,
        Column::Writes,
        Column::BytesRead,
        Column::BytesWritten,
        Column::ReadTime,
        Column::WriteTime,
        Column::Depth,
        Column::Hits,
    ];

    /// The word on the command line.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Column::Name => "name",
            Column::Reads => "reads",
            Column::Writes => "writes",
            Column::BytesRead => "bytes-read",
            Column::BytesWritten => "bytes-written",
            Column::ReadTime => "read-time",
            Column::WriteTime => "write-time",
            Column::Depth => "depth",
            Column::Hits => "hits",
        }
    }

    /// Heading and width.
    pub(super) const fn head(self) -> (&'static str, usize) {
        match self {
            Column::Name => ("NAME", NAME.0),
            Column::Reads => ("R/S", 6),
            Column::Writes => ("W/S", 6),
            Column::BytesRead => ("READ/S", 7),
            Column::BytesWritten => ("WRITE/S", 7),
            Column::ReadTime => ("R-TIME", 7),
            Column::WriteTime => ("W-TIME", 7),
            Column::Depth => ("DEPTH", 5),
            Column::Hits => ("HIT%", 4),
        }
    }

    pub(super) fn step(self, by: isize) -> Column {
        let at = Column::ALL.iter().position(|column| *column == self).unwrap_or(0);
        let next = at.wrapping_add_signed(by) % Column::ALL.len();
        Column::ALL[if at == 0 && by < 0 { Column::ALL.len() - 1 } else { next }]
    }

    /// What is sorted by; nothing of what a device does not have.
    pub(super) fn value(self, row: &Row) -> Option<f64> {
        let rates = row.rates.as_ref()?;
        let time = |rate: Rate| rate.mean_ns.map(|mean| mean as f64);
        match self {
            Column::Name => None,
            Column::Reads => Some(rates.read.operations_per_s),
            Column::Writes => Some(rates.write.operations_per_s),
            Column::BytesRead => Some(rates.read.bytes_per_s),
            Column::BytesWritten => Some(rates.write.bytes_per_s),
            Column::ReadTime => time(rates.read),
            Column::WriteTime => time(rates.write),
            Column::Depth => Some(rates.in_flight as f64),
            Column::Hits => rates.hit_ratio,
        }
    }

    pub(super) fn cell(self, row: &Row) -> String {
        let Some(value) = self.value(row) else { return "-".to_owned() };
        match self {
            Column::Name => String::new(),
            Column::Reads | Column::Writes => count(value),
            Column::BytesRead | Column::BytesWritten => bytes(value),
            Column::ReadTime | Column::WriteTime => format_time(value as u64),
            Column::Depth => count(value),
            Column::Hits => format!("{:.0}", value * 100.0),
        }
    }
}

/// A number of at most six columns.
pub(super) fn count(number: f64) -> String {
    short(number, 1000.0)
}

/// Bytes in at most six columns; units are of 1024.
pub(super) fn bytes(number: f64) -> String {
    short(number, 1024.0)
}

fn short(number: f64, unit: f64) -> String {
    if number < 10.0 && number > 0.0 && number.fract() > 0.05 {
        return format!("{number:.1}");
    }
    let (mut number, mut letters) = (number, ["", "k", "M", "G", "T", "P"].into_iter().peekable());
    let mut letter = letters.next().unwrap_or_default();
    while number >= 9_999.5 && letters.peek().is_some() {
        number /= unit;
        letter = letters.next().unwrap_or_default();
    }
    if letter.is_empty() || number >= 100.0 {
        format!("{number:.0}{letter}")
    } else {
        format!("{number:.1}{letter}")
    }
}
