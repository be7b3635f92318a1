//! What the name of a file says about its format, where that decides which other files are opened.
//! It never looks into the file: a guest writes what is inside, and only the host gives a file its name.

use std::path::Path;

use crate::Format;

/// The suffixes of each format that refers to other files; the first is the usual one.
const SUFFIXES: [(Format, &[&str]); 2] =
    [(Format::Qcow2, &["qcow2", "qcow", "qc2"]), (Format::Vmdk, &["vmdk"])];

/// Whether a file's name says that it is of `format`.
pub(crate) fn says(path: &Path, format: Format) -> bool {
    let known = SUFFIXES.iter().find(|(known, _)| *known == format);
    let suffix = path.extension().unwrap_or_default();
    known.is_some_and(|(_, known)| known.iter().any(|known| suffix.eq_ignore_ascii_case(known)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_what_its_suffix_says() {
        for (path, format, says_so) in [
            ("/a/disk.qcow2", Format::Qcow2, true),
            ("disk.v2.QCOW2", Format::Qcow2, true),
            ("disk.qc2", Format::Qcow2, true),
            ("disk.vmdk", Format::Vmdk, true),
            ("disk.vmdk", Format::Qcow2, false),
            ("disk.qcow2.raw", Format::Qcow2, false),
            ("disk.img", Format::Qcow2, false),
            (".qcow2", Format::Qcow2, false),
            ("qcow2", Format::Qcow2, false),
            ("/dev/vg/disk", Format::Qcow2, false),
            ("disk.qcow2 (deleted)", Format::Qcow2, false),
            ("disk.raw", Format::Raw, false),
        ] {
            assert_eq!(says(Path::new(path), format), says_so, "{path} {format}");
        }
    }
}
