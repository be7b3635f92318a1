//! How long an image becomes that a compressed file yields, where that can be known before it is decoded.
//! A .gz says it modulo 4 GiB, and only of its last member: it is believed where what is packed agrees.

use crate::Error;
use crate::stream::Stream;
use crate::unpack::Packing;

/// How much of what is packed is looked at, in bytes: as far as superblocks go.
const HEAD: usize = 68 << 10;
/// How many bytes may lie behind what a file system or a partition table speaks of.
const BEHIND: u64 = 16 << 20;
const SECTOR: u64 = 512;

/// The length in bytes; `None` where only decoding shows it. Later it may still prove to be another.
///
/// # Errors
/// The file cannot be read or decoded.
pub(crate) fn of(stream: &Stream) -> Result<Option<u64>, Error> {
    match stream.packing {
        Packing::Gzip => of_gzip(stream),
        Packing::Lz4 => of_lz4(stream),
        // becket-image has read what they say.
        Packing::Xz | Packing::Zstd | Packing::Bzip2 => Ok(None),
    }
}

fn of_gzip(stream: &Stream) -> Result<Option<u64>, Error> {
    let mut last = [0; 4];
    read(stream, &mut last, stream.len.saturating_sub(4))?;
    let mut head = vec![0; HEAD];
    stream.fill(&mut stream.begin()?, &mut head)?;
    Ok(claimed(&head).and_then(|claimed| agreed(u32::from_le_bytes(last), claimed)))
}

/// The frame's header has it where `lz4 --content-size` was used.
fn of_lz4(stream: &Stream) -> Result<Option<u64>, Error> {
    let mut head = [0; 14];
    read(stream, &mut head, 0)?;
    let [0x04, 0x22, 0x4d, 0x18, flags, _, size @ ..] = head else { return Ok(None) };
    Ok((flags & 8 != 0).then(|| u64::from_le_bytes(size)))
}

fn read(stream: &Stream, buf: &mut [u8], at: u64) -> Result<(), Error> {
    let mut done = 0;
    while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match stream.packed.read(rest, at + done as u64)? {
            0 => break,
            len => done += len,
        }
    }
    Ok(())
}

/// The length that is `modulo` but for a multiple of 4 GiB, if that agrees with what is claimed.
fn agreed(modulo: u32, claimed: u64) -> Option<u64> {
    let behind = u64::from(modulo.wrapping_sub(u32::try_from(claimed & u64::from(u32::MAX)).ok()?));
    (behind <= BEHIND).then(|| claimed.checked_add(behind))?
}

/// How many bytes an image has at least, by its partition table or its superblock.
fn claimed(head: &[u8]) -> Option<u64> {
    let has = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(magic));
    let bytes = |at: usize, len: usize| head.get(at..at + len).unwrap_or_default();
    let little = |at, len| bytes(at, len).iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    let big = |at, len| bytes(at, len).iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    if has(512, b"EFI PART") {
        // The other copy of the table is in the last sector.
        return little(544, 8).checked_add(1)?.checked_mul(SECTOR);
    }
    if has(0, b"hsqs") {
        return Some(little(40, 8));
    }
    if has(0, b"XFSB") {
        return big(4, 4).checked_mul(big(8, 8));
    }
    if has(1080, b"\x53\xef") {
        let high = if little(1120, 4) & 0x80 == 0 { 0 } else { little(1360, 4) << 32 };
        let unit = 1024_u64.checked_shl(u32::try_from(little(1048, 4)).ok()?)?;
        return (little(1028, 4) | high).checked_mul(unit);
    }
    if has(32769, b"CD001") {
        return little(32848, 4).checked_mul(2048);
    }
    if has(65600, b"_BHRfS_M") {
        return Some(little(65648, 8));
    }
    if has(510, b"\x55\xaa") {
        // The end of the last partition.
        let entries = (446..510).step_by(16);
        return entries
            .map(|at| (little(at + 8, 4) + little(at + 12, 4)) * SECTOR)
            .max()
            .filter(|end| *end > 0);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_modulo_4_gib_is_believed_where_the_content_agrees() {
        assert_eq!(agreed(1 << 20, 1 << 20), Some(1 << 20));
        assert_eq!(agreed(0, 8 << 30), Some(8 << 30));
        assert_eq!(agreed(5 << 20, (4 << 30) + (1 << 20)), Some((4 << 30) + (5 << 20)), "there is slack");
        assert_eq!(agreed(1 << 20, (8 << 30) - (1 << 20)), Some((8 << 30) + (1 << 20)), "over the edge");
        assert_eq!(agreed(0, 1 << 30), None, "the last member is an empty one");
        assert_eq!(agreed(1 << 20, 1 << 30), None, "it has several members");
        assert_eq!(agreed(7, u64::MAX), None);
    }

    #[test]
    fn what_an_image_claims_is_found_at_its_start_and_no_bytes_are_too_strange() {
        for tool in [
            &["mke2fs", "-q", "-t", "ext4", "-O", "64bit"][..],
            &["mke2fs", "-q", "-t", "ext2", "-b", "1024"],
            &["mkfs.xfs", "-q", "-f"],
            &["mkfs.btrfs", "-q", "-f"],
        ] {
            let temp = tempfile::NamedTempFile::new().unwrap();
            temp.as_file().set_len(400 << 20).unwrap();
            let done =
                std::process::Command::new(tool[0]).args(&tool[1..]).arg(temp.path()).output().unwrap();
            assert!(done.status.success(), "{tool:?}: {done:?}");
            let mut head = vec![0; HEAD];
            std::os::unix::fs::FileExt::read_exact_at(temp.as_file(), &mut head, 0).unwrap();
            assert_eq!(claimed(&head), Some(400 << 20), "{tool:?}");
        }
        assert_eq!(claimed(&[]), None);
        assert_eq!(claimed(&[0; HEAD]), None);
    }

    proptest::proptest! {
        #[test]
        fn any_head_is_judged(
            magic in proptest::sample::select(vec![
                (512, &b"EFI PART"[..]), (0, b"hsqs"), (0, b"XFSB"), (1080, b"\x53\xef"), (32769, b"CD001"),
                (65600, b"_BHRfS_M"), (510, b"\x55\xaa"),
            ]),
            byte in proptest::prelude::any::<u8>(),
            len in 0_usize..HEAD,
            modulo in proptest::prelude::any::<u32>(),
        ) {
            let mut head = vec![byte; HEAD];
            let (at, magic) = magic;
            head[at..at + magic.len()].copy_from_slice(magic);
            for head in [&head[..], &head[..len]] {
                if let Some(length) = claimed(head).and_then(|claimed| agreed(modulo, claimed)) {
                    assert_eq!(length as u32, modulo);
                }
            }
        }
    }
}
