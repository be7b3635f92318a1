//! How long an image becomes that a compressed file yields, where that can be known before it is decoded.
//!
//! A .gz says it modulo 4 GiB, and only of its last member: it is believed where what is packed agrees. What
//! the header of a .lz4 says is that of its first frame. On this host others are looked for; on a server that
//! would take a request for each block, or all bytes. There a length counts if the image does not speak of
//! more.

use crate::Error;
use crate::stream::Stream;
use crate::unpack::Packing;

/// How much of what is packed is looked at, in bytes: as far as superblocks go.
const HEAD: usize = 68 << 10;
/// How many bytes may lie behind what a file system or a partition table speaks of.
const BEHIND: u64 = 16 << 20;
const SECTOR: u64 = 512;
/// How much is read at once, and how far what may be a member of a .gz is decoded, in bytes: what is none
/// fails sooner.
const READ: usize = 256 << 10;
const MEMBER: usize = 1 << 20;

/// The length in bytes; `None` where only decoding shows it. `says` is what becket-image has read in the
/// file. On a server it may still prove to be another, unless it must be `certain`.
///
/// # Errors
/// The file cannot be read or decoded.
pub(crate) fn of(stream: &Stream, says: Option<u64>, certain: bool) -> Result<Option<u64>, Error> {
    // The index of a .xz is of all its blocks.
    let near = stream.packed.is_near() || stream.packing == Packing::Xz;
    if certain && !near {
        return Ok(None);
    }
    let size = match stream.packing {
        Packing::Gzip => return of_gzip(stream, near),
        Packing::Lz4 => of_lz4(stream, near)?,
        Packing::Xz | Packing::Zstd | Packing::Bzip2 => says,
    };
    let Some(size) = size.filter(|_| !near) else { return Ok(size) };
    Ok(claimed(&head(stream)?).is_none_or(|claimed| claimed <= size).then_some(size))
}

/// The start of what is packed.
fn head(stream: &Stream) -> Result<Vec<u8>, Error> {
    let mut head = vec![0; HEAD];
    let len = stream.fill(&mut stream.begin()?, &mut head)?;
    head.truncate(len);
    Ok(head)
}

fn of_gzip(stream: &Stream, near: bool) -> Result<Option<u64>, Error> {
    let mut last = [0; 4];
    read(stream, &mut last, stream.len.saturating_sub(4))?;
    let size = claimed(&head(stream)?).and_then(|claimed| agreed(u32::from_le_bytes(last), claimed));
    if size.is_some() && near && has_members(stream)? { Ok(None) } else { Ok(size) }
}

/// Whether a .gz has a second member: whether what begins like one can be decoded, up to the end of the file
/// if that is near.
fn has_members(stream: &Stream) -> Result<bool, Error> {
    let (mut buffer, mut yielded, mut from) = (vec![0; READ], vec![0; MEMBER], 1);
    loop {
        let len = read(stream, &mut buffer, from)?;
        let bytes = buffer.get(..len).unwrap_or_default();
        // Some bits of the fourth byte are never set.
        let begins =
            |at: &usize| matches!(bytes.get(*at..), Some([0x1f, 0x8b, 8, flags, ..]) if flags & 0xe0 == 0);
        let mut at = 0;
        while let Some(next) = bytes.get(at..).and_then(|rest| rest.iter().position(|byte| *byte == 0x1f)) {
            at += next;
            if begins(&at) && is_member(stream, from + at as u64, &mut yielded)? {
                return Ok(true);
            }
            at += 1;
        }
        if len < READ {
            return Ok(false);
        }
        from += len as u64 - 3;
    }
}

fn is_member(stream: &Stream, at: u64, yielded: &mut [u8]) -> Result<bool, Error> {
    let decoded = stream.begin_at(at).and_then(|mut decoding| stream.fill(&mut decoding, yielded));
    match decoded {
        Ok(_) => Ok(true),
        Err(Error::Stream { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The frames' headers have it where `lz4 --content-size` was used.
fn of_lz4(stream: &Stream, near: bool) -> Result<Option<u64>, Error> {
    let (mut at, mut all) = (0, 0_u64);
    while at < stream.len {
        let mut header = [0; 14];
        read(stream, &mut header, at)?;
        let [0x04, 0x22, 0x4d, 0x18, flags, _, size @ ..] = header else { return Ok(None) };
        let has = |bit: u8| flags & bit != 0;
        if !has(8) {
            return Ok(None);
        }
        let Some(sum) = all.checked_add(u64::from_le_bytes(size)) else { return Ok(None) };
        all = sum;
        if !near {
            break;
        }
        at += 15 + if has(1) { 4 } else { 0 };
        // The next frame is behind the last block, which is none, and the checksum of all of them.
        loop {
            let mut len = [0; 4];
            read(stream, &mut len, at)?;
            let len = u32::from_le_bytes(len) & !(1 << 31);
            at += 4;
            if len == 0 {
                break;
            }
            at += u64::from(len) + if has(16) { 4 } else { 0 };
        }
        at += if has(4) { 4 } else { 0 };
    }
    Ok(Some(all))
}

/// Reads what is stored; says how many bytes there are, which are fewer at the end only.
fn read(stream: &Stream, buf: &mut [u8], at: u64) -> Result<usize, Error> {
    let mut done = 0;
    while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match stream.packed.read(rest, at + done as u64)? {
            0 => break,
            len => done += len,
        }
    }
    Ok(done)
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
    use crate::stream::{PackedFile, written};

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

    /// What programs make of some bytes, one after another, as the file of this host that it is.
    fn packed(packing: Packing, parts: &[&[u8]], words: &[&str]) -> Stream {
        let mut file = tempfile::tempfile().unwrap();
        for part in parts {
            let plain = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(plain.path(), part).unwrap();
            let mut command = std::process::Command::new(words[0]);
            let made = command.args(&words[1..]).arg(plain.path()).output().unwrap();
            assert!(made.status.success(), "{words:?}: {made:?}");
            std::io::Write::write_all(&mut file, &made.stdout).unwrap();
        }
        let meta = file.metadata().unwrap();
        let packed = PackedFile { file, state: written(&meta), called: "x".to_owned() };
        let (called, packed) = ("x".to_owned(), std::sync::Arc::new(packed));
        Stream { packing, called, len: meta.len(), packed, limit: None, progress: None }
    }

    /// A disk of 4 MiB with a table of partitions, and another file in its middle.
    fn disk(with: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 4 << 20];
        bytes[512..520].copy_from_slice(b"EFI PART");
        bytes[544..552].copy_from_slice(&(8191_u64).to_le_bytes());
        bytes[1 << 20..][..with.len()].copy_from_slice(with);
        bytes
    }

    #[test]
    fn frames_and_members_that_follow_are_seen() {
        let noise: Vec<u8> =
            (0..200_000_u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        let bytes = disk(&noise);
        let all = bytes.len() as u64;
        let halves = bytes.split_at(1 << 20);
        let lz4 = ["lz4", "-1", "-q", "-c", "--content-size"];
        for more in [&[][..], &["-BX"], &["--no-frame-crc", "-B4"]] {
            let words = [&lz4[..], more].concat();
            let of = |parts: &[&[u8]]| of(&packed(Packing::Lz4, parts, &words), None, true).unwrap();
            assert_eq!((of(&[&bytes]), of(&[halves.0, halves.1])), (Some(all), Some(all)), "{more:?}");
        }
        let mut mixed = packed(Packing::Lz4, &[&bytes], &lz4);
        assert_eq!(of(&packed(Packing::Lz4, &[&bytes], &lz4[..4]), None, true).unwrap(), None);
        mixed.len -= 1;
        assert_eq!(of(&mixed, None, true).unwrap(), Some(all), "decoding says that it is cut short");

        let gzip = ["gzip", "-1", "-n", "-c"];
        let of = |parts: &[&[u8]]| of(&packed(Packing::Gzip, parts, &gzip), None, true).unwrap();
        assert_eq!((of(&[&bytes]), of(&[&bytes, &bytes])), (Some(all), None));
        // A .gz that is a file of the image may be stored as it is.
        let inner = packed(Packing::Gzip, &[&noise], &gzip);
        let mut stored = vec![0; inner.len as usize];
        assert_eq!(read(&inner, &mut stored, 0).unwrap() as u64, inner.len);
        let level = disk(&stored);
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
        std::io::Write::write_all(&mut encoder, &level).unwrap();
        let outer = encoder.finish().unwrap();
        assert!(outer.windows(40).any(|part| part == &stored[..40]), "it is stored as it is");
        let outer = packed(Packing::Gzip, &[&outer], &["cat"]);
        assert_eq!(super::of(&outer, None, true).unwrap(), Some(all));
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
