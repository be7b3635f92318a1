//! Which version of a URL was used last: a link in the store, named by a digest of the URL. Only a hint:
//! whether the server still has that version is for its answer to say.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};

use crate::place::short_digest;

fn link(store: &Path, url: &str) -> PathBuf {
    store.join(format!(".latest-{}", short_digest(url)))
}

/// The directory of that version.
pub(crate) fn of(store: &Path, url: &str) -> Option<PathBuf> {
    let target = fs::read_link(link(store, url)).ok()?;
    // Nothing but a name in the store.
    let mut parts = target.components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(name)), None) => Some(store.join(name)),
        _ => None,
    }
}

/// The version with that directory is used.
pub(crate) fn note(store: &Path, url: &str, id: &str) {
    if of(store, url).is_some_and(|dir| dir.ends_with(id)) {
        return;
    }
    let link = link(store, url);
    let new = link.with_extension(format!("new-{}", std::process::id()));
    // Without it the start is asked for once more.
    if symlink(id, &new).is_ok() && fs::rename(&new, &link).is_err() {
        let _ = fs::remove_file(&new);
    }
}

/// The version with that directory goes.
pub(crate) fn forget(store: &Path, url: &str, dir: &Path) {
    let name = |path: &Path| path.file_name().map(OsString::from);
    if of(store, url).is_some_and(|latest| name(&latest) == name(dir)) {
        let _ = fs::remove_file(link(store, url));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_that_was_used_last_is_known_and_nothing_outside_the_store() {
        let store = tempfile::tempdir().unwrap();
        let store = store.path();
        assert_eq!(of(store, "http://a/1"), None);
        note(store, "http://a/1", "aa");
        note(store, "http://a/2", "cc");
        note(store, "http://a/1", "bb");
        assert_eq!(of(store, "http://a/1"), Some(store.join("bb")));
        forget(store, "http://a/1", &store.join("aa"));
        assert_eq!(of(store, "http://a/1"), Some(store.join("bb")), "another one has gone");
        forget(store, "http://a/1", &store.join("bb"));
        assert_eq!((of(store, "http://a/1"), of(store, "http://a/2")), (None, Some(store.join("cc"))));
        symlink("../outside", link(store, "http://a/3")).unwrap();
        assert_eq!(of(store, "http://a/3"), None);
        assert_eq!(fs::read_dir(store).unwrap().count(), 2, "no link is left over");
    }
}
