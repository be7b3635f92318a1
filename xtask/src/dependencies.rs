//! The packages that becket is built from: each has a licence that allows ours, comes from the one registry,
//! and has a reason.
//! It asks cargo about the lock file, and changes nothing.

use std::collections::BTreeSet;

use crate::audit::{list, metadata, text};
use crate::exec::workspace;

/// The words of a list in deny.toml.
fn rule(key: &str) -> Vec<String> {
    let text = std::fs::read_to_string(workspace().join("deny.toml")).unwrap();
    let (_, rest) = text.split_once(&format!("\n{key} = [")).unwrap();
    let (list, _) = rest.split_once(']').unwrap();
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Whether one of the choices of a licence expression is allowed. `AND` binds closer than `OR`; parentheses
/// come first.
fn allowed(expression: &str, licences: &[String]) -> bool {
    if let Some((before, rest)) = expression.rsplit_once('(')
        && let Some((inside, after)) = rest.split_once(')')
    {
        let inside = if allowed(inside, licences) { licences[0].as_str() } else { "none" };
        return allowed(&format!("{before}{inside}{after}"), licences);
    }
    let choices = expression.split('/').flat_map(|part| part.split(" OR "));
    choices
        .into_iter()
        .any(|choice| choice.split(" AND ").all(|one| licences.iter().any(|licence| licence == one.trim())))
}

#[test]
fn expressions_are_understood() {
    let licences = rule("allow");
    assert_eq!(licences.len(), 11, "{licences:?}");
    for good in ["MIT", "MIT/Apache-2.0", "GPL-3.0 OR MIT", "(MIT OR Apache-2.0) AND Unicode-3.0"] {
        assert!(allowed(good, &licences), "{good}");
    }
    for bad in ["", "GPL-2.0-only", "MIT AND GPL-3.0", "(GPL-2.0 OR GPL-3.0) AND MIT", "LGPL-2.1/MPL-2.0"] {
        assert!(!allowed(bad, &licences), "{bad}");
    }
}

#[test]
fn every_package_may_be_used_and_is_where_the_lock_file_says() {
    let metadata = metadata(workspace(), false).unwrap();
    let packages = list(&metadata["packages"]);
    assert!(packages.len() > 50, "{} packages", packages.len());
    let (licences, banned, registries) = (rule("allow"), rule("deny"), rule("allow-registry"));
    for package in packages {
        let (name, license, source) =
            (text(&package["name"]), text(&package["license"]), text(&package["source"]));
        assert!(allowed(license, &licences), "{name}: its licence is {license:?}");
        let registry = source.is_empty() || source == format!("registry+{}", registries[0]);
        assert!(registry, "{name} comes from {source:?}");
        assert!(!banned.iter().any(|word| word == name), "{name} is not to be needed");
    }
}

#[test]
fn every_dependency_has_its_reason() {
    let document = std::fs::read_to_string(workspace().join("docs/ARCHITECTURE.md")).unwrap();
    let (_, section) = document.split_once("## Dependencies and why each is there").unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let named: BTreeSet<&str> = rows.flat_map(|names| names.split(", ")).collect();
    let (all, fuzz) =
        (metadata(workspace(), false).unwrap(), metadata(&workspace().join("fuzz"), true).unwrap());
    let ours = list(&all["packages"]).iter().filter(|package| package["source"].is_null());
    let used: BTreeSet<&str> = ours
        .chain(list(&fuzz["packages"]))
        .flat_map(|package| list(&package["dependencies"]))
        .filter(|dependency| dependency["source"].is_string())
        .map(|dependency| text(&dependency["name"]))
        .collect();
    let missing: Vec<_> = used.iter().filter(|name| !named.contains(**name)).collect();
    assert!(missing.is_empty(), "docs/ARCHITECTURE.md does not say what {missing:?} are for");
    let gone: Vec<_> =
        named.iter().filter(|name| **name != "crate" && **name != "---" && !used.contains(**name)).collect();
    assert!(gone.is_empty(), "docs/ARCHITECTURE.md speaks of {gone:?}, which nobody uses");
}
