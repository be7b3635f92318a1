//! The contestants: how each is attached in the guest, and detached again.
//! Never attaches two at once: what one leaves in the page cache or in the kernel must not cost another.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};

use super::peers::{self, Peer};
use super::record::Entrant;
use crate::vm::{Place, quoted};

/// One contestant. The snippets are bash, run with `$IMAGE` and `$CPUS`; attaching sets `DEVICE`.
pub(crate) struct Contestant {
    pub(crate) entrant: Entrant,
    pub(crate) attach: String,
    pub(crate) detach: String,
}

/// becket, the best of each peer, and the kernel's own ways: those that short scenarios compare.
pub(crate) const MAIN: [&str; 5] =
    ["file", "loop-direct", "becket", "kublk-batch-zero-copy", "rublk-zero-copy"];

/// The contestants, and the programs that they need in the guest.
pub(crate) struct Field {
    pub(crate) contestants: Vec<Contestant>,
    pub(crate) programs: Vec<Place>,
}

/// Where programs go in the guest.
const BIN: &str = "/usr/local/bin";

/// Another build of becket, to be measured beside the checkout's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Other {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
}

impl std::str::FromStr for Other {
    type Err = String;

    /// From `NAME=PATH`.
    fn from_str(text: &str) -> Result<Other, String> {
        let (name, path) = text.split_once('=').ok_or("expected NAME=PATH")?;
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
            return Err(format!("`{name}` is no name: letters, digits and `-` only"));
        }
        Ok(Other { name: name.to_owned(), path: path.into() })
    }
}

impl Field {
    /// A field without contestants.
    pub(crate) fn none() -> Field {
        Field { contestants: Vec::new(), programs: Vec::new() }
    }

    /// Everybody, with this build of becket and others beside it.
    pub(crate) fn all(becket: PathBuf, others: &[Other]) -> Field {
        let mut field = Field::none();
        field.add("file", "the image itself", "DEVICE=$IMAGE", "true");
        field.loop_device("loop-direct", "--direct-io=on");
        field.loop_device("loop-buffered", "--direct-io=off");
        field.program("becket", becket);
        field.becket("becket", "becket", "");
        for mode in ["zero-copy", "batch-zero-copy", "copy", "batch-copy"] {
            field.becket(&format!("becket-{mode}"), "becket", &format!(" --mode {mode}"));
        }
        for other in others {
            field.program(&other.name, other.path.clone());
            field.becket(&other.name, &other.name, "");
        }
        let kublk = peers::kublk();
        field.kublk(&kublk, "kublk-batch-zero-copy", "-b --auto_zc");
        field.kublk(&kublk, "kublk-zero-copy", "--auto_zc");
        field.kublk(&kublk, "kublk-copy", "");
        let rublk = peers::rublk();
        for (name, options) in [("rublk-zero-copy", " -z"), ("rublk-copy", "")] {
            let command = format!("rublk add loop -n 11 -q $CPUS -d 128{options} -f $IMAGE");
            field.peer(&rublk, name, "rublk", &command, "DEVICE=/dev/ublkb11", "rublk del -n 11");
        }
        if let Ok(path) = kublk {
            field.program("kublk", path);
        }
        if let Ok(path) = rublk {
            field.program("rublk", path);
        }
        field
    }

    /// The contestants that a scenario compares by default.
    pub(crate) fn narrowed(mut self, names: &[&str], asked: &[String]) -> Field {
        if asked.is_empty() {
            self.contestants.retain(|one| names.contains(&one.entrant.name.as_str()));
        }
        self
    }

    /// Keeps the contestants with these names; all if none is given.
    pub(crate) fn keep(&mut self, names: &[String]) -> Result<()> {
        for name in names {
            let known = self.contestants.iter().any(|one| one.entrant.name == *name);
            known.then_some(()).with_context(|| {
                let all: Vec<&str> = self.contestants.iter().map(|one| one.entrant.name.as_str()).collect();
                format!("there is no contestant {name}; there are {}", all.join(", "))
            })?;
        }
        if !names.is_empty() {
            self.contestants.retain(|one| names.contains(&one.entrant.name));
        }
        Ok(())
    }

    /// The bash functions `attach NAME` and `detach NAME` for all that can be tried.
    pub(crate) fn functions(&self) -> String {
        let mut text = String::new();
        type Snippet = fn(&Contestant) -> String;
        let parts: [(&str, Snippet); 2] =
            [("attach", |one| one.attach.clone()), ("detach", |one| one.detach.clone())];
        for (function, snippet) in parts {
            let _ = writeln!(text, "{function}() {{\n    case $1 in");
            for one in self.present() {
                let _ = writeln!(text, "    {}) {} ;;", quoted(&one.entrant.name), snippet(one));
            }
            let _ = writeln!(text, "    *) echo \"nobody is called $1\"; return 1 ;;\n    esac\n}}");
        }
        text
    }

    /// The contestants whose program is there.
    pub(crate) fn present(&self) -> impl Iterator<Item = &Contestant> {
        self.contestants.iter().filter(|one| one.entrant.absent.is_none())
    }

    fn program(&mut self, name: &str, host: PathBuf) {
        self.programs.push(Place { host, guest: format!("{BIN}/{name}") });
    }

    /// One more; the snippets are as in [`Contestant`].
    pub(crate) fn add(&mut self, name: &str, about: &str, attach: &str, detach: &str) -> &mut Contestant {
        let at = self.contestants.len();
        self.contestants.push(Contestant {
            entrant: Entrant {
                name: name.to_owned(),
                about: about.to_owned(),
                peer: false,
                ours: false,
                absent: None,
            },
            attach: attach.to_owned(),
            detach: detach.to_owned(),
        });
        &mut self.contestants[at]
    }

    pub(crate) fn loop_device(&mut self, name: &str, option: &str) {
        let command = format!("losetup --find --show {option} $IMAGE");
        self.add(name, &command, &format!("DEVICE=$({command})"), "losetup -d $DEVICE");
    }

    /// becket as it is without options, on the host; `program` is a word for the shell.
    pub(crate) fn becket_on_host(&mut self, program: &str) {
        let attach = format!("DEVICE=$({program} attach $IMAGE)");
        let one = self.add("becket", "becket attach $IMAGE", &attach, &format!("{program} detach $DEVICE"));
        one.entrant.ours = true;
    }

    /// becket over the kernel's loop driver; `program` is a word for the shell.
    pub(crate) fn becket_by_loop(&mut self, program: &str) {
        let attach = format!("DEVICE=$({program} attach --via loop $IMAGE)");
        let detach = format!("{program} detach $DEVICE");
        self.add("becket-loop", "becket attach --via loop", &attach, &detach).entrant.ours = true;
    }

    /// becket over ublk.
    pub(crate) fn becket(&mut self, name: &str, program: &str, options: &str) {
        let command = format!("{program} attach --via ublk{options} $IMAGE");
        let attach = format!("DEVICE=$({command})");
        let one = self.add(name, &command, &attach, &format!("{program} detach $DEVICE"));
        one.entrant.ours = true;
    }

    fn kublk(&mut self, peer: &Peer, name: &str, options: &str) {
        let command = format!("kublk add -t loop -n 10 -q $CPUS -d 128 {options} $IMAGE").replace("  ", " ");
        self.peer(peer, name, "kublk", &command, "DEVICE=/dev/ublkb10", "kublk del -n 10");
    }

    fn peer(&mut self, peer: &Peer, name: &str, program: &str, command: &str, device: &str, detach: &str) {
        let attach = format!("{command} && {device} && [[ -b $DEVICE ]]");
        let absent = peer.as_ref().err().map(|why| format!("{program} could not be built: {why}"));
        let one = self.add(name, command, &attach, detach);
        one.entrant.peer = true;
        one.entrant.absent = absent;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(kublk: Peer) -> Field {
        let mut field = Field::none();
        field.loop_device("loop-direct", "--direct-io=on");
        field.becket("becket-copy", "becket", " --mode copy");
        field.kublk(&kublk, "kublk-copy", "");
        field
    }

    #[test]
    fn a_peer_that_was_not_built_stays_in_the_field() {
        let field = field(Err("no compiler".into()));
        assert_eq!(field.contestants.len(), 3);
        assert_eq!(field.present().count(), 2);
        let absent = field.contestants[2].entrant.absent.as_deref();
        assert_eq!(absent, Some("kublk could not be built: no compiler"));
        assert!(!field.functions().contains("kublk add"));
    }

    #[test]
    fn everybody_has_a_way_in_and_a_way_out() {
        let text = field(Ok("/x/kublk".into())).functions();
        assert!(text.contains("'becket-copy') DEVICE=$(becket attach --via ublk --mode copy $IMAGE) ;;"));
        assert!(text.contains("'kublk-copy') kublk add -t loop -n 10 -q $CPUS -d 128 $IMAGE && "));
        assert!(text.contains("'kublk-copy') kublk del -n 10 ;;"));
    }

    #[test]
    fn only_known_names_can_be_kept() {
        let mut field = field(Ok("/x/kublk".into()));
        assert!(field.keep(&["kublk-copi".into()]).is_err());
        field.keep(&[]).unwrap();
        assert_eq!(field.contestants.len(), 3);
        field.keep(&["kublk-copy".into()]).unwrap();
        assert_eq!(field.contestants.len(), 1);
    }

    #[test]
    fn other_builds_are_named() {
        let other: Other = "before=/tmp/becket".parse().unwrap();
        assert_eq!(other, Other { name: "before".into(), path: "/tmp/becket".into() });
        assert!("/tmp/becket".parse::<Other>().is_err());
        assert!("a b=/tmp/becket".parse::<Other>().is_err());
    }
}
