//! The contestants: how each is attached, and detached again.
//! Never attaches two at once: what one leaves in the page cache or in the kernel must not cost another.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::vm::{Place, quoted};

/// Where programs go in the guest.
const BIN: &str = "/usr/local/bin";

/// Name, the command that attaches `$IMAGE`, the device (without one, the first command prints it), the
/// command that detaches it; in bash.
type Contestant = [&'static str; 4];

const LOOP: &str = "losetup --find --show --direct-io=on $IMAGE";
const UNLOOP: &str = "losetup -d $DEVICE";
const OURS: &str = "$BECKET detach $DEVICE";
/// The peers have the depth and the queues that becket has by default.
const KUBLK: [&str; 2] = ["/dev/ublkb10", "kublk del -n 10"];
const RUBLK: [&str; 2] = ["/dev/ublkb11", "rublk del -n 11"];
/// An image on an NBD server of this machine, for both clients.
macro_rules! served {
    ($attach:literal) => {
        concat!(
            "qemu-nbd --fork --persistent --format raw --shared 16 --cache none --aio native \
             --socket $WORK/nbd.sock --pid-file $WORK/nbd.pid $IMAGE >$SAID 2>&1 && ",
            $attach
        )
    };
}
const ALL: [Contestant; 20] = [
    ["file", "true", "$IMAGE", "true"],
    ["loop-direct", LOOP, "", UNLOOP],
    ["loop-again", LOOP, "", UNLOOP],
    ["losetup", LOOP, "", UNLOOP],
    ["loop-buffered", "losetup --find --show --direct-io=off $IMAGE", "", UNLOOP],
    // ublk in the guest; on the host what becket chooses.
    ["becket", "$BECKET attach ${VIA---via ublk} $IMAGE", "", OURS],
    ["becket-loop", "$BECKET attach --via loop $IMAGE", "", OURS],
    ["becket-1-queue", "$BECKET attach --via ublk --queues 1 $IMAGE", "", OURS],
    ["becket-zero-copy", "$BECKET attach --via ublk --mode zero-copy $IMAGE", "", OURS],
    ["becket-batch-zero-copy", "$BECKET attach --via ublk --mode batch-zero-copy $IMAGE", "", OURS],
    ["becket-copy", "$BECKET attach --via ublk --mode copy $IMAGE", "", OURS],
    ["becket-batch-copy", "$BECKET attach --via ublk --mode batch-copy $IMAGE", "", OURS],
    [
        "kublk-batch-zero-copy",
        "kublk add -t loop -n 10 -q $CPUS -d 128 -b --auto_zc $IMAGE",
        KUBLK[0],
        KUBLK[1],
    ],
    ["kublk-zero-copy", "kublk add -t loop -n 10 -q $CPUS -d 128 --auto_zc $IMAGE", KUBLK[0], KUBLK[1]],
    ["kublk-copy", "kublk add -t loop -n 10 -q $CPUS -d 128 $IMAGE", KUBLK[0], KUBLK[1]],
    ["rublk-zero-copy", "rublk add loop -n 11 -q $CPUS -d 128 -z -f $IMAGE", RUBLK[0], RUBLK[1]],
    ["rublk-copy", "rublk add loop -n 11 -q $CPUS -d 128 -f $IMAGE", RUBLK[0], RUBLK[1]],
    [
        "becket-nbd",
        served!("$BECKET attach --via ublk nbd+unix:///?socket=$WORK/nbd.sock"),
        "",
        "$BECKET detach $DEVICE && kill $(cat $WORK/nbd.pid)",
    ],
    [
        "kernel-nbd",
        served!("modprobe nbd && nbd-client -unix $WORK/nbd.sock /dev/nbd3 -b 512"),
        "/dev/nbd3",
        "nbd-client -d /dev/nbd3 && kill $(cat $WORK/nbd.pid)",
    ],
    // Other builds of becket, by names of their own.
    ["", "NAME attach ${VIA---via ublk} $IMAGE", "", "NAME detach $DEVICE"],
];

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
            return Err(format!("`{name}` is not a name: letters, digits and `-` only"));
        }
        Ok(Other { name: name.to_owned(), path: path.into() })
    }
}

/// Those that take part, and what they need.
pub(crate) struct Field {
    pub(crate) names: Vec<String>,
    /// The bash functions `attach NAME` and `detach NAME`.
    pub(crate) functions: String,
    pub(crate) programs: Vec<Place>,
    /// For the reader: how each is attached, and why one is absent.
    pub(crate) notes: Vec<String>,
}

impl Field {
    /// The contestants of these names, with other builds beside them. `becket` is a word for the shell;
    /// `peer` finds the program of another project, or says why there is none.
    pub(crate) fn new(
        names: &[&str],
        becket: &str,
        others: &[Other],
        peer: impl Fn(&str) -> Result<Option<PathBuf>, String>,
    ) -> Result<Field> {
        let mut field =
            Field { names: Vec::new(), functions: String::new(), programs: Vec::new(), notes: Vec::new() };
        let (mut ways_in, mut ways_out) = (String::new(), String::new());
        let mut add =
            |field: &mut Field, name: &str, [_, attach, device, detach]: Contestant, program: &str| {
                let [attach, detach] = [attach, detach].map(|text| text.replace("NAME", program));
                let attached = match device {
                    "" => format!("DEVICE=$({attach})"),
                    device => format!("{attach} && DEVICE={device}"),
                };
                // Writing to a string cannot fail.
                let _ = writeln!(ways_in, "    {name}) {attached} ;;");
                let _ = writeln!(ways_out, "    {name}) {detach} ;;");
                field.names.push(name.to_owned());
                field.notes.push(format!("{name}: `{}`", attach.replace("$BECKET", "becket")));
            };
        for name in names {
            let Some(one) = ALL.into_iter().find(|one| one[0] == *name && !name.is_empty()) else {
                let known: Vec<&str> = ALL.iter().map(|one| one[0]).collect();
                bail!("there is no contestant {name}; there are {}", known.join(" "));
            };
            let program = name.split('-').next().unwrap_or(name);
            match peer(program) {
                Err(why) => {
                    field.notes.push(format!("{name} is absent: {program} could not be built: {why}"))
                }
                Ok(host) => {
                    let place = |host| Place { host, guest: format!("{BIN}/{program}") };
                    if !field.programs.iter().any(|other| other.guest.ends_with(program)) {
                        field.programs.extend(host.map(place));
                    }
                    add(&mut field, name, one, "");
                }
            }
        }
        let ours = ALL.last().context("the table of contestants is empty")?;
        for Other { name, path } in others {
            // On the host its path, in the guest where it is placed.
            let program =
                if becket.contains('/') { quoted(&path.display().to_string()) } else { name.clone() };
            field.programs.push(Place { host: path.clone(), guest: format!("{BIN}/{name}") });
            add(&mut field, name, *ours, &program);
        }
        field.functions = format!(
            "attach() {{\n    DEVICE=\n    case $1 in\n{ways_in}    *) false ;;\n    esac && [[ -e $DEVICE ]]\n}}\n\
             detach() {{\n    case $1 in\n{ways_out}    *) false ;;\n    esac\n}}\n"
        );
        Ok(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contestant_has_a_way_in_and_a_way_out_or_a_reason() {
        let others = ["before=/tmp/becket".parse().unwrap()];
        let peer = |program: &str| if program == "rublk" { Err("no compiler".into()) } else { Ok(None) };
        let names = ["becket-copy", "kublk-copy", "rublk-copy"];
        let field = Field::new(&names, "becket", &others, peer).unwrap();
        assert_eq!(field.names, ["becket-copy", "kublk-copy", "before"]);
        let text = &field.functions;
        assert!(text.contains(" becket-copy) DEVICE=$($BECKET attach --via ublk --mode copy $IMAGE) ;;"));
        assert!(text.contains(" kublk-copy) kublk add -t loop -n 10 -q $CPUS -d 128 $IMAGE && DEVICE=/dev/"));
        assert!(text.contains(" kublk-copy) kublk del -n 10 ;;") && !text.contains("rublk add"));
        assert!(text.contains(" before) before detach $DEVICE ;;"));
        assert!(field.notes.iter().any(|note| note.ends_with("rublk could not be built: no compiler")));
        assert!(Field::new(&["kublk-copi"], "becket", &[], peer).is_err());
    }

    #[test]
    fn other_builds_have_names() {
        assert!("/tmp/becket".parse::<Other>().is_err());
        assert!("a b=/tmp/becket".parse::<Other>().is_err());
    }
}
