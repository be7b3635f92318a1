//! What the screen shows, as lines of text: a pure function of what was read and what the user chose.
//! Never writes: the lines go to the terminal elsewhere.

use super::{
    column::{Column, NAME, bytes, count},
    keys::Key,
    rates::{Row, sum},
};
use crate::{ui::printable, units::format_time};
use becket_device::{DeviceInfo, DeviceState};
use std::{cmp::Ordering, time::Duration};

/// Width of everything behind the name, which fits 80 columns with the narrowest.
const REST: usize = 64;
const HELP: [&str; 10] = [
    "Keys:",
    "  up, down     select a device",
    "  left, right  sort by another column",
    "  r            reverse the order",
    "  /            show only devices with a text in name or image; Escape: all",
    "  d            detach the selected device",
    "  p            pause, and go on",
    "  + -          a longer or shorter interval",
    "  h            this help",
    "  q            quit",
];

/// What a key wants that is not a matter of the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Nothing,
    Quit,
    /// Detach the device of this name.
    Detach(String),
    Interval(Duration),
}

/// What the user chose.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    pub(super) sort: Column,
    pub(super) reversed: bool,
    pub(super) filter: String,
    /// The filter is being typed.
    pub(super) typing: bool,
    /// The name of the selected device: another order does not change the selection.
    pub(super) selected: Option<String>,
    /// A device that is detached if the next key is `y`.
    pub(super) asked: Option<String>,
    pub(super) help: bool,
    pub(super) paused: bool,
    /// The last word about something that was done.
    pub(super) message: String,
}

/// A line, and whether it is to stand out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) text: String,
    pub(super) look: Look,
}

/// How a line stands out on a terminal that can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Plain,
    Head,
    Selected,
    Bad,
}

impl View {
    /// The rows that are wanted, in their order.
    pub(super) fn arranged(&self, rows: &[Row]) -> Vec<Row> {
        let wanted =
            |row: &&Row| row.info.name.contains(&self.filter) || row.info.spec.title().contains(&self.filter);
        let mut rows: Vec<Row> = rows.iter().filter(wanted).cloned().collect();
        // Rows come sorted by name. The largest first: that is what is looked for.
        if self.sort != Column::Name {
            rows.sort_by(|one, other| {
                let (one, other) = (self.sort.value(one), self.sort.value(other));
                other.partial_cmp(&one).unwrap_or(Ordering::Equal)
            });
        }
        if self.reversed {
            rows.reverse();
        }
        rows
    }

    /// Takes in a key.
    pub(super) fn press(&mut self, key: Key, rows: &[Row], interval: Duration) -> Wish {
        self.message.clear();
        if let Some(name) = self.asked.take() {
            return if key == Key::Letter('y') { Wish::Detach(name) } else { Wish::Nothing };
        }
        if self.typing {
            match key {
                Key::Letter(letter) => self.filter.push(letter),
                Key::Backspace => drop(self.filter.pop()),
                Key::Enter => self.typing = false,
                Key::Escape => (self.typing, self.filter) = (false, String::new()),
                Key::Interrupt => return Wish::Quit,
                _ => {}
            }
            return Wish::Nothing;
        }
        match key {
            Key::Letter('q') | Key::Interrupt => return Wish::Quit,
            Key::Letter('r') => self.reversed = !self.reversed,
            Key::Letter('p' | ' ') => self.paused = !self.paused,
            Key::Letter('h' | '?') => self.help = !self.help,
            Key::Letter('/') => self.typing = true,
            Key::Letter('+') => {
                return Wish::Interval(interval.saturating_mul(2).min(Duration::from_secs(60)));
            }
            Key::Letter('-') => return Wish::Interval((interval / 2).max(Duration::from_millis(250))),
            Key::Letter('d') => self.asked = self.selected_of(rows),
            Key::Letter('j') | Key::Down => self.select(rows, 1),
            Key::Letter('k') | Key::Up => self.select(rows, -1),
            Key::Letter('>') | Key::Right => self.sort = self.sort.step(1),
            Key::Letter('<') | Key::Left => self.sort = self.sort.step(-1),
            Key::Escape => (self.filter, self.help) = (String::new(), false),
            Key::Letter(_) | Key::Backspace | Key::Enter => {}
        }
        Wish::Nothing
    }

    fn order(&self) -> String {
        format!("{}{}", self.sort.word(), if self.reversed { ", reversed" } else { "" })
    }

    fn place(&self, rows: &[Row]) -> Option<usize> {
        rows.iter().position(|row| Some(&row.info.name) == self.selected.as_ref())
    }

    fn selected_of(&self, rows: &[Row]) -> Option<String> {
        self.place(&self.arranged(rows)).and_then(|_| self.selected.clone())
    }

    fn select(&mut self, rows: &[Row], by: isize) {
        let rows = self.arranged(rows);
        let last = rows.len().saturating_sub(1);
        let place = self.place(&rows).map_or(0, |at| at.saturating_add_signed(by).min(last));
        self.selected = rows.get(place).map(|row| row.info.name.clone());
    }

    /// The lines of a screen of that width and height, none of them wider.
    pub(super) fn lines(
        &self,
        rows: &[Row],
        interval: Duration,
        (width, height): (usize, usize),
    ) -> Vec<Line> {
        let plain = |text: String| Line { text, look: Look::Plain };
        let all = sum(rows);
        let bad = rows.iter().filter(|row| row.info.state != DeviceState::Live).count();
        let mut lines = vec![plain(format!(
            "{} devices{}; read {}/s {}/s, write {}/s {}/s, {} in flight; every {}{}",
            rows.len(),
            if bad > 0 { format!(", {bad} not live") } else { String::new() },
            count(all.read.operations_per_s),
            bytes(all.read.bytes_per_s),
            count(all.write.operations_per_s),
            bytes(all.write.bytes_per_s),
            all.in_flight,
            format_time(u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX)),
            if self.paused { "; paused" } else { "" },
        ))];
        let status = match (&self.asked, self.typing) {
            (Some(name), _) => format!("detach {name}? y detaches it, any other key does not"),
            (None, true) => format!("show only: {}_", self.filter),
            (None, false) if !self.message.is_empty() => self.message.clone(),
            (None, false) if !self.filter.is_empty() => format!("only: {} (Escape shows all)", self.filter),
            (None, false) => format!("sorted by {}; q quits, h shows the keys", self.order()),
        };
        if self.help {
            lines.extend(HELP.map(|line| plain(line.to_owned())));
        } else {
            let wanted = self.arranged(rows);
            lines.extend(self.table(&wanted, width, height.saturating_sub(3)));
            match (rows.is_empty(), wanted.is_empty()) {
                (true, _) => {
                    lines.push(plain(
                        "nothing is attached; `becket attach IMAGE` attaches an image".to_owned(),
                    ));
                }
                (false, true) => lines.push(plain("no device has that text in its name or image".to_owned())),
                (false, false) => {}
            }
        }
        lines.truncate(height.saturating_sub(1));
        lines.push(plain(status));
        for line in &mut lines {
            line.text = printable(&line.text).chars().take(width).collect();
        }
        lines
    }

    fn table(&self, rows: &[Row], width: usize, height: usize) -> Vec<Line> {
        let name = width.saturating_sub(REST + 1).clamp(NAME.0, NAME.1);
        let beyond = width.saturating_sub(name + 1 + REST + 2);
        let mut head = format!("{:<name$} {:<5}", Column::Name.head().0, "VIA");
        for column in &Column::ALL[1..] {
            let (word, width) = column.head();
            head += &format!(" {word:>width$}");
        }
        head += "  STATE/IMAGE";
        let sorted =
            format!("sorted by {}{}", self.sort.word(), if self.reversed { ", reversed" } else { "" });
        let mut lines = vec![Line { text: format!("{head}  ({sorted})"), look: Look::Head }];
        // The selected device stays in view.
        let room = height.max(1);
        let from = self.place(rows).map_or(0, |at| (at + 1).saturating_sub(room));
        lines.extend(rows.iter().skip(from).take(room).map(|row| self.line(row, name, beyond)));
        lines
    }

    fn line(&self, row: &Row, name: usize, beyond: usize) -> Line {
        let DeviceInfo { name: title, transport, state, spec, .. } = &row.info;
        let mut text = format!("{:<name$} {:<5.5}", shortened(title, name), transport.to_string());
        let live = *state == DeviceState::Live;
        if live {
            for column in &Column::ALL[1..] {
                text += &format!(" {:>1$}", column.cell(row), column.head().1);
            }
            text += &format!("  {}", shortened(&spec.title(), beyond));
        } else {
            text += &format!(" {state}");
            if row.info.recoveries > 0 {
                text += &format!(", recovered {} times", row.info.recoveries);
            }
        }
        let look = match (Some(title) == self.selected.as_ref(), live) {
            (true, _) => Look::Selected,
            (false, false) => Look::Bad,
            (false, true) => Look::Plain,
        };
        Line { text, look }
    }
}

/// A text of at most `width` columns, with its end: that of a path says most.
fn shortened(text: &str, width: usize) -> String {
    let text = printable(text);
    let len = text.chars().count();
    if len <= width {
        return text;
    }
    let tail: String = text.chars().skip(len - width.saturating_sub(1)).collect();
    if width == 0 { String::new() } else { format!("~{tail}") }
}

#[cfg(test)]
#[path = "screen_tests.rs"]
mod tests;
