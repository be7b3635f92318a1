//! `becket attach --tab NAME...`: what the machine's table says of these names.
//! Never cares about other lines: a mistake there is theirs.

use super::{attach_from::given, common, common::Job};
use crate::{
    failure::Failure,
    tab::{self, Entry, Wrong},
};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// The jobs of these names. The command line's device options apply to each line, unless the line sets them
/// itself.
pub(super) fn jobs(table: &Path, names: &[PathBuf]) -> Result<Vec<Job>, Failure> {
    let text =
        tab::text(table).map_err(|error| Failure::io(format!("cannot read {}", table.display()), &error))?;
    choose(table, &text, names, &given(std::env::args_os()))
}

fn choose(table: &Path, text: &[u8], names: &[PathBuf], given: &[OsString]) -> Result<Vec<Job>, Failure> {
    let mut entries = tab::entries(text, given);
    let mut jobs = Vec::new();
    for name in names {
        let named =
            |found: &Result<Entry, Wrong>| matches!(found, Ok(entry) if Path::new(&entry.name) == name);
        let Some(at) = entries.iter().position(named) else { return Err(missing(table, name, &entries)) };
        if let Ok(Entry { line, image, device, export, .. }) = entries.swap_remove(at) {
            let origin = Some(format!("{} line {line}", table.display()));
            jobs.push(Job {
                image,
                options: common::options(&device),
                store: device.image.store,
                trace: device.image.trace,
                key_file: device.key_file,
                export,
                origin,
            });
        }
    }
    Ok(jobs)
}

/// Lines that make no sense are reported here: the name may be in one of them.
fn missing(table: &Path, name: &Path, entries: &[Result<Entry, Wrong>]) -> Failure {
    let failure =
        Failure::new("not_found", format!("{}: no line is named {}", table.display(), name.display()));
    let wrong: Vec<String> = entries
        .iter()
        .filter_map(|found| found.as_ref().err())
        .map(|Wrong { line, why }| format!("line {line} is wrong: {why}"))
        .collect();
    if wrong.is_empty() { failure } else { failure.hint(wrong.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_mistakes_elsewhere_do_not_matter() {
        let text = b"a /a.img ro\nb\nc /c.img";
        let names = |names: &[&str]| -> Vec<PathBuf> { names.iter().map(PathBuf::from).collect() };
        let jobs = choose(Path::new("/t"), text, &names(&["c", "a"]), &["--shared".into()]).unwrap();
        assert_eq!(jobs[0].image, Path::new("/c.img"));
        assert_eq!(jobs[1].options.name.as_deref(), Some("a"));
        assert!(jobs[1].options.open.read_only && jobs[1].options.open.shared);
        assert_eq!(jobs[1].origin.as_deref(), Some("/t line 1"));
        let failure = choose(Path::new("/t"), text, &names(&["a", "b"]), &[]).unwrap_err();
        assert_eq!(failure.message, "/t: no line is named b");
        assert!(failure.hint.unwrap().starts_with("line 2 is wrong: it has no image"));
        assert!(choose(Path::new("/t"), text, &names(&["a", "a"]), &[]).is_err(), "one name, one device");
        let failure = super::jobs(Path::new("/nowhere/tab"), &names(&["a"])).unwrap_err();
        assert_eq!(failure.message, "cannot read /nowhere/tab: no such file or directory");
    }
}
