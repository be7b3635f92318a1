//! What went wrong, in losetup's words, on standard error.
//! Never ends the program.

use super::device::is;
use rustix::io::Errno;
use std::io::{self, Write as _};
use std::path::Path;

/// Why something was not done, in losetup's words; and what there is to know besides.
#[derive(Debug)]
pub(super) struct Trouble {
    text: String,
    more: Option<String>,
}

impl Trouble {
    pub(super) fn new(text: String) -> Trouble {
        Trouble { text, more: None }
    }

    pub(super) fn because(what: &str, error: &io::Error) -> Trouble {
        Trouble::new(format!("{what}: {}", words(error)))
    }

    pub(super) fn more(self, more: String) -> Trouble {
        Trouble { more: Some(more), ..self }
    }

    pub(super) fn tell(&self) {
        warn(&self.text);
        self.more.as_deref().inspect(|more| warn(more));
    }
}

/// The system's own words for an error, as scripts know them.
pub(super) fn words(error: &io::Error) -> String {
    crate::failure::without_errno(&error.to_string())
}

pub(super) fn warn(text: &str) {
    say(&format!("losetup: {text}"));
}

/// To standard error, as far as there is one.
pub(super) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// What a container's administrator has to fix, where that is why it failed.
pub(super) fn explained(path: &Path, opened: bool, trouble: Trouble, error: &io::Error) -> Trouble {
    let shown = path.display();
    if is(error, Errno::PERM) && !opened {
        trouble.more(format!(
            "{shown}: opening it is forbidden here; a container's device rules must allow b 7:* rwm"
        ))
    } else if is(error, Errno::PERM) || (is(error, Errno::ACCESS) && opened) {
        trouble.more("setting up a loop device needs CAP_SYS_ADMIN in the first user namespace".to_owned())
    } else if [Errno::NXIO, Errno::NODEV].iter().any(|&errno| is(error, errno)) && !opened {
        trouble.more(format!("{shown} is stale: the kernel has no such device"))
    } else {
        trouble
    }
}

/// Names the users of a detached device. Detaching has worked, so this is not a failure.
pub(super) fn still_used(device: &str, users: &[becket_device::User]) {
    if !users.is_empty() {
        let users: Vec<String> = users.iter().map(ToString::to_string).collect();
        warn(&format!("{device}: goes when its last user does: {}", users.join(", ")));
    }
}
