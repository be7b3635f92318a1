//! What is measured: each scenario, its places, its contestants and the variables of its script.
//! It is data: how a place is measured is in `harness` and `guest/*.sh`.

/// One scenario.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// For the page, before the tables.
    pub(crate) about: &'static str,
    pub(crate) places: &'static [Place],
}

/// A script, and where it runs.
pub(crate) struct Place {
    pub(crate) name: &'static str,
    pub(crate) ground: Ground,
    /// Names of [`super::contestant`]; empty where the script has its own.
    pub(crate) entrants: &'static str,
    /// What its variables are, in bash, and with which of them it is short.
    pub(crate) variables: &'static str,
    pub(crate) short: &'static str,
    /// Runs here before the guest, which gets the folder `$IMAGES/given`.
    pub(crate) before: Option<&'static str>,
    pub(crate) script: &'static [&'static str],
    /// For the reader.
    pub(crate) note: &'static str,
}

/// Where a script runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ground {
    /// This machine; becket's records are in memory, as `/run` is, or on the checkout's disk.
    Host { memory: bool },
    /// A guest whose clock counts executed instructions, one nanosecond each: one CPU.
    Counted,
    /// A guest with so many CPUs (threads of the host) and MiB of memory.
    Timed(u32, u32),
}

/// The contestants of most comparisons: the kernel's own ways, becket, and the best of each peer.
const MAIN: &str = "file loop-direct becket kublk-batch-zero-copy rublk-zero-copy";
const SETUP: &str = include_str!("guest/setup.sh");
const GRID: &str = include_str!("guest/grid.sh");
const ATTACH: &str = include_str!("guest/attach.sh");
const STORM: &str = include_str!("guest/storm.sh");
const IMAGES: &str = include_str!("guest/nested-images.sh");
const NESTED: &str = include_str!("guest/nested.sh");
const BOOT: &str = include_str!("guest/boot.sh");
const ORIGIN: &str = include_str!("guest/origin.sh");
const WRITEBACK: &str = include_str!("guest/writeback.sh");

/// What a place has unless it says otherwise.
const PLACE: Place = Place {
    name: "host",
    ground: Ground::Host { memory: false },
    entrants: "",
    variables: "",
    short: "ROUNDS=1",
    before: None,
    script: &[],
    note: "",
};
/// A guest that runs fio.
const FIO: Place = Place {
    name: "guest",
    ground: Ground::Counted,
    entrants: MAIN,
    short: "ROUNDS=1 WORKLOADS=(randread-4k-d64)",
    script: &[SETUP, GRID],
    ..PLACE
};
/// The workloads that speed is judged by, the most telling first.
macro_rules! workloads {
    () => {
        "randread-4k-d64 randwrite-4k-d64 randread-4k-d1 randwrite-4k-d1 read-128k-d16 write-128k-d16 \
         read-1m-d4 write-1m-d4"
    };
}

/// All scenarios.
pub(crate) const SCENARIOS: [Scenario; 16] = [
    Scenario {
        name: "cost",
        title: "Instructions of one I/O",
        about: "\
The guest is emulated, and its clock advances with the instructions that it executes. So I/Os in a guest
second are I/Os per 10⁹ instructions: the cost of the whole path (load generator, kernel and server),
whatever else the host does. These numbers do not show how well work overlaps on several CPUs. More is
better.",
        places: &[Place {
            // becket in all its modes (its default is the best that the kernel has), each peer in its best.
            entrants: "file loop-direct loop-buffered becket becket-zero-copy becket-batch-copy becket-copy \
                kublk-batch-zero-copy rublk-zero-copy",
            variables: concat!("ROUNDS=2 FIGURES=(iops) WORKLOADS=(", workloads!(), ")"),
            ..FIO
        }],
    },
    Scenario {
        name: "wall",
        title: "Time, jobs and queues",
        about: "\
I/Os per second by the clock, in a guest with two emulated CPUs, each a thread of the host; *j2* and *j4*
are two and four jobs. Emulation makes user code slower than system calls, and other work on the host
disturbs it. Read the spread first.",
        places: &[Place {
            ground: Ground::Timed(2, 2048),
            entrants: "file loop-direct becket kublk-batch-zero-copy rublk-zero-copy becket-1-queue",
            variables: concat!(
                "ROUNDS=5 FIGURES=(iops) WORKLOADS=(",
                workloads!(),
                " randread-4k-d64-j2 randread-4k-d64-j4 randwrite-4k-d64-j2 randwrite-4k-d64-j4)"
            ),
            ..FIO
        }],
    },
    Scenario {
        name: "latency",
        title: "One I/O at a time",
        about: "\
From the submission of one I/O to its completion. *time*: microseconds by the clock in a guest with two
emulated CPUs. *instructions*: instructions of the whole path, every task switch included. Less is better.",
        places: &[
            Place {
                name: "time",
                ground: Ground::Timed(2, 2048),
                variables: "ROUNDS=7 FIGURES=(p50-us p99-us) WORKLOADS=(randread-4k-d1 randwrite-4k-d1)",
                short: "ROUNDS=1",
                ..FIO
            },
            Place {
                name: "instructions",
                variables: "ROUNDS=2 FIGURES=(per-io) WORKLOADS=(randread-4k-d1 randwrite-4k-d1)",
                short: "ROUNDS=1",
                ..FIO
            },
        ],
    },
    Scenario {
        name: "writeback",
        title: "Write-back",
        about: "\
A file system on a loop device writes back into the page cache of the file system below, where it may have
to wait until there are fewer dirty pages (vm.dirty_bytes = 64 MiB). The milliseconds to fill a new file
system and to sync it; the image is a new sparse file on a file system of the same kind. *loop-again* is
*loop-direct* once more: their ratio shows what the machine's noise is. Less is better.",
        places: &[
            Place {
                entrants: "loop-direct loop-again loop-buffered becket",
                variables: "ROUNDS=3 SYSTEMS=(xfs ext4 btrfs) MIB=4000 ON=loop VIA=",
                short: "ROUNDS=1 MIB=200",
                script: &[WRITEBACK],
                note: "4,000 MiB on a file of this machine's disk behind loop with direct I/O",
                ..PLACE
            },
            Place {
                name: "guest",
                ground: Ground::Timed(2, 3248),
                entrants: "loop-direct loop-again loop-buffered becket kublk-batch-zero-copy",
                variables: "ROUNDS=3 SYSTEMS=(xfs ext4 btrfs) MIB=400 ON=null_blk",
                short: "ROUNDS=1 SYSTEMS=(ext4) MIB=100",
                script: &[WRITEBACK],
                note: "400 MiB on a null_blk in memory",
                ..PLACE
            },
        ],
    },
    Scenario {
        name: "attach",
        title: "Attaching and detaching",
        about: "\
Milliseconds to attach and to detach one raw image: on the host by the clock, with the image in a
temporary directory; in the guest by a clock that counts instructions.",
        places: &[
            Place { entrants: "losetup becket-loop", variables: "ROUNDS=9", script: &[ATTACH], ..PLACE },
            Place {
                entrants: "loop-direct becket-loop becket kublk-batch-zero-copy rublk-zero-copy",
                variables: "ROUNDS=9",
                short: "ROUNDS=1",
                script: &[SETUP, ATTACH],
                ..FIO
            },
        ],
    },
    Scenario {
        name: "storm",
        title: "Many devices",
        about: "\
Images of 1 MiB are attached by one command of becket, by losetup one after another, and by eight losetup
processes at a time. On the host this uses the kernel's loop driver, with becket's records in memory (as
`/run` is) and on a new ext4 of the checkout's disk. In the guest it uses ublk, beside the guest's own losetup.

*one-attach* is one command for one device while the server runs. *contended* counts waits for kernel
locks by the tracepoint `lock:contention_begin`; *futexes* counts all futex calls of becket. *guest-most*
is one run with a large number of devices: *wrong* is 0 if each device began with the bytes of its image,
and *copied* counts the devices for which the tables of the worker's rings had no room.",
        places: &[
            Place { ground: Ground::Host { memory: true }, ..MANY },
            Place {
                name: "host-disk",
                variables: "ROUNDS=3 COUNTS=(1 69 500 1000) ONE=100 VIA=loop NODES= NEW=yes",
                ..MANY
            },
            Place {
                name: "guest",
                ground: Ground::Timed(2, 4096),
                variables: "ROUNDS=1 COUNTS=(1 69 500 1000) ONE=100 VIA=ublk NODES=1008
modprobe -r loop; modprobe loop max_loop=$NODES && modprobe ublk_drv || fail 'no loop or no ublk'",
                short: "COUNTS=(1 8) ONE=2",
                script: &[STORM, include_str!("guest/storm-ublk.sh")],
                note: "images on the guest's ext4",
                ..MANY
            },
            Place {
                name: "guest-most",
                ground: Ground::Timed(2, 4096),
                variables: "ROUNDS=1 MOST=4096",
                short: "MOST=16",
                script: &[include_str!("guest/storm-most.sh")],
                note: "images on the guest's ext4, once by each transport",
                ..PLACE
            },
        ],
    },
    Scenario {
        name: "losetup",
        title: "losetup",
        about: "\
Milliseconds of one call of losetup, the start of the process included: the system's losetup, and
becket's. *list* is `-l`, *plain* is `-a`, *json* is `-lJ`, *file-of* is `-j FILE`, each with that many
devices attached. *version* is `-V`, which does nothing else.",
        places: &[Place {
            variables: "ROUNDS=7 COUNT=500 CALLS=10",
            short: "ROUNDS=1 COUNT=5 CALLS=2",
            script: &[include_str!("guest/losetup.sh")],
            ..PLACE
        }],
    },
    Scenario {
        name: "fuse",
        title: "FUSE on this machine",
        about: "\
A file of the checkout's disk with direct I/O: the loop driver over it (*loop-direct*), and a loop device over
a file that a process serves over FUSE: becket, and qemu-storage-daemon with io_uring (*qsd*). *iops* is by
the clock, *cpu-us* the server's CPU time of one I/O. *j2* and *j4* are two and four jobs, each of them at
that depth.",
        places: &[Place {
            variables: "ENTRANTS=(loop-direct becket qsd) ROUNDS=3 SECONDS_EACH=3 MIB=512 \
                        WORKLOADS=(randread-4k-d64-j1 randwrite-4k-d64-j1 read-1m-d4-j1 write-1m-d4-j1 \
                        randread-4k-d1-j1 randread-4k-d64-j2 randread-4k-d64-j4)",
            short: "ROUNDS=1 SECONDS_EACH=1 MIB=16 WORKLOADS=(randread-4k-d64-j1)",
            script: &[include_str!("guest/fuse.sh")],
            ..PLACE
        }],
    },
    Scenario {
        name: "vhost",
        title: "Disks of virtual machines",
        about: "\
Random reads of 4 KiB over vhost-user-blk with one queue, by one driver for all servers, which waits for
notifications as a virtual machine does. *cached*: of a file in memory. *direct*: past the page cache, of a
file on the checkout's disk. *cpu-us* is the server's CPU time of one I/O, and *calls* its system calls, at
depth 64; *d1-us* is the time of one I/O at depth 1. *qsd* is qemu-storage-daemon with io_uring, and
*qsd-threads* with its default.",
        places: &[Place {
            ground: Ground::Host { memory: true },
            variables: "ENTRANTS=(becket qsd qsd-threads) ROUNDS=5 SECONDS_EACH=2 MIB=256 WAYS=(cached direct)",
            short: "ROUNDS=1 SECONDS_EACH=1 MIB=16 WAYS=(cached)",
            script: &[include_str!("guest/vhost.sh")],
            ..PLACE
        }],
    },
    Scenario {
        name: "nbd",
        title: "Exports over NBD",
        about: "\
Reads over NBD and a unix socket, by one client for all servers, which sends many requests in one system
call. *memory*: of a file of tmpfs. *cached*: of a file on the checkout's disk, from the page cache.
*d64* and *d1* are random reads of 4 KiB at depth 64 and 1, *256k* sequential ones of 256 KiB at depth 8.
*cpu-us* is the server's CPU time of one I/O, and *calls* its system calls. *fio-iops* is with fio's
engine. *copy-s* is the time of `nbdcopy` for a sparse image, a tenth of which is data. *tls-s* is its time
for a GiB over TLS, and *tls-cpu-s* that of the server's processes. *nbdkit* has its plugin file, *null* is
nbdkit without any image: what the client can reach. In the guest a device is read over NBD from qemu-nbd:
*becket-nbd* is `becket attach nbd+unix:`, *kernel-nbd* is nbd-client with the kernel's driver; I/Os per 10⁹
instructions of the guest.",
        places: &[
            Place {
                ground: Ground::Host { memory: true },
                variables: "ENTRANTS=(becket nbdkit null qsd qemu-nbd) ROUNDS=5 SECONDS_EACH=2 MIB=256 \
                            FIO=1 COPY=1 TLS=1 WAYS=(memory cached)",
                short: "ROUNDS=1 SECONDS_EACH=1 MIB=20 WAYS=(cached)",
                script: &[include_str!("guest/nbd.sh")],
                ..PLACE
            },
            Place {
                entrants: "becket-nbd kernel-nbd",
                variables: "ROUNDS=2 FIGURES=(iops) WORKLOADS=(randread-4k-d64 randwrite-4k-d64 \
                            randread-4k-d1 randwrite-4k-d1 read-128k-d16 write-128k-d16)",
                ..FIO
            },
        ],
    },
    Scenario {
        name: "remote",
        title: "A start from an image on a web server",
        about: "\
A web server on this machine waits 20 ms before each answer. The reads are like those of a boot: 300 small
files with their tables in twelve places of a 2 GiB image, and three of 20 MiB; each server begins with
nothing, and exports the image over NBD to one client, which compares all bytes. *s* is the time from the
start of the server to the last byte, at depth 1 and 8; *bytes* is what the web server sent, divided by what
was read. *becket-trace* has the trace of an earlier start. nbdkit has its plugin curl below its cache with
blocks of 256 KiB and of 1 MiB. *local* is nbdkit with the image's file. *many* are a hundred exports with an
overlay each that all start at the same moment: *bytes* is what the web server sent, divided by what it sends
for one; *last* is when the last was read, divided by when the first was. Less is better.",
        places: &[Place {
            ground: Ground::Host { memory: true },
            variables: "ENTRANTS=(becket becket-trace nbdkit-256k nbdkit-1M local) ROUNDS=3 MIB=2048 \
                        LATENCY=0.02 DEPTHS=(1 8) READERS=100",
            short: "ROUNDS=1 MIB=128 LATENCY=0.002 READERS=10",
            script: &[BOOT, ORIGIN, include_str!("guest/remote.sh")],
            ..PLACE
        }],
    },
    Scenario {
        name: "fetch",
        title: "One command with an image on a web server",
        about: "\
*first* is from the start of `becket attach` to the first 4 KiB of the device, with a server of becket's
running and nothing in the store, and *nested* is `becket cat` of a file in an ext4 in a SquashFS in an ISO:
milliseconds, and requests to the web server, which waits 20 ms before each answer. *whole* are all bytes, in
seconds, with 0 and 20 ms before each answer: *curl* asks once and writes a file; *device* is attached over
FUSE and read to its end; *copy* writes a file, and fills the store; nbdkit's plugin curl is read by nbdcopy,
and keeps nothing. *warm* are reads of 4 KiB at
depth 64 of an export over NBD, whose bytes are in the store (*stored*) or in a file of this machine (*file*):
the worker's time for each in microseconds. *stream* is a .gz of this machine: until the first 64 KiB of its
*device* are read after `attach` began, and until all of it is decoded, beside `gzip -dc` to a file. Less is
better, but for *iops*.",
        places: &[Place {
            ground: Ground::Host { memory: true },
            variables: "ENTRANTS=(device copy copy-no-store curl nbdkit) ROUNDS=3 MIB=384 LATENCIES=(0 0.02) \
                        SECONDS_EACH=3",
            short: "ROUNDS=1 MIB=64 SECONDS_EACH=1",
            script: &[ORIGIN, include_str!("guest/fetch.sh")],
            ..PLACE
        }],
    },
    Scenario {
        name: "rbd",
        title: "Images of Ceph",
        about: "\
An image of a Ceph cluster with one monitor and one OSD in memory, on this machine and its CPUs. *librbd* is
fio with its own engine: nothing between it and the library. *becket* is a device over FUSE.
*becket-export* and *qemu-nbd* are read over NBD and a unix socket, by fio's engine. librbd's cache is off
for all. *iops* at depth 64: more is better; *p50-us* at depth 1: less is better.",
        places: &[Place {
            ground: Ground::Host { memory: true },
            variables: "ENTRANTS=(librbd becket becket-export qemu-nbd) ROUNDS=5 SECONDS_EACH=3 MIB=256 VIA=fuse \
                        WORKLOADS=(randread-4k-d64 randwrite-4k-d64 randread-4k-d1 randwrite-4k-d1)",
            short: "ROUNDS=1 SECONDS_EACH=1 MIB=16 WORKLOADS=(randread-4k-d64)",
            script: &[include_str!("guest/rbd.sh")],
            ..PLACE
        }],
    },
    Scenario {
        name: "scale",
        title: "Many hosts, one image",
        about: "\
Hosts that start one image at the same moment, each a network namespace with a becket server, a store and an
overlay of its own, all on this machine's CPUs; each link is bounded, and so is that of the origin, an nginx.
A start reads a boot's bytes by FUSE, compares them and writes a block. *alone* is one host; *direct* are all
of them at the origin; *one-host* has as many devices of one server, with one store. *zone-nginx* has an nginx
between them and the origin that keeps what passes, and *zone-nginx-trace* the trace of an earlier start,
too; *zone-export* has one `becket export` of the image with a store. *s* are seconds from the attach to the
last byte; *origin-bytes* is what the origin has sent, in how many *origin-requests*, and *host-bytes* what
came to the first host, both divided by what one start reads (*needed-mb*). Less is better.",
        places: &[Place {
            ground: Ground::Host { memory: true },
            variables: "ENTRANTS=(alone direct one-host zone-nginx zone-nginx-trace zone-export) ROUNDS=1 \
                        HOSTS=100 MIB=2048 HOST_MBIT=20 ORIGIN_MBIT=200",
            short: "ROUNDS=1 HOSTS=3 MIB=64 HOST_MBIT=200",
            script: &[BOOT, include_str!("guest/scale.sh")],
            ..PLACE
        }],
    },
    Scenario {
        name: "inside",
        title: "Taking a tree out",
        about: "\
About 700 MB of files are taken out of an image into a file system in memory, by `becket cp -r` and by the
tool that people use for that kind, as root; the image is in the page cache. *ms* is the time by the clock,
*cpu-ms* the CPU time of all threads. *cat-ms* is one call of `becket cat` for a file in an ext4 image in a
SquashFS image in an ISO image. Less is better.",
        places: &[Place {
            variables: "ENTRANTS=(becket unsquashfs debugfs 7z bsdtar) ROUNDS=5 MIB=670 CALLS=20
IMAGES=$KEPT/inside-$MIB",
            short: "ROUNDS=1 MIB=20 CALLS=2 IMAGES=$KEPT/inside-$MIB",
            script: &[include_str!("guest/inside.sh")],
            ..PLACE
        }],
    },
    Scenario {
        name: "nested",
        title: "Images inside images",
        about: "\
An ISO image holds a SquashFS image, which holds an ext4 image with 8,000 files of 16 KiB to 2 MiB (400 in
the guest), as a live CD does. The readers share all files and read them in random order, with nothing in
the page cache. Everything, the kernel's workers included, runs on the given number of CPUs. *loops* are
the kernel's drivers on top of each other, with their defaults. *becket* is one FUSE device (ublk in the
guest) with one map: with its default memory for decoded blocks (a sixteenth of the machine's, 1 GiB at
most), and with 768 MiB, in which all of these files fit. *s* is the time by the clock, *cpu-s* that of
all CPUs. *mib* is the peak memory of the page cache and of becket's processes; the page cache was emptied
at the start. *threads* is the peak number of becket's threads.

*one-piece* and *pieces*: a file on ext4 in a partition of an image on an ISO 9660 image, none of them
compressed, beside the same bytes of the outermost file, with direct I/O. The loop driver serves the
first; FUSE serves the second, which ext4's tables split. *resolve*: `becket ls` of the root directory of
an ext4 image in a SquashFS image (8 GiB in 65,000 blocks) in an ISO of 4 GiB, with nothing in memory,
becket's program included.",
        places: &[
            Place {
                variables: "ENTRANTS=(loops becket becket-768m) ROUNDS=2 CODECS=(gzip zstd xz)
READERS=(1 4) CPUS=(1 2) FILES=8000 RAW_ROUNDS=5 VIA=fuse",
                short: "ROUNDS=1 CODECS=(gzip) FILES=100 RAW_ROUNDS=1",
                script: &["IMAGES=$KEPT/nested-$FILES", IMAGES, NESTED, include_str!("guest/nested-raw.sh")],
                ..PLACE
            },
            Place {
                name: "guest",
                ground: Ground::Timed(4, 4096),
                variables: "ENTRANTS=(loops becket) ROUNDS=2 CODECS=(gzip zstd xz) READERS=(1 4) CPUS=(1 2 4)
FILES=400 VIA=ublk IMAGES=${GIVEN-$KEPT/nested-400}",
                short: "ROUNDS=1 CODECS=(gzip) READERS=(4)",
                before: Some(IMAGES),
                script: &[include_str!("guest/nested-guest.sh"), NESTED],
                note: "the images on ext4 on a null_blk in memory",
                ..PLACE
            },
        ],
    },
];

/// Many devices by loop.
const MANY: Place = Place {
    variables: "ROUNDS=3 COUNTS=(1 69 500 1000) ONE=100 VIA=loop NODES=",
    short: "ROUNDS=1 COUNTS=(1 8) ONE=2",
    script: &[STORM],
    ..PLACE
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{contestant, harness};
    use crate::exec;

    #[test]
    fn every_script_is_bash_and_every_contestant_is_known() {
        let mut places = 0;
        for place in SCENARIOS.iter().flat_map(|scenario| scenario.places) {
            places += 1;
            let entrants: Vec<&str> = place.entrants.split_whitespace().collect();
            let field = contestant::Field::new(&entrants, "becket", &[], |_| Ok(None)).unwrap();
            let (long, short) = (place.variables, format!("{}\n{}", place.variables, place.short));
            for variables in [long, &short] {
                let text = harness::script(place, &field, variables);
                assert!(text.contains("ROUNDS="), "{}", place.name);
                exec::quietly(std::process::Command::new("bash").args(["-n", "-c", &text])).unwrap();
            }
        }
        assert!(places >= SCENARIOS.len(), "{places}");
    }
}
