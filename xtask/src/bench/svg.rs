//! Bar charts as SVG, written by hand: bars and their labels need no library and no fonts.
//! Never shows a bar that does not begin at zero.

use std::fmt::Write;

/// Label, value (none: no bar, only the note), note.
pub(crate) type Bar<'a> = (&'a str, Option<f64>, String);

const WIDTH: f64 = 760.0;
const LABELS: f64 = 190.0;
const NOTES: f64 = 130.0;
const ROW: f64 = 24.0;
const TOP: f64 = 44.0;

/// Horizontal bars under a title; `mark` is a line at that value.
pub(crate) fn bars(title: &str, bars: &[Bar<'_>], mark: Option<f64>) -> String {
    let largest = bars.iter().filter_map(|bar| bar.1).chain(mark).fold(f64::MIN_POSITIVE, f64::max);
    let length = |value: f64| value.max(0.0) / largest * (WIDTH - LABELS - NOTES);
    let height = TOP + ROW * bars.len() as f64 + 12.0;
    let title = escaped(title);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n<title>{title}</title>\n\
         <style>text{{font:13px sans-serif;fill:#333}}.t{{font-weight:bold}}.becket{{fill:#0a7d4f}}.ublk{{fill:#5b7db1}}\
         .other{{fill:#a0a0a0}}line{{stroke:#c33;stroke-dasharray:4 3}}\
         @media(prefers-color-scheme:dark){{text{{fill:#ddd}}}}</style>\n\
         <text class=\"t\" x=\"8\" y=\"24\">{title}</text>\n"
    );
    for (index, (label, value, note)) in bars.iter().enumerate() {
        let y = TOP + ROW * index as f64;
        let class = ["becket", "ublk"].into_iter().find(|word| label.contains(word)).unwrap_or("other");
        let wide = length(value.unwrap_or(0.0));
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n\
             <rect class=\"{class}\" x=\"{LABELS:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{:.1}\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LABELS - 8.0,
            y + 15.0,
            escaped(label),
            ROW - 5.0,
            LABELS + wide + 6.0,
            y + 15.0,
            escaped(note)
        );
    }
    if let Some(x) = mark.map(|mark| LABELS + length(mark)) {
        let (top, bottom) = (TOP - 6.0, height - 8.0);
        let _ = writeln!(svg, "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top:.1}\" y2=\"{bottom:.1}\"/>");
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_values() {
        let bar = |value| ("a<b", value, "n".to_owned());
        let svg = bars("t & u", &[bar(Some(100.0)), bar(Some(50.0)), bar(None)], Some(100.0));
        let full = WIDTH - LABELS - NOTES;
        for width in [full, full / 2.0, 0.0] {
            assert!(svg.contains(&format!(" width=\"{width:.1}\"")), "{svg}");
        }
        assert!(svg.contains("t &amp; u") && svg.contains("a&lt;b") && !svg.contains("a<b"));
        assert!(!bars("t", &[], None).contains("NaN"), "nothing measured is an empty chart");
    }
}
