//! `becket attach --tab NAME...`: what the machine's table says of these names.
//! Never cares about other lines: a mistake there is theirs.

use super::{
    attach_from::given,
    common,
    common::{Asked, Job, Missing},
};
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
pub(super) fn jobs(table: &Path, names: &[PathBuf]) -> Result<Vec<Asked>, Failure> {
    let text =
        tab::text(table).map_err(|error| Failure::io(format!("cannot read {}", table.display()), &error))?;
    Ok(choose(table, &text, names, &given(std::env::args_os())))
}

fn choose(table: &Path, text: &[u8], names: &[PathBuf], given: &[OsString]) -> Vec<Asked> {
    let entries = tab::entries(text, given);
    let one = |name: &PathBuf| match entries.iter().flatten().find(|entry| Path::new(&entry.name) == name) {
        Some(entry) => Ok(job(table, entry.clone())),
        None => Err(Missing { name: name.clone(), failure: missing(table, name, &entries) }),
    };
    names.iter().map(one).collect()
}

fn job(table: &Path, Entry { line, image, device, export, .. }: Entry) -> Job {
    Job {
        image,
        options: common::options(&device),
        store: device.image.store,
        trace: device.image.trace,
        key_file: device.key_file,
        export,
        origin: Some(format!("{} line {line}", table.display())),
    }
}

/// The line of that name makes no sense, or there is none: the name may be in a line that cannot be read.
fn missing(table: &Path, name: &Path, entries: &[Result<Entry, Wrong>]) -> Failure {
    let table = table.display();
    let wrong = || entries.iter().filter_map(|found| found.as_ref().err());
    let named = |wrong: &&Wrong| wrong.name.as_ref().is_some_and(|found| Path::new(found) == name);
    if let Some(Wrong { line, why, .. }) = wrong().find(named) {
        return Failure::usage(format!("{table} line {line}: {why}"));
    }
    let failure = Failure::new("not_found", format!("{table}: no line is named {}", name.display()));
    let unread = wrong().filter(|wrong| wrong.name.is_none());
    let unread: Vec<_> =
        unread.map(|Wrong { line, why, .. }| format!("line {line} is wrong: {why}")).collect();
    if unread.is_empty() { failure } else { failure.hint(unread.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_mistakes_elsewhere_do_not_matter() {
        let text = b"a /a.img ro\nb\nc /c.img\n'd";
        let names = |names: &[&str]| -> Vec<PathBuf> { names.iter().map(PathBuf::from).collect() };
        let chosen = |names: &[PathBuf], given: &[OsString]| choose(Path::new("/t"), text, names, given);
        let jobs = chosen(&names(&["c", "a"]), &["--shared".into()]);
        let jobs: Vec<Job> = jobs.into_iter().collect::<Result<_, _>>().unwrap();
        assert_eq!(jobs[0].image, Path::new("/c.img"));
        assert_eq!(jobs[1].options.name.as_deref(), Some("a"));
        assert!(jobs[1].options.open.read_only && jobs[1].options.open.shared);
        assert_eq!(jobs[1].origin.as_deref(), Some("/t line 1"));
        let mut jobs = chosen(&names(&["a", "b", "d"]), &[]);
        let none = jobs.remove(2).unwrap_err().failure;
        assert_eq!(none.message, "/t: no line is named d");
        assert!(none.hint.unwrap().starts_with("line 4 is wrong: "), "its name cannot be read");
        let wrong = jobs.remove(1).unwrap_err().failure;
        assert!(wrong.message.starts_with("/t line 2: it has no image"), "{wrong:?}");
        assert!(jobs.remove(0).is_ok());
        let failure = super::jobs(Path::new("/nowhere/tab"), &names(&["a"])).unwrap_err();
        assert_eq!(failure.message, "cannot read /nowhere/tab: no such file or directory");
    }
}
