//! A map as a picture: one bar for each image on the way, the pieces coloured by kind.
//! Its size depends only on the number of images: a pixel that covers several pieces has the kind of most of
//! its bytes.

use crate::units::format_size;
use becket_image::{Extent, Level, Place};

/// Pixels.
const WIDTH: usize = 960;
const MARGIN: usize = 20;
const BAR: usize = 34;
const TITLE: usize = 24;
const GAP: usize = 44;

/// One image in the picture.
pub(super) struct Bar<'a> {
    pub(super) level: &'a Level,
    pub(super) format: &'a str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Colour {
    Data,
    Zero,
    Encoded,
}

const KINDS: [(Colour, &str, &str); 3] = [
    (Colour::Data, "#2f6fb3", "data: read as it is, from the host's file"),
    (Colour::Zero, "#d9dee3", "zeroes: nothing is read"),
    (Colour::Encoded, "#e08a2c", "compressed: read and decoded"),
];

impl Colour {
    fn of(extent: &Extent) -> Colour {
        match extent.place {
            Place::Data { .. } => Colour::Data,
            Place::Zero => Colour::Zero,
            Place::Encoded { .. } => Colour::Encoded,
        }
    }

    fn colour(self) -> &'static str {
        KINDS.iter().find(|(kind, ..)| *kind == self).map_or("#000", |(_, colour, _)| colour)
    }
}

/// The whole picture.
pub(super) fn draw(bars: &[Bar<'_>]) -> String {
    let step = TITLE + BAR + GAP;
    let height = MARGIN + bars.len() * step + KINDS.len() * 22 + MARGIN;
    let full = WIDTH + 2 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {full} {height}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"{full}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    let mut put = |text: String| {
        svg.push_str(&text);
        svg.push('\n');
    };
    for (index, Bar { level, format }) in bars.iter().enumerate() {
        let top = MARGIN + index * step;
        let y = top + TITLE;
        let pieces = level.image.map().extents().len();
        let pieces = if pieces == 1 { "one piece".to_owned() } else { format!("{pieces} pieces") };
        let below = index.checked_sub(1).and_then(|below| bars.get(below));
        let name = below
            .and_then(|below| level.path.strip_prefix(below.level.path.as_str()))
            .map_or(level.path.as_str(), |name| name.trim_start_matches('/'));
        let size = format_size(level.image.len());
        put(format!(
            "<text x=\"{MARGIN}\" y=\"{}\"><tspan font-weight=\"bold\">{}</tspan>  {} · {size} · {pieces}</text>",
            top + 15,
            escaped(name),
            escaped(format),
        ));
        for (from, to, kind) in columns(level.image.map().extents(), level.image.len()) {
            let (x, width) = (MARGIN + from, to - from);
            put(format!(
                "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{BAR}\" fill=\"{}\"/>",
                kind.colour()
            ));
        }
        put(format!(
            "<rect x=\"{MARGIN}\" y=\"{y}\" width=\"{WIDTH}\" height=\"{BAR}\" fill=\"none\" stroke=\"#333\"/>"
        ));
        let next = bars.get(index + 1).and_then(|next| next.level.span);
        if let Some((from, to)) = next {
            let x = |byte: u64| MARGIN as f64 + WIDTH as f64 * byte as f64 / level.image.len().max(1) as f64;
            let (left, right) = (x(from), x(to).max(x(from) + 1.5));
            let (bottom, next_top) = (y + BAR, y + BAR + GAP + TITLE);
            put(format!(
                "<rect x=\"{left:.1}\" y=\"{y}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"none\" stroke=\"#b3261e\" \
                 stroke-width=\"2\"/>",
                right - left
            ));
            put(format!(
                "<polygon points=\"{left:.1},{bottom} {right:.1},{bottom} {},{next_top} {MARGIN},{next_top}\" \
                 fill=\"#b3261e\" fill-opacity=\"0.08\" stroke=\"#b3261e\" stroke-opacity=\"0.5\"/>",
                MARGIN + WIDTH
            ));
        }
    }
    let legend = MARGIN + bars.len() * step;
    let last = bars.last().map(|bar| &bar.level.image);
    for (index, (kind, colour, meaning)) in KINDS.iter().enumerate() {
        let y = legend + index * 22;
        let sum: u64 = last.map_or(0, |image| {
            image
                .map()
                .extents()
                .iter()
                .filter(|extent| Colour::of(extent) == *kind)
                .map(|extent| extent.len)
                .sum()
        });
        put(format!(
            "<rect x=\"{MARGIN}\" y=\"{y}\" width=\"14\" height=\"14\" fill=\"{colour}\" stroke=\"#333\"/>\
             <text x=\"{}\" y=\"{}\">{meaning} ({} of the last image)</text>",
            MARGIN + 22,
            y + 12,
            format_size(sum)
        ));
    }
    svg.push_str("</svg>\n");
    svg
}

/// The kinds of the pixels of a bar, with equal neighbours merged: first pixel, the one behind the last,
/// kind.
fn columns(extents: &[Extent], len: u64) -> Vec<(usize, usize, Colour)> {
    let mut columns: Vec<(usize, usize, Colour)> = Vec::new();
    let mut rest = extents.iter().peekable();
    for pixel in 0..WIDTH {
        let edge = |pixel: usize| (u128::from(len) * pixel as u128 / WIDTH as u128) as u64;
        let (from, to) = (edge(pixel), edge(pixel + 1).max(edge(pixel) + 1));
        let mut sums = [0_u64; KINDS.len()];
        while let Some(extent) = rest.peek() {
            let (start, end) = (extent.start.max(from), extent.end().min(to));
            let kind = KINDS.iter().position(|(kind, ..)| *kind == Colour::of(extent));
            if let Some(sum) = kind.and_then(|kind| sums.get_mut(kind)) {
                *sum += end.saturating_sub(start);
            }
            if extent.end() >= to {
                break;
            }
            rest.next();
        }
        // What has bytes is never hidden by zeroes around it.
        let [data, zero, encoded] = sums;
        let kind = if encoded > 0 && encoded >= data {
            Colour::Encoded
        } else if data > 0 || zero == 0 {
            Colour::Data
        } else {
            Colour::Zero
        };
        match columns.last_mut() {
            Some((_, end, last)) if *last == kind => *end = pixel + 1,
            _ => columns.push((pixel, pixel + 1, kind)),
        }
    }
    columns
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_add_up_and_small_pieces_show() {
        let extent = |start, len, place| Extent { start, len, place };
        let data = |offset| Place::Data { source: 0, offset };
        let len = 960 * 1000;
        let extents = [
            extent(0, 480_000, Place::Zero),
            extent(480_000, 1, data(0)),
            extent(480_001, len - 480_001 - 96_000, Place::Zero),
            extent(len - 96_000, 96_000, Place::Encoded { layer: 0, offset: 0 }),
        ];
        let columns = columns(&extents, len);
        let expected = [
            (0, 480, Colour::Zero),
            (480, 481, Colour::Data),
            (481, 864, Colour::Zero),
            (864, 960, Colour::Encoded),
        ];
        assert_eq!(columns, expected);
    }

    #[test]
    fn an_image_of_fewer_bytes_than_pixels_is_drawn() {
        let extents = [Extent { start: 0, len: 10, place: Place::Zero }];
        assert_eq!(columns(&extents, 10), [(0, 960, Colour::Zero)]);
    }
}
