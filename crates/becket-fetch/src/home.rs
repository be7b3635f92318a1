//! Where a user's files are, by the environment.

use std::ffi::OsString;
use std::path::PathBuf;

/// The value of a variable that is set, and not empty.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Whether one of these is.
pub(crate) fn is_any_set(names: &[&str]) -> bool {
    names.iter().any(|name| variable(name).is_some())
}

/// The store: `/var/cache/becket` of root, and in the user's cache directory of others.
pub(crate) fn store(variable: impl Fn(&str) -> Option<OsString>, is_root: bool) -> Option<PathBuf> {
    if let Some(dir) = variable("BECKET_STORE") {
        return Some(dir.into());
    }
    // The XDG specification has a relative path ignored.
    let named = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if is_root {
        return Some(PathBuf::from("/var/cache/becket"));
    }
    let home = || Some(named("HOME")?.join(".cache"));
    Some(named("XDG_CACHE_HOME").or_else(home)?.join("becket"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_store_of_a_user_is_below_the_home_directory_if_nothing_else_is_said() {
        let of = |set: &[(&str, &str)], is_root| {
            let variable = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, it)| it.into());
            store(variable, is_root).map(|dir| dir.to_str().unwrap().to_owned())
        };
        let (home, cache, own) = (("HOME", "/h"), ("XDG_CACHE_HOME", "/c"), ("BECKET_STORE", "/s"));
        assert_eq!(of(&[home], false).as_deref(), Some("/h/.cache/becket"));
        assert_eq!(of(&[home, cache], false).as_deref(), Some("/c/becket"));
        assert_eq!(of(&[home, cache, own], false).as_deref(), Some("/s"));
        assert_eq!(of(&[own], true).as_deref(), Some("/s"));
        assert_eq!(of(&[home, ("BECKET_STORE", "s")], false).as_deref(), Some("s"), "as by --store s");
        assert_eq!(of(&[], true).as_deref(), Some("/var/cache/becket"));
        assert_eq!(of(&[], false), None);
        assert_eq!(of(&[("HOME", "relative")], false), None);
    }

    #[test]
    fn who_has_no_place_for_a_store_hears_what_to_set() {
        let error = crate::Error::NoStore;
        for name in ["$HOME", "$XDG_CACHE_HOME", "$BECKET_STORE"] {
            assert!(error.to_string().contains(name), "{error}");
        }
        assert!(error.fix().is_some_and(|fix| fix.contains("--store DIR")));
    }
}
