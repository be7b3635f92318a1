//! Corrects checksums in bytes that a fuzzer has changed: otherwise it would never get past them.
//! It never corrects anything else.

/// Puts the CRC-32 of `len` bytes from `from` on at `to`, where all of that is there.
fn crc(bytes: &mut [u8], from: usize, len: usize, to: usize) {
    let Some(sum) = from.checked_add(len).and_then(|end| bytes.get(from..end)).map(crc32fast::hash) else {
        return;
    };
    if let Some(place) = to.checked_add(4).and_then(|end| bytes.get_mut(to..end)) {
        place.copy_from_slice(&sum.to_le_bytes());
    }
}

/// The little-endian number at `at`, or 0.
fn u32_at(bytes: &[u8], at: usize) -> usize {
    let field = bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; 4]);
    usize::try_from(u32::from_le_bytes(field)).unwrap_or(0)
}

/// A GPT in sectors of 512 bytes: its entries' sum, then its header's.
pub(crate) fn gpt(bytes: &mut [u8]) {
    const HEADER: usize = 512;
    let entries = u32_at(bytes, HEADER + 72).saturating_mul(512);
    let len = u32_at(bytes, HEADER + 80).saturating_mul(u32_at(bytes, HEADER + 84));
    crc(bytes, entries, len, HEADER + 88);
    if let Some(own) = bytes.get_mut(HEADER + 16..HEADER + 20) {
        own.fill(0);
    }
    let len = u32_at(bytes, HEADER + 12).min(512);
    crc(bytes, HEADER, len, HEADER + 16);
}

/// An LVM2 physical volume with its label in the second sector: the text of each area, its header, the label.
pub(crate) fn lvm2(bytes: &mut [u8]) {
    let areas: Vec<usize> = (0..bytes.len())
        .step_by(512)
        .filter(|at| bytes.get(at + 4..).is_some_and(|rest| rest.starts_with(b" LVM2 x[5A%r0N*>")))
        .collect();
    for area in areas {
        let (text, len) = (u32_at(bytes, area + 40), u32_at(bytes, area + 48));
        lvm2_crc(bytes, area.saturating_add(text), len, area + 56);
        lvm2_crc(bytes, area + 4, 508, area);
    }
    lvm2_crc(bytes, 512 + 20, 492, 512 + 16);
}

/// As [`crc`], with LVM's start and without the inversion at the end.
fn lvm2_crc(bytes: &mut [u8], from: usize, len: usize, to: usize) {
    let Some(part) = from.checked_add(len).and_then(|end| bytes.get(from..end)) else { return };
    let mut sum = crc32fast::Hasher::new_with_initial(!0xf597_a6cf);
    sum.update(part);
    let sum = !sum.finalize();
    if let Some(place) = bytes.get_mut(to..to + 4) {
        place.copy_from_slice(&sum.to_le_bytes());
    }
}

/// The last stream of an .xz file: header, index and footer, and the headers of the first block.
pub(crate) fn xz(bytes: &mut [u8]) {
    let len = bytes.len();
    if len < 24 || !bytes.starts_with(b"\xfd7zXZ\0") {
        return;
    }
    crc(bytes, 6, 2, 8);
    crc(bytes, len - 8, 6, len - 12);
    let index = (u32_at(bytes, len - 8) + 1).saturating_mul(4);
    if let Some(start) = (len - 12).checked_sub(index) {
        crc(bytes, start, index - 4, len - 16);
    }
    if let Some(block) = bytes.get_mut(12..) {
        xz_block(block);
    }
}

/// The inverted sum of the bytes of a part, big-endian, in the part itself.
fn sum(part: Option<&mut [u8]>, at: usize) {
    let Some(part) = part else { return };
    let Some(place) = part.get_mut(at..at + 4) else { return };
    place.fill(0);
    let sum = !part.iter().fold(0_u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
    if let Some(place) = part.get_mut(at..at + 4) {
        place.copy_from_slice(&sum.to_be_bytes());
    }
}

/// The footer of a VHD at either end, and the header of a dynamic one where it usually is.
pub(crate) fn vhd(bytes: &mut [u8]) {
    const COOKIE: &[u8] = b"conectix";
    if bytes.starts_with(COOKIE) {
        sum(bytes.get_mut(..512), 64);
        sum(bytes.get_mut(512..1536), 36);
    }
    let end = bytes.len().saturating_sub(512);
    if bytes.get(end..).is_some_and(|footer| footer.starts_with(COOKIE)) {
        sum(bytes.get_mut(end..), 64);
    }
}

/// The headers and the region tables of a VHDX.
pub(crate) fn vhdx(bytes: &mut [u8]) {
    if !bytes.starts_with(b"vhdxfile") {
        return;
    }
    for (at, len) in [(64 << 10, 4 << 10), (128 << 10, 4 << 10), (192 << 10, 64 << 10), (256 << 10, 64 << 10)]
    {
        let Some(part) = bytes.get_mut(at..at + len) else { return };
        if let Some(place) = part.get_mut(4..8) {
            place.fill(0);
        }
        let sum = crc32c(part);
        if let Some(place) = part.get_mut(4..8) {
            place.copy_from_slice(&sum.to_le_bytes());
        }
    }
}

/// CRC-32C by a table of 256 entries.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0_u32; 256];
        let mut index = 0;
        while index < table.len() {
            let (mut crc, mut bit) = (index as u32, 0);
            while bit < 8 {
                crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
                bit += 1;
            }
            table[index] = crc;
            index += 1;
        }
        table
    };
    !bytes.iter().fold(!0, |crc, byte| crc >> 8 ^ TABLE[usize::from(crc as u8 ^ byte)])
}

/// The header of a block of an .xz file.
pub(crate) fn xz_block(bytes: &mut [u8]) {
    let len = bytes.first().map_or(0, |size| usize::from(*size) * 4);
    crc(bytes, 0, len, len);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_get_checksums_without_harm() {
        for len in 0..2000 {
            for byte in [0, 1, 0xff] {
                let mut bytes = vec![byte; len];
                if let Some(magic) = bytes.get_mut(..6) {
                    magic.copy_from_slice(b"\xfd7zXZ\0");
                }
                gpt(&mut bytes);
                xz(&mut bytes);
                xz_block(&mut bytes);
                if let Some(magic) = bytes.get_mut(..8) {
                    magic.copy_from_slice(b"conectix");
                }
                vhd(&mut bytes);
                assert_eq!(bytes.len(), len);
            }
        }
    }

    #[test]
    fn a_sum_is_where_it_belongs() {
        let mut bytes = *b"123456789    ";
        crc(&mut bytes, 0, 9, 9);
        assert_eq!(bytes[9..], 0xcbf4_3926_u32.to_le_bytes());
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }
}
