//! Devices that come and go: raw, parts of a disk, files inside images, compressed and qcow2 images. Each is
//! read as a whole, some are written, and their images are checked afterwards.
//! It never leaves a device behind for the next turn.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use becket_testkit::{image, tool};

use super::Soak;
use crate::common::Use;
use crate::common::load::{BLOCK, Random, fill, somewhere};

const MIB: usize = 1 << 20;

/// An image that is attached now and then.
struct Piece {
    kind: String,
    /// As becket is given it.
    path: String,
    content: Vec<u8>,
    /// It may be written, and what is written is found at this place of this file afterwards.
    lies: Option<(PathBuf, u64)>,
    /// A qcow2, which QEMU looks at afterwards.
    qcow2: bool,
    vias: Vec<&'static str>,
}

/// Attaches and detaches until all is to end.
pub(super) fn churn(soak: &Soak<'_>, number: u64) {
    let name = format!("churn{number}");
    let mut random = Random::new(soak.seed + 2000 + number);
    let mut pieces = pieces(soak, &soak.place.dir(&name));
    soak.again_and_again(Duration::from_millis(20), || {
        let piece = random.below(pieces.len());
        once(soak, &name, &mut pieces[piece], &mut random);
    });
}

fn once(soak: &Soak<'_>, name: &str, piece: &mut Piece, random: &mut Random) {
    let via = piece.vias[random.below(piece.vias.len())];
    let writes = (piece.lies.is_some() || piece.qcow2) && random.below(2) == 0;
    let mut words = vec!["--via", via, "--depth", "16", &piece.path];
    if matches!(via, "loop" | "auto") {
        words.drain(2..4);
    }
    if !writes {
        words.push("--read-only");
    }
    soak.attach(&words, name);
    let link = soak.place.links().join(name);
    let device = fs::canonicalize(&link).unwrap();
    let used = Use::of(&device);
    soak.seen.compare(&fs::read(&device).unwrap(), &piece.content, 0);
    if writes {
        let file = OpenOptions::new().write(true).open(&device).unwrap();
        for _ in 0..4 {
            let (at, len) = somewhere(piece.content.len(), random);
            fill(&mut piece.content[at..at + len], random);
            file.write_all_at(&piece.content[at..at + len], at as u64).unwrap();
        }
        file.sync_all().unwrap();
    }
    soak.detach(name);
    assert!(!used.lasts(), "{} is there although {name} was detached", device.display());
    if let Some((file, start)) = &piece.lies {
        let mut now = vec![0; piece.content.len()];
        fs::File::open(file).unwrap().read_exact_at(&mut now, *start).unwrap();
        soak.seen.compare(&now, &piece.content, 0);
    }
    if piece.qcow2 && writes {
        let check = Command::new("qemu-img").args(["check", "-q", &piece.path]).output().unwrap();
        // 3: unused clusters, which a crash may leave, and nothing else.
        assert!(check.status.code().is_some_and(|code| [0, 3].contains(&code)), "{check:?}");
    }
    soak.count(format!("attached and detached: {} over {via}", piece.kind));
}

/// Makes the images.
fn pieces(soak: &Soak<'_>, dir: &Path) -> Vec<Piece> {
    let path = |name: &str| dir.join(name);
    let text = |name: &str| path(name).display().to_string();
    let plain: Vec<&'static str> = match soak.via {
        "fuse" => vec!["fuse", "loop", "auto"],
        "ublk" => vec!["ublk", "loop", "auto"],
        _ => vec!["loop", "auto"],
    };
    let composed = plain.first().copied().filter(|via| *via != "loop");
    let random = image::random_bytes(4 * MIB, soak.seed + 1);
    fs::write(path("raw.img"), &random).unwrap();
    let lies = |name: &str, at| Some((path(name), at));
    let mut pieces = vec![Piece {
        kind: "raw".to_owned(),
        path: text("raw.img"),
        content: random.clone(),
        lies: lies("raw.img", 0),
        qcow2: false,
        vias: plain.clone(),
    }];
    let tree = path("tree/dir");
    fs::create_dir_all(&tree).unwrap();
    fs::write(tree.join("nested.img"), &random[..MIB]).unwrap();
    image::partitioned(&path("disk.img"), &path("tree"));
    let disk = fs::read(path("disk.img")).unwrap();
    let (start, len) = (image::GPT_PARTITIONS[1].0 as usize * 512, image::GPT_PARTITIONS[1].1 as usize * 512);
    pieces.push(Piece {
        kind: "a partition".to_owned(),
        path: text("disk.img/p2"),
        content: disk[start..start + len].to_vec(),
        lies: lies("disk.img", start as u64),
        qcow2: false,
        vias: plain.clone(),
    });
    pieces.push(Piece {
        kind: "a file in a file system in a partition".to_owned(),
        path: text("disk.img/p1/dir/nested.img"),
        content: random[..MIB].to_vec(),
        lies: None,
        qcow2: false,
        vias: plain,
    });
    let Some(composed) = composed else { return pieces };
    // Half of each block repeats.
    let mut packed = random[..2 * MIB].to_vec();
    packed.chunks_mut(2 * BLOCK).for_each(|chunk| chunk[..BLOCK].fill(7));
    fs::create_dir_all(path("packed")).unwrap();
    fs::write(path("packed/data.img"), &packed).unwrap();
    for codec in ["gzip", "xz", "lz4", "zstd"] {
        let squashfs = format!("{codec}.sqfs");
        let words = ["-comp", codec, "-noappend", "-quiet", "-no-progress"];
        tool(Command::new("mksquashfs").args([path("packed"), path(&squashfs)]).args(words));
        pieces.push(Piece {
            kind: format!("a file in a SquashFS ({codec})"),
            path: text(&format!("{squashfs}/data.img")),
            content: packed.clone(),
            lies: None,
            qcow2: false,
            vias: vec![composed],
        });
    }
    let qemu_img = |words: &[&str]| tool(Command::new("qemu-img").args(words).current_dir(dir));
    fs::write(path("base.raw"), &packed).unwrap();
    qemu_img(&["convert", "-c", "-O", "qcow2", "base.raw", "base.qcow2"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2", "top.qcow2"]);
    pieces.push(Piece {
        kind: "qcow2 over a compressed one".to_owned(),
        path: text("top.qcow2"),
        content: packed,
        lies: None,
        qcow2: true,
        vias: vec![composed],
    });
    pieces
}
