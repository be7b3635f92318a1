//! deny.toml: the rules that the tests of `dependencies` hold the lock file to, written down for cargo-deny.
//! It never says more or less than those tests: both are made of the lists here.

use std::fmt::Write as _;
use std::path::PathBuf;

use crate::exec::workspace;

/// Licences that let becket be `MIT OR Apache-2.0`.
pub(crate) const LICENCES: [&str; 8] = [
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "Unicode-3.0",
    "Unlicense",
];

/// Packages that make a build need libclang.
pub(crate) const BANNED: [&str; 2] = ["bindgen", "clang-sys"];

/// Where packages come from.
pub(crate) const REGISTRY: &str = "https://github.com/rust-lang/crates.io-index";

const HEAD: &str = "\
# What becket may be built from, for cargo-deny. Written by `cargo xtask audit`; the same rules are tests of xtask's (`dependencies`),
# which need no network. Advisories need the RustSec database, which cargo-deny fetches: docs/dependencies.md says how.
";

pub(crate) fn path() -> PathBuf {
    workspace().join("deny.toml")
}

/// The file's text.
pub(crate) fn rules() -> String {
    let mut text = HEAD.to_owned();
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        r#"
[graph]
targets = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"]

[licenses]
# What may be, whether or not something is.
unused-allowed-license = "allow"
allow = [{licences}]

[bans]
# A second version of a package is the business of who needs it; docs/dependencies.md shows them.
multiple-versions = "allow"
deny = [{banned}]

[sources]
unknown-registry = "deny"
unknown-git = "deny"
allow-registry = ["{REGISTRY}"]

[advisories]
yanked = "deny"
"#,
        licences = quoted(&LICENCES),
        banned = quoted(&BANNED),
    );
    text
}

fn quoted(words: &[&str]) -> String {
    words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_what_the_tests_go_by() {
        let written = std::fs::read_to_string(path()).unwrap();
        assert!(written == rules(), "run `cargo xtask audit`: {written}");
        let licence = LICENCES[7];
        assert!(written.contains(&format!(", \"{licence}\"]")) && written.contains(REGISTRY), "{written}");
    }
}
