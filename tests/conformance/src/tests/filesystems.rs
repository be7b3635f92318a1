//! What people do with a device: file systems and encryption on top of it.
//! Must never call a check passed that was not run: a missing program fails, only a missing driver is a skip.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::device;
use crate::bench::{Access, Bench, Device, Mount, load, open, skip, verify};
use crate::bytes::{Random, compare, pattern};
use crate::command::sh;
use crate::driver::Attach;
use crate::exercise::Exercise;
use crate::suite::Test;

pub(super) const TESTS: &[Test] = &[
    device("filesystem-ext4", |bench| file_system(bench, &EXT4)),
    device("filesystem-xfs", |bench| file_system(bench, &XFS)),
    device("filesystem-btrfs", |bench| file_system(bench, &BTRFS)),
    device("dm-crypt", dm_crypt),
];

const MIB: u64 = 1 << 20;

/// A file system and its tools.
struct FileSystem {
    name: &'static str,
    /// The size of the image; the smallest that mkfs takes, or little more.
    size: u64,
    make: &'static [&'static str],
    check: &'static [&'static str],
}

const EXT4: FileSystem = FileSystem {
    name: "ext4",
    size: 96 * MIB,
    make: &["mkfs.ext4", "-q", "-F"],
    check: &["e2fsck", "-f", "-n"],
};

const XFS: FileSystem = FileSystem {
    name: "xfs",
    size: 320 * MIB,
    make: &["mkfs.xfs", "-q", "-f"],
    check: &["xfs_repair", "-n"],
};

const BTRFS: FileSystem = FileSystem {
    name: "btrfs",
    size: 160 * MIB,
    make: &["mkfs.btrfs", "-q", "-f"],
    check: &["btrfs", "check", "--readonly"],
};

fn words<'a>(words: &[&'a str], last: &'a str) -> Vec<&'a str> {
    words.iter().copied().chain([last]).collect()
}

fn kernel_has(name: &str) -> bool {
    let known = || {
        let text = fs::read_to_string("/proc/filesystems").unwrap_or_default();
        text.lines().any(|line| line.trim_start_matches("nodev").trim() == name)
    };
    load(name, known)
}

fn file_system(bench: &Bench, kind: &FileSystem) -> Result<()> {
    if !kernel_has(kind.name) {
        return skip(format!("this kernel has no {}", kind.name));
    }
    let image = bench.image("image", kind.size)?;
    let device = bench.attach(&image, &Attach::default())?;
    sh(&words(kind.make, &device.name()))?;
    let mount = Mount::new(device.path(), bench.dir.join("mnt"), kind.name, None)?;
    write_tree(&mount.dir, bench.seed)?;
    fio(&mount.dir.join("fio"), bench.seed)?;
    mount.unmount()?;
    sh(&words(kind.check, &device.name()))?;
    device.detach()?;

    let device = bench.attach(&image, &Attach::default())?;
    sh(&words(kind.check, &device.name())).context("attached again")?;
    let mount = Mount::new(device.path(), bench.dir.join("mnt"), kind.name, None)?;
    check_tree(&mount.dir, bench.seed)?;
    mount.unmount()?;
    device.detach()
}

/// The files of the tree: folder, name and size, most of them small, as in a real one.
fn tree(seed: u64) -> Vec<(String, usize)> {
    let mut random = Random::new(seed);
    let mut one = |index: u32| {
        let size = if index == 0 { 0 } else { random.log_uniform(1, MIB) as usize };
        (format!("folder{}/file{index}", index % 7), size)
    };
    (0..80).map(&mut one).collect()
}

fn write_tree(root: &Path, seed: u64) -> Result<()> {
    for (index, (name, size)) in tree(seed).into_iter().enumerate() {
        let path = root.join(name);
        fs::create_dir_all(path.parent().context("a file lies in a folder")?)?;
        fs::write(&path, pattern(size, seed + index as u64))
            .with_context(|| format!("{}", path.display()))?;
        if index % 8 == 0 {
            fs::File::open(&path)?.sync_all().with_context(|| format!("{}", path.display()))?;
        }
    }
    Ok(())
}

fn check_tree(root: &Path, seed: u64) -> Result<()> {
    for (index, (name, size)) in tree(seed).into_iter().enumerate() {
        let path = root.join(name);
        let found = fs::read(&path).with_context(|| format!("{}", path.display()))?;
        ensure!(found.len() == size, "{}: {} bytes, {size} were written", path.display(), found.len());
        compare(&found, &pattern(size, seed + index as u64), 0)
            .with_context(|| format!("{}", path.display()))?;
    }
    Ok(())
}

/// Random reads and writes whose every block carries its own checksum.
fn fio(file: &Path, seed: u64) -> Result<()> {
    let (file, seed) = (format!("--filename={}", file.display()), format!("--randseed={seed}"));
    let output = sh(&[
        "fio",
        "--name=verify",
        &file,
        &seed,
        "--rw=randrw",
        "--bsrange=4k-64k",
        "--size=16m",
        "--ioengine=libaio",
        "--iodepth=8",
        "--direct=1",
        "--fsync=64",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--output-format=json",
    ])?;
    let start = output.stdout.find('{').context("fio printed no report")?;
    let report: serde_json::Value = serde_json::from_str(&output.stdout[start..])?;
    let job = &report["jobs"][0];
    ensure!(job["error"] == 0, "fio: error {}", job["error"]);
    // What was written is read back once more for its checksums: less means that nothing was verified.
    let bytes = |side: &str| job[side]["io_bytes"].as_u64().unwrap_or(0);
    ensure!(bytes("write") >= 4 * MIB && bytes("read") >= 8 * MIB, "fio did too little: {job}");
    Ok(())
}

/// An encrypted mapping; closed when dropped.
struct Mapping(String);

impl Mapping {
    fn open(device: &Device, key: &str) -> Result<Self> {
        let name = format!("becket-conformance-{}", std::process::id());
        sh(&["cryptsetup", "open", "--key-file", key, &device.name(), &name])?;
        Ok(Self(name))
    }

    fn node(&self) -> PathBuf {
        Path::new("/dev/mapper").join(&self.0)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Err(error) = sh(&["cryptsetup", "close", &self.0]) {
            eprintln!("warning: {} stays open: {error:#}", self.0);
        }
    }
}

fn dm_crypt(bench: &Bench) -> Result<()> {
    let mapper = || {
        let misc = fs::read_to_string("/proc/misc").unwrap_or_default();
        misc.lines().any(|line| line.split_whitespace().nth(1) == Some("device-mapper"))
    };
    if !load("dm-mod", mapper) {
        return skip("this kernel has no device-mapper");
    }
    load("dm-crypt", || Path::new("/sys/module/dm_crypt").exists());
    let image = bench.image("image", 32 * MIB)?;
    let key = bench.image_of("key", &pattern(64, bench.seed))?;
    let mut model = pattern(8 * MIB as usize, bench.seed);
    let device = bench.attach(&image, &Attach::default())?;
    {
        let cheap =
            ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--luks2-keyslots-size", "512k"];
        let (node, key) = (device.name(), key.display().to_string());
        let format = ["cryptsetup", "-q", "luksFormat", "--type", "luks2", "--key-file", &key];
        sh(&format.iter().chain(&cheap).chain(&[node.as_str()]).copied().collect::<Vec<_>>())?;
        let mapping = Mapping::open(&device, &key)?;
        let file = open(&mapping.node(), Access::Buffered)?;
        file.write_all_at(&model, 0)?;
        drop(file);
        Exercise::of(&mapping.node(), bench.ops / 50, bench.seed)?.run(&mapping.node(), &mut model)?;
    }
    device.detach()?;

    let device = bench.attach(&image, &Attach::default())?;
    {
        let mapping = Mapping::open(&device, &key.display().to_string())?;
        verify(&open(&mapping.node(), Access::ReadDirect)?, 0, &model).context("decrypted again")?;
    }
    device.detach()?;
    let starts = |bytes: &[u8]| -> HashSet<[u8; 8]> {
        let sectors = bytes.chunks(512).filter_map(|sector| sector.first_chunk().copied());
        sectors.filter(|start| start != &[0; 8]).collect()
    };
    let plain = starts(&fs::read(&image)?).intersection(&starts(&model)).count();
    ensure!(plain == 0, "{plain} sectors lie unencrypted in the image");
    Ok(())
}
