//! Images for tests: sparse, random from a seed, with a file system, with partitions.
//! Never reuses a file: the caller says where to make an image.

use crate::tool;
use std::{
    fs,
    io::Write as _,
    os::unix::fs::FileExt as _,
    path::Path,
    process::{Command, Stdio},
};

/// A file of `size` bytes with nothing in it.
pub fn sparse(path: &Path, size: u64) {
    fs::File::create(path).expect("creates").set_len(size).expect("grows");
}

/// `size` bytes that look random and are the same for the same `seed`.
pub fn random(path: &Path, size: u64, seed: u64) {
    fs::write(path, random_bytes(usize::try_from(size).expect("fits memory"), seed)).expect("writes");
}

/// As [`random`], in memory.
pub fn random_bytes(size: usize, seed: u64) -> Vec<u8> {
    // SplitMix64: any seed will do, also zero.
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        bytes.extend_from_slice(&next().to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

/// An ext4 file system of `size` bytes holding what is in `from`. Needs mke2fs.
pub fn ext4(path: &Path, size: u64, from: &Path) {
    sparse(path, size);
    tool(Command::new("/usr/sbin/mke2fs").args(["-q", "-F", "-t", "ext4", "-d"]).args([from, path]));
}

/// Sectors where [`gpt`] puts its two partitions: first sector and length, in units of 512 bytes.
pub const GPT_PARTITIONS: [(u64, u64); 2] = [(2048, 8192), (10240, 4096)];

/// A disk of `size` bytes (8 MiB or more) with the two partitions of [`GPT_PARTITIONS`], named `first` and
/// `second`. Needs sfdisk.
pub fn gpt(path: &Path, size: u64) {
    sparse(path, size);
    let mut script = "label: gpt\n".to_owned();
    for ((start, len), name) in GPT_PARTITIONS.into_iter().zip(["first", "second"]) {
        script += &format!("start={start}, size={len}, type=L, name={name}\n");
    }
    let mut sfdisk = Command::new("/usr/sbin/sfdisk")
        .args(["--quiet", "--no-reread", "--no-tell-kernel"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .expect("sfdisk runs");
    sfdisk.stdin.take().expect("is piped").write_all(script.as_bytes()).expect("sfdisk reads");
    assert!(sfdisk.wait().expect("sfdisk ends").success(), "sfdisk {}", path.display());
}

/// A disk of 16 MiB with the partitions of [`GPT_PARTITIONS`]: in the first an ext4 file system with the
/// contents of `from`, in the second random bytes. Needs sfdisk and mke2fs.
pub fn partitioned(path: &Path, from: &Path) {
    let [(first, first_len), (second, second_len)] = GPT_PARTITIONS;
    gpt(path, 16 << 20);
    let part = path.with_extension("p1");
    ext4(&part, first_len * 512, from);
    let disk = fs::OpenOptions::new().write(true).open(path).expect("opens");
    disk.write_all_at(&fs::read(&part).expect("reads"), first * 512).expect("writes");
    let len = usize::try_from(second_len * 512).expect("fits memory");
    disk.write_all_at(&random_bytes(len, 9), second * 512).expect("writes");
    fs::remove_file(part).expect("removes");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn randomness_repeats() {
        assert_eq!(random_bytes(1001, 7), random_bytes(1001, 7));
        assert_ne!(random_bytes(64, 7), random_bytes(64, 8));
        assert_eq!(random_bytes(64, 7), random_bytes(1001, 7)[..64]);
    }
}
