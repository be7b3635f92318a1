//! What types of partitions are called: the words of sfdisk(8).

/// A type and its name in each line.
const TYPES: &str = include_str!("types.txt");

impl super::Partition {
    /// What its type is called, where that is known.
    pub fn type_name(&self) -> Option<&'static str> {
        TYPES
            .lines()
            .filter_map(|line| line.split_once(' '))
            .find(|(type_, _)| *type_ == self.type_)
            .map(|one| one.1)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn each_name_is_that_of_sfdisk() {
        let said = |label| Command::new("sfdisk").args(["-T", "--label", label]).output();
        let (Ok(gpt), Ok(dos)) = (said("gpt"), said("dos")) else {
            return println!("partition::types::each_name_is_that_of_sfdisk ... skipped: needs sfdisk");
        };
        let theirs = [gpt.stdout, dos.stdout].map(|text| String::from_utf8(text).unwrap().to_lowercase());
        for line in TYPES.lines() {
            let (type_, name) = line.split_once(' ').unwrap();
            let type_ = type_.strip_prefix("0x0").or(type_.strip_prefix("0x")).unwrap_or(type_);
            let found = theirs.iter().flat_map(|text| text.lines()).any(|line| {
                let (first, rest) = line.trim().split_once(' ').unwrap_or_default();
                first == type_ && rest.trim() == name.to_lowercase()
            });
            assert!(found, "{line}");
        }
        assert!(TYPES.lines().count() > 90);
    }
}
