//! How devices of each kind show in the kernel, as data: one line each. What is here is not asked by kind
//! anywhere else.

use becket_transport::Kind;

use crate::contract::versions::{FEATURE_EXPORTS, FEATURE_FRONT_ENDS};

/// What devices of a kind look like to programs and to becket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) disk: Disk,
    pub(crate) life: Life,
    /// How many descriptors of its own its worker gets, besides those of the image: so many, and so many for
    /// each queue. The first of them a successor of the supervisor does not get.
    pub(crate) descriptors: (usize, usize),
    /// How many more descriptors the supervisor and its guard have, which no worker gets.
    pub(crate) kept_descriptors: usize,
    /// What a becket must know that handles such devices, beyond what the first one knew.
    pub(crate) feature: Option<&'static str>,
    /// Its node is nobody's once the device is gone: nodes of loop devices stay.
    pub(crate) node_goes: bool,
    /// Its partitions are disks of their own, with numbers of their own.
    pub(crate) partitions_are_disks: bool,
    /// Where its server may not add partitions to the disk, there are none: the kernel takes them from root
    /// only.
    pub(crate) partitions_need_root: bool,
    pub(crate) making: Making,
    pub(crate) users: Users,
    /// What follows when its worker dies.
    pub(crate) next_worker: &'static str,
    /// What could be had instead, where data is copied between the kernel and becket.
    pub(crate) copies: Option<&'static str>,
}

/// The words that make a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Making {
    /// The command.
    pub(crate) command: &'static str,
    /// Its option that says where users reach the device, if it has no disk.
    pub(crate) place: Option<&'static str>,
    /// Users there ask for it by its name.
    pub(crate) by_name: bool,
}

/// What is said of the users of a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Users {
    /// That there are some, where nobody knows more.
    pub(crate) some: &'static str,
    /// What ends them.
    pub(crate) end: &'static str,
    /// What those must do that are there to see a new size, where they do not by themselves.
    pub(crate) resized: Option<&'static str>,
}

/// How the disk of a device is called in sysfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disk {
    /// By this word and the device's number.
    Numbered(&'static str),
    /// As its node. A device with a path outside of /dev is a file and has no disk.
    OfNode,
    /// It has none: users reach it at a socket.
    None,
}

/// How a record's device is known to be there still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// Its number always leads to a device, which is bound to a file or not.
    Bound,
    /// The kernel keeps becket's mark with its disk.
    Marked,
    /// The kernel keeps its number, with a disk or without, as long as it is served or can be again.
    Numbered,
    /// Its disk or its directory is there, served or not.
    Shown,
    /// The kernel knows nothing of it. Its record stays until it is detached.
    Recorded,
}

/// What is shown for a kind that this becket does not know: another version's record may say such a one.
pub(crate) const UNKNOWN: Kind = Kind::Ublk;

/// Whether devices of a kind show as disks.
pub(crate) fn has_disk(kind: Kind) -> bool {
    of(kind).disk != Disk::None
}

/// That of devices of a kind.
pub(crate) const fn of(kind: Kind) -> Shape {
    let plain = Shape {
        disk: Disk::OfNode,
        life: Life::Shown,
        descriptors: (0, 0),
        kept_descriptors: 0,
        feature: None,
        node_goes: false,
        partitions_are_disks: false,
        partitions_need_root: false,
        making: Making { command: "attach", place: None, by_name: false },
        users: Users { some: "a program has claimed it", end: "unmount it first", resized: None },
        next_worker: "another worker takes over and no request is lost",
        copies: None,
    };
    // The tether's two ends. The socket that listens is not the worker's.
    let export = Shape {
        disk: Disk::None,
        life: Life::Recorded,
        descriptors: (2, 0),
        // The socket, the words of its door, and the directory of its file.
        kept_descriptors: 3,
        feature: Some(FEATURE_EXPORTS),
        making: Making { command: "export", place: Some("--nbd"), by_name: true },
        users: Users {
            some: "clients are connected",
            end: "have its clients disconnect first (`becket list` shows how many there are)",
            resized: None,
        },
        ..plain
    };
    match kind {
        Kind::Loop => Shape { disk: Disk::Numbered("loop"), life: Life::Bound, ..plain },
        Kind::Dm => Shape {
            disk: Disk::Numbered("dm-"),
            life: Life::Marked,
            node_goes: true,
            partitions_are_disks: true,
            ..plain
        },
        Kind::Ublk => Shape {
            disk: Disk::Numbered("ublkb"),
            life: Life::Numbered,
            // Its char device.
            descriptors: (1, 0),
            node_goes: true,
            partitions_need_root: true,
            copies: Some("Linux 6.16 and root allow zero copy"),
            ..plain
        },
        // The tether's two ends, and the connection.
        Kind::Fuse => Shape { descriptors: (2, 1), copies: Some("FUSE has no zero copy"), ..plain },
        // Its protocol has no word for it.
        Kind::Nbd => Shape {
            users: Users {
                resized: Some("clients that are connected see the new size when they connect again"),
                ..export.users
            },
            next_worker: "another worker takes over: connections of clients end, and new ones are served",
            ..export
        },
        // Its workers say what another one needs to go on with a front-end.
        Kind::VhostUser => Shape {
            feature: Some(FEATURE_FRONT_ENDS),
            making: Making { place: Some("--vhost-user"), by_name: false, ..export.making },
            ..export
        },
    }
}
