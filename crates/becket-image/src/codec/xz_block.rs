//! One block of an .xz file, decoded by itself: header, data, padding, check.
//! It never takes more memory than the block yields, whatever dictionary its header asks for.
//!
//! liblzma's stream decoder cannot start in the middle of a stream. So this module reads the header, and
//! passes the filter chain that it names to liblzma.
//!
//! Followed: The .xz File Format 1.2.1, section 3.

use crc::{CRC_64_XZ, Crc, Table};
use liblzma::stream::{Action, Filters, Status, Stream};

use super::sha256::sha256;
use crate::bytes::{part, u8_at, u32_at, u64_at};
use crate::varint;

/// A chain has no more filters than that.
const FILTERS_MAX: u8 = 4;
const LZMA2: u64 = 0x21;

/// Decodes a block to the start of `output`; how many bytes it yielded.
///
/// # Errors
/// It is damaged, or yields more than there is room for.
pub(super) fn decode(input: &[u8], output: &mut [u8]) -> Result<usize, String> {
    let (filters, body) = header(input, output.len())?;
    let mut stream = Stream::new_raw_decoder(&filters).map_err(|error| error.to_string())?;
    loop {
        let (read, written) = (at(stream.total_in()), at(stream.total_out()));
        let rest = output.get_mut(written..).unwrap_or_default();
        let status = stream.process(body.get(read..).unwrap_or_default(), rest, Action::Finish);
        if status.map_err(|error| error.to_string())? == Status::StreamEnd {
            break;
        }
        if (at(stream.total_in()), at(stream.total_out())) == (read, written) {
            return Err("it does not end where it should".to_owned());
        }
    }
    let len = at(stream.total_out());
    // The header's length is a multiple of four, so the padding is that of the data.
    let data = at(stream.total_in()).next_multiple_of(4);
    let padding = body.get(at(stream.total_in())..data).ok_or("its padding is missing")?;
    if padding.iter().any(|byte| *byte != 0) {
        return Err("its padding is not zero".to_owned());
    }
    let check = body.get(data..).unwrap_or_default();
    let decoded = output.get(..len).unwrap_or_default();
    let matches = match check.len() {
        0 => true,
        4 => u32_at(check, 0) == crc32fast::hash(decoded),
        8 => u64_at(check, 0) == crc64(decoded),
        32 => check == sha256(decoded),
        other => return Err(format!("a check of {other} bytes is not known")),
    };
    if matches { Ok(len) } else { Err("its checksum does not match".to_owned()) }
}

/// A count of bytes in memory.
fn at(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// Reads the header of a block that yields `yields` bytes: its filters, and what comes behind it.
fn header(input: &[u8], yields: usize) -> Result<(Filters, &[u8]), String> {
    let len = (usize::from(u8_at(input, 0)) + 1) * 4;
    if len == 4 || input.len() < len {
        return Err("its header is cut short".to_owned());
    }
    let (head, body) = input.split_at(len);
    let fields = part(head, 0, len - 4);
    if crc32fast::hash(fields) != u32_at(head, len - 4) {
        return Err("the checksum of its header does not match".to_owned());
    }
    let flags = u8_at(fields, 1);
    if flags & 0x3c != 0 {
        return Err(format!("flags {flags:#x} are not known"));
    }
    let mut rest = fields.get(2..).unwrap_or_default();
    let mut number = || varint::take(&mut rest).ok_or("its header is damaged");
    // The sizes are in the index, too.
    for _ in 0..(flags & 0x40).count_ones() + (flags & 0x80).count_ones() {
        number()?;
    }
    let mut filters = Filters::new();
    for _ in 0..=flags % FILTERS_MAX {
        let id = varint::take(&mut rest).ok_or("its header is damaged")?;
        let len = varint::take(&mut rest).map(at).filter(|len| *len <= rest.len());
        let (properties, behind) = rest.split_at(len.ok_or("its header is damaged")?);
        rest = behind;
        let dictionary;
        let properties = if id == LZMA2 {
            dictionary = [no_larger(u8_at(properties, 0), yields)];
            &dictionary[..]
        } else {
            properties
        };
        add(&mut filters, id, properties)?;
    }
    Ok((filters, body))
}

/// Adds a filter to a chain.
fn add(filters: &mut Filters, id: u64, properties: &[u8]) -> Result<(), String> {
    let added = match id {
        LZMA2 => filters.lzma2_properties(properties),
        0x03 => filters.delta_properties(properties),
        0x04 => filters.x86_properties(properties),
        0x05 => filters.powerpc_properties(properties),
        0x06 => filters.ia64_properties(properties),
        0x07 => filters.arm_properties(properties),
        0x08 => filters.arm_thumb_properties(properties),
        0x09 => filters.sparc_properties(properties),
        0x0a => filters.arm64_properties(properties),
        0x0b => filters.riscv_properties(properties),
        other => return Err(format!("filter {other:#x} is not known")),
    };
    added.map(|_| ()).map_err(|error| format!("filter {id:#x}: {error}"))
}

/// The code of a dictionary that is no larger than is useful: no reference reaches back before the block's
/// start.
fn no_larger(code: u8, yields: usize) -> u8 {
    let size = |code: u8| u64::from(2 | (code & 1)) << (code / 2 + 11);
    (0..code.min(40)).find(|smaller| size(*smaller) >= yields as u64).unwrap_or(code)
}

/// CRC-64 of ECMA-182, bits reflected. The large table makes it as fast as the decoder needs.
fn crc64(bytes: &[u8]) -> u64 {
    static CRC: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&CRC_64_XZ);
    CRC.checksum(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_format() {
        assert_eq!(crc64(b"123456789"), 0x995d_c9bb_df19_39fa);
    }

    #[test]
    fn a_dictionary_is_no_larger_than_it_can_be_used() {
        // 8 MiB are asked for.
        assert_eq!(no_larger(22, 1), 0);
        assert_eq!(no_larger(22, 4096), 0);
        assert_eq!(no_larger(22, 4097), 1);
        assert_eq!(no_larger(22, 1 << 20), 16);
        assert_eq!(no_larger(22, 9 << 20), 22);
        // What no dictionary has is left for liblzma to refuse.
        assert_eq!(no_larger(200, usize::MAX), 200);
    }

    #[test]
    fn headers_that_lie_are_errors() {
        for input in [&[][..], &[0; 8], &[1, 0, 0x21, 1, 0x10, 0, 0, 0], &[0xff; 1024]] {
            assert!(decode(input, &mut [0; 64]).is_err(), "{input:?}");
        }
    }
}
