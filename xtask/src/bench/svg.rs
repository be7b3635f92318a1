//! Bar charts as SVG, written by hand: a chart of ten bars needs no library.
//! Never shows a bar that does not begin at zero.

use std::fmt::Write;

/// One bar.
pub(crate) struct Bar<'a> {
    pub(crate) label: &'a str,
    /// None: no bar, only the note.
    pub(crate) value: Option<f64>,
    pub(crate) note: String,
    pub(crate) kind: Kind,
}

/// How a bar is coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ours,
    Peer,
    Other,
}

impl Kind {
    /// Whose bar it is.
    pub(crate) fn of(ours: bool, peer: bool) -> Kind {
        match (ours, peer) {
            (true, _) => Kind::Ours,
            (false, true) => Kind::Peer,
            (false, false) => Kind::Other,
        }
    }
}

const WIDTH: f64 = 760.0;
const LABELS: f64 = 190.0;
const NOTES: f64 = 130.0;
const ROW: f64 = 24.0;
const TOP: f64 = 44.0;

/// Horizontal bars under a title; `mark` is a line at that value.
pub(crate) fn bars(title: &str, bars: &[Bar<'_>], mark: Option<f64>) -> String {
    let largest =
        bars.iter().filter_map(|bar| bar.value).chain(mark).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let length = |value: f64| value.max(0.0) / largest * (WIDTH - LABELS - NOTES);
    let height = TOP + ROW * bars.len() as f64 + 12.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
         <title>{title}</title>\n\
         <style>text{{font:13px sans-serif;fill:#333}}.t{{font-weight:bold}}.ours{{fill:#0a7d4f}}.peer{{fill:#5b7db1}}\
         .other{{fill:#a0a0a0}}line{{stroke:#c33;stroke-dasharray:4 3}}\
         @media(prefers-color-scheme:dark){{text{{fill:#ddd}}}}</style>\n\
         <text class=\"t\" x=\"8\" y=\"24\">{title}</text>\n",
        title = escaped(title)
    );
    for (index, bar) in bars.iter().enumerate() {
        let y = TOP + ROW * index as f64;
        let class = match bar.kind {
            Kind::Ours => "ours",
            Kind::Peer => "peer",
            Kind::Other => "other",
        };
        let end = LABELS + length(bar.value.unwrap_or(0.0));
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LABELS - 8.0,
            y + 15.0,
            escaped(bar.label)
        );
        if bar.value.is_some() {
            let _ = writeln!(
                svg,
                "<rect class=\"{class}\" x=\"{LABELS:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
                end - LABELS,
                ROW - 5.0
            );
        }
        let _ =
            writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", end + 6.0, y + 15.0, escaped(&bar.note));
    }
    if let Some(mark) = mark {
        let x = LABELS + length(mark);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
            TOP - 6.0,
            height - 8.0
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_values() {
        let bar = |value| Bar { label: "a<b", value, note: "n".into(), kind: Kind::Ours };
        let svg = bars("t & u", &[bar(Some(100.0)), bar(Some(50.0)), bar(None)], Some(100.0));
        let full = WIDTH - LABELS - NOTES;
        assert!(svg.contains(&format!("width=\"{full:.1}\"")), "{svg}");
        assert!(svg.contains(&format!("width=\"{:.1}\"", full / 2.0)), "{svg}");
        assert_eq!(svg.matches("<rect").count(), 2);
        assert!(svg.contains("t &amp; u") && svg.contains("a&lt;b") && !svg.contains("a<b"));
    }

    #[test]
    fn nothing_measured_is_an_empty_chart() {
        assert!(!bars("t", &[], None).contains("NaN"));
    }
}
