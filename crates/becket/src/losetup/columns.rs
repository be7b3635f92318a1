//! The columns of a list: their names, what is in them, and how they look.
//! Never asks a device: see `device`.

/// What a column is in JSON, and which way it leans in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Left, a string.
    Text,
    /// Right, a number.
    Number,
    /// Right, `1` or `0`; true or false.
    Flag,
}

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    Name,
    Autoclear,
    BackFile,
    BackIno,
    BackMajMin,
    BackMaj,
    BackMin,
    MajMin,
    Maj,
    Min,
    Offset,
    Partscan,
    Ref,
    Ro,
    SizeLimit,
    Dio,
    LogSec,
}

/// A column's name, its kind, and its meaning for people.
type About = (Column, &'static str, Shape, &'static str);

/// All columns, in the order of `--output-all`.
pub(super) const ALL: [About; 17] = [
    (Column::Name, "NAME", Shape::Text, "path of the device"),
    (Column::Autoclear, "AUTOCLEAR", Shape::Flag, "detached when its last user closes it"),
    (Column::BackFile, "BACK-FILE", Shape::Text, "file behind the device"),
    (Column::BackIno, "BACK-INO", Shape::Number, "inode number of that file"),
    (Column::BackMajMin, "BACK-MAJ:MIN", Shape::Text, "device number of that file's file system"),
    (Column::BackMaj, "BACK-MAJ", Shape::Text, "its major part"),
    (Column::BackMin, "BACK-MIN", Shape::Text, "its minor part"),
    (Column::MajMin, "MAJ:MIN", Shape::Text, "device number"),
    (Column::Maj, "MAJ", Shape::Number, "its major part"),
    (Column::Min, "MIN", Shape::Number, "its minor part"),
    (Column::Offset, "OFFSET", Shape::Number, "first byte of the file on the device"),
    (Column::Partscan, "PARTSCAN", Shape::Flag, "the kernel reads the partition table"),
    (Column::Ref, "REF", Shape::Text, "reference given by --loop-ref, else the file's path"),
    (Column::Ro, "RO", Shape::Flag, "read-only"),
    (Column::SizeLimit, "SIZELIMIT", Shape::Number, "most bytes of the file on the device; 0 for all"),
    (Column::Dio, "DIO", Shape::Flag, "the page cache of the file is bypassed"),
    (Column::LogSec, "LOG-SEC", Shape::Number, "logical sector size in bytes"),
];

/// The default columns.
pub(super) const DEFAULT: [Column; 8] = [
    Column::Name,
    Column::SizeLimit,
    Column::Offset,
    Column::Autoclear,
    Column::Ro,
    Column::BackFile,
    Column::Dio,
    Column::LogSec,
];

/// More columns than these are refused.
const MOST: usize = ALL.len() * 2;

impl Column {
    fn about(self) -> &'static About {
        // Declared and listed in the same order, which a test holds.
        &ALL[self as usize]
    }

    pub(super) fn name(self) -> &'static str {
        self.about().1
    }

    pub(super) fn kind(self) -> Shape {
        self.about().2
    }
}

/// Why a list of columns is none; what there is to say about it, if anything.
pub(super) type Refused = Option<String>;

/// The columns of `--output LIST`; those of `+LIST` come behind `present`.
pub(super) fn parse(list: &str, present: &[Column]) -> Result<Vec<Column>, Refused> {
    let (mut columns, list) = match list.strip_prefix('+') {
        Some(more) => (present.to_vec(), more),
        None => (Vec::new(), list),
    };
    let mut rest = list;
    loop {
        let (name, after) = match rest.split_once(',') {
            // A comma at the very end belongs to the name.
            Some((name, after)) if !after.is_empty() => (name, Some(after)),
            _ => (rest, None),
        };
        if name.is_empty() || columns.len() == MOST {
            return Err(None);
        }
        let known = ALL.iter().find(|(_, known, ..)| known.eq_ignore_ascii_case(name));
        columns.push(known.ok_or_else(|| Some(format!("unknown column: {rest}")))?.0);
        match after {
            Some(after) => rest = after,
            None => return Ok(columns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_column_knows_itself() {
        for (column, name, kind, _) in ALL {
            assert_eq!((column.name(), column.kind()), (name, kind));
        }
    }

    #[test]
    fn lists_of_columns() {
        use Column::*;
        assert_eq!(parse("name,Back-File", &[Ro]), Ok(vec![Name, BackFile]));
        assert_eq!(parse("+DIO,DIO", &[Ro]), Ok(vec![Ro, Dio, Dio]));
        assert_eq!(parse("FOO,NAME", &[]), Err(Some("unknown column: FOO,NAME".to_owned())));
        assert_eq!(parse("NAME,", &[]), Err(Some("unknown column: NAME,".to_owned())));
        for silent in ["", "+", ",NAME", "NAME,,RO"] {
            assert_eq!(parse(silent, &[]), Err(None), "{silent}");
        }
        let many = ["RO"; MOST];
        assert_eq!(parse(&many.join(","), &[]).map(|columns| columns.len()), Ok(MOST));
        assert_eq!(parse(&format!("RO,{}", many.join(",")), &[]), Err(None));
    }
}
