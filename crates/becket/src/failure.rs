//! Errors, as the command line reports them: what failed, why, and what to do next.
//! Never drops a reason: an error from a lower room keeps its kind and its hint.

use serde_json::{Value, json};
use std::{ffi::OsStr, fmt, io, path::Path};

/// Why a command did not do all that it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// For programs: one word with underscores.
    pub(crate) kind: String,
    /// For people: what failed and why.
    pub(crate) message: String,
    /// The next step.
    pub(crate) hint: Option<String>,
    /// Exit status.
    pub(crate) status: u8,
}

/// All kinds that a program can meet, those of the lower rooms included: `error_kind` of
/// `docs/becket.schema.json`.
const KINDS: &[&str] = &[
    "not_found",
    "permission",
    "not_an_image",
    "invalid_option",
    "in_use",
    "name_in_use",
    "busy",
    "unsupported",
    "read_only",
    "ambiguous",
    "timeout",
    "server",
    "io",
    "usage",
    "mount",
    "umount",
    "guard_killed",
    "not_a_directory",
    "command",
    "not_mounted",
    "not_ours",
    "partitioned",
    "no_partition",
    "exists",
    "not_a_file",
    "interrupted",
    "luks",
    "url",
    "origin",
    "origin_away",
    "source_changed",
    "source_damaged",
    "stream",
    "store",
];

/// There is no reader to report to: nobody meets it.
pub(crate) const BROKEN_PIPE: &str = "broken_pipe";

impl Failure {
    pub(crate) fn new(kind: &str, message: impl Into<String>) -> Self {
        debug_assert!(kind == BROKEN_PIPE || KINDS.contains(&kind), "{kind} is not described");
        Self { kind: kind.to_owned(), message: message.into(), hint: None, status: 1 }
    }

    /// Wrong usage that only shows once the arguments are looked at together.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { status: 2, ..Self::new("usage", message) }
    }

    pub(crate) fn io(what: impl fmt::Display, error: &io::Error) -> Self {
        Self::new("io", format!("{what}: {}", plain(error)))
    }

    /// An error of becket-device, reported as the failure to `verb` (like `attach`) `target` (like
    /// `disk.img`).
    pub(crate) fn device(verb: &str, target: impl fmt::Display, error: &becket_device::Error) -> Self {
        let kind = serde_json::to_value(error.kind()).ok();
        let kind = kind.as_ref().and_then(Value::as_str).unwrap_or("io");
        let (target, reason) = (target.to_string(), without_errno(&error.to_string()));
        // The lower rooms name the image themselves; once is enough.
        let reason = reason.strip_prefix(&target).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(&reason);
        let target = named(OsStr::new(&target)).unwrap_or(target);
        Self { hint: error.hint(), ..Self::new(kind, format!("cannot {verb} {target}: {reason}")) }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(crate) fn status(mut self, status: u8) -> Self {
        self.status = status;
        self
    }

    /// The same among the `"errors"` of a command with several targets.
    pub(crate) fn to_json_of(&self, target: &OsStr) -> Value {
        let mut value = self.to_json();
        value["target"] =
            named(target).map_or_else(|| json!(becket_device::path_text(Path::new(target))), Value::from);
        value
    }

    /// The object under `"error"`.
    pub(crate) fn to_json(&self) -> Value {
        json!({ "kind": self.kind, "message": self.message, "hint": self.hint })
    }
}

/// A URL without its query, which may be a signature.
fn named(target: &OsStr) -> Option<String> {
    becket_fetch::is_remote(target).then(|| becket_fetch::named(target))
}

/// Standard output is gone: there is no reader to report to.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::new(BROKEN_PIPE, "");
        }
        Self::io("cannot write to standard output", &error)
    }
}

/// The system's reason, ready to stand in the middle of a sentence.
pub(crate) fn plain(error: &io::Error) -> String {
    let text = without_errno(&error.to_string());
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

/// People read the words; ` (os error N)` beside them is noise.
pub(crate) fn without_errno(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out += part.split_once(')').map_or(part, |(_, rest)| rest);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kinds_are_described() {
        let schema: Value = serde_json::from_str(include_str!("../../../docs/becket.schema.json")).unwrap();
        assert_eq!(schema["$defs"]["error_kind"]["enum"], json!(KINDS));
    }

    #[test]
    fn reasons_are_reported_plainly() {
        assert_eq!(plain(&io::Error::from_raw_os_error(2)), "no such file or directory");
        assert_eq!(without_errno("a (os error 2): b (os error 13)"), "a: b");
    }
}
