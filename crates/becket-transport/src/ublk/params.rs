//! A geometry in the driver's words: shifts, sectors and masks.
//! It never sends what the driver would refuse: what cannot be said is an error here, with the reason.

use becket_engine::Geometry;
use becket_uapi::ublk::{
    ParamBasic, ParamDiscard, ParamDmaAlign, Params, UBLK_ATTR_FUA, UBLK_ATTR_READ_ONLY,
    UBLK_ATTR_ROTATIONAL, UBLK_ATTR_VOLATILE_CACHE, UBLK_PARAM_TYPE_BASIC, UBLK_PARAM_TYPE_DISCARD,
    UBLK_PARAM_TYPE_DMA_ALIGN,
};

use crate::Error;

const SECTOR: u64 = 512;

/// Longest discard and write-zeroes, in sectors: 1 GiB. A longer one would keep a thread of the server busy
/// for long if the backing does it slowly; the kernel splits.
const LONGEST_ERASE: u32 = (1 << 30) / SECTOR as u32;

/// The exponent for "no preferred large request". The driver has no value for it, but the block layer rounds
/// this single byte down to whole physical blocks: to none. A block's size would be taken literally: btrfs
/// writes back in pieces of that size (Linux 7), which doubled the time of filling one.
const NO_PREFERENCE: u32 = 0;

/// The parameters for a geometry.
pub(super) fn from_geometry(geometry: &Geometry) -> Result<Params, Error> {
    let page = page_size();
    let logical = power(geometry.logical_block, "logical blocks")?;
    let physical = power(geometry.physical_block, "physical blocks")?.max(logical);
    if !(9..=page.trailing_zeros()).contains(&logical) {
        return Err(refuse(format!(
            "logical blocks of {} bytes: 512 to {page} are possible",
            geometry.logical_block
        )));
    }
    if geometry.size == 0 || !geometry.size.is_multiple_of(1 << logical) {
        return Err(refuse(format!(
            "{} bytes: not whole blocks of {}",
            geometry.size, geometry.logical_block
        )));
    }
    if geometry.max_io < page || !geometry.max_io.is_multiple_of(page) {
        return Err(refuse(format!("requests of at most {} bytes: not whole pages", geometry.max_io)));
    }
    // The driver knows powers of two only: another preferred size (the stripe of an uneven RAID) is better
    // not named than named wrong. A "large" request of the smallest size says nothing either.
    let io_min = preferred(geometry.io_min).unwrap_or(physical).max(physical);
    let io_opt = preferred(geometry.io_opt).filter(|size| *size > io_min).unwrap_or(NO_PREFERENCE);

    // Writes are durable only after a flush, whatever the backing: its page cache or its disk has them.
    let mut attrs = UBLK_ATTR_VOLATILE_CACHE | UBLK_ATTR_FUA;
    if geometry.read_only {
        attrs |= UBLK_ATTR_READ_ONLY;
    }
    if geometry.rotational {
        attrs |= UBLK_ATTR_ROTATIONAL;
    }
    let mut params = Params {
        len: size_of::<Params>() as u32,
        types: UBLK_PARAM_TYPE_BASIC,
        basic: ParamBasic {
            attrs,
            logical_bs_shift: logical as u8,
            physical_bs_shift: physical as u8,
            io_opt_shift: io_opt as u8,
            io_min_shift: io_min as u8,
            max_sectors: geometry.max_io / SECTOR as u32,
            dev_sectors: geometry.size / SECTOR,
            ..ParamBasic::default()
        },
        ..Params::default()
    };
    if geometry.discard || geometry.write_zeroes {
        params.types |= UBLK_PARAM_TYPE_DISCARD;
        params.discard = ParamDiscard {
            // Not 0 for the driver, also where only zeroes can be written.
            discard_granularity: geometry.discard_granularity.max(geometry.logical_block),
            max_discard_sectors: if geometry.discard { LONGEST_ERASE } else { 0 },
            max_write_zeroes_sectors: if geometry.write_zeroes { LONGEST_ERASE } else { 0 },
            max_discard_segments: 1,
            ..ParamDiscard::default()
        };
    }
    // The driver wants a mask below the page size. A larger alignment is impossible; such a backing's
    // requests are bounced by the engine. Drivers before 6.15 silently drop this block.
    let alignment = power(geometry.dma_align, "memory alignment")?;
    if alignment > 0 {
        params.types |= UBLK_PARAM_TYPE_DMA_ALIGN;
        params.dma =
            ParamDmaAlign { alignment: geometry.dma_align.min(page / 2) - 1, ..ParamDmaAlign::default() };
    }
    Ok(params)
}

/// The exponent of a power of two.
fn power(value: u32, what: &str) -> Result<u32, Error> {
    match value.is_power_of_two() {
        true => Ok(value.trailing_zeros()),
        false => Err(refuse(format!("{what} of {value} bytes: not a power of two"))),
    }
}

/// The exponent of a preferred size that can be said.
fn preferred(bytes: u32) -> Option<u32> {
    bytes.is_power_of_two().then(|| bytes.trailing_zeros())
}

fn refuse(what: String) -> Error {
    Error::Geometry { what }
}

fn page_size() -> u32 {
    u32::try_from(rustix::param::page_size()).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Geometry {
        Geometry {
            size: 10 << 20,
            logical_block: 512,
            physical_block: 4096,
            io_min: 4096,
            io_opt: 0,
            dma_align: 512,
            read_only: false,
            rotational: false,
            discard: true,
            discard_granularity: 4096,
            write_zeroes: true,
            max_io: 512 << 10,
        }
    }

    fn said(geometry: &Geometry) -> Params {
        from_geometry(geometry).unwrap()
    }

    #[test]
    fn a_plain_geometry_in_the_drivers_words() {
        let params = said(&plain());
        assert_eq!(params.len, 152);
        assert_eq!(params.types, UBLK_PARAM_TYPE_BASIC | UBLK_PARAM_TYPE_DISCARD | UBLK_PARAM_TYPE_DMA_ALIGN);
        let basic = params.basic;
        assert_eq!((basic.logical_bs_shift, basic.physical_bs_shift), (9, 12));
        assert_eq!((basic.io_min_shift, basic.io_opt_shift), (12, 0), "no optimal size: one byte");
        assert_eq!((basic.max_sectors, basic.dev_sectors), (1024, 20480));
        assert_eq!(basic.attrs, UBLK_ATTR_VOLATILE_CACHE | UBLK_ATTR_FUA);
        assert_eq!((basic.chunk_sectors, basic.virt_boundary_mask), (0, 0));
        assert_eq!(params.discard.max_discard_segments, 1);
        assert_eq!((params.discard.discard_granularity, params.discard.max_discard_sectors), (4096, 1 << 21));
        assert_eq!(params.dma.alignment, 511, "a mask");
    }

    #[test]
    fn attributes_follow_the_backing() {
        let params = said(&Geometry { read_only: true, rotational: true, ..plain() });
        assert_ne!(params.basic.attrs & UBLK_ATTR_READ_ONLY, 0);
        assert_ne!(params.basic.attrs & UBLK_ATTR_ROTATIONAL, 0);
    }

    #[test]
    fn erasing_is_said_as_far_as_it_goes() {
        let zeroes = said(&Geometry { discard: false, discard_granularity: 0, ..plain() });
        assert_eq!(
            (zeroes.discard.max_discard_sectors, zeroes.discard.max_write_zeroes_sectors),
            (0, 1 << 21)
        );
        assert_ne!(zeroes.discard.discard_granularity, 0, "the driver refuses 0");
        let none = said(&Geometry { discard: false, write_zeroes: false, ..plain() });
        assert_eq!(none.types & UBLK_PARAM_TYPE_DISCARD, 0);
    }

    #[test]
    fn sizes_that_are_no_powers_of_two_are_not_named() {
        assert_eq!(said(&Geometry { io_opt: 384 << 10, ..plain() }).basic.io_opt_shift, 0);
        assert_eq!(said(&Geometry { io_opt: 256 << 10, ..plain() }).basic.io_opt_shift, 18);
        for small in [512, 4096] {
            let basic = said(&Geometry { io_opt: small, ..plain() }).basic;
            assert_eq!(basic.io_opt_shift, 0, "{small} is no large request where 4096 is the smallest");
        }
        assert_eq!(said(&Geometry { io_min: 512, ..plain() }).basic.io_min_shift, 12, "not below a block");
    }

    #[test]
    fn no_alignment_is_no_block_and_a_large_one_is_cut() {
        assert_eq!(said(&Geometry { dma_align: 1, ..plain() }).types & UBLK_PARAM_TYPE_DMA_ALIGN, 0);
        assert!(said(&Geometry { dma_align: 1 << 20, ..plain() }).dma.alignment < page_size());
    }

    #[test]
    fn what_the_driver_would_refuse_is_refused() {
        for wrong in [
            Geometry { logical_block: 256, ..plain() },
            Geometry { logical_block: 1000, ..plain() },
            Geometry { logical_block: 128 << 10, size: 1 << 30, ..plain() },
            Geometry { size: 0, ..plain() },
            Geometry { size: 5000, ..plain() },
            Geometry { max_io: 512, ..plain() },
            Geometry { max_io: 5000, ..plain() },
            Geometry { dma_align: 0, ..plain() },
        ] {
            assert!(from_geometry(&wrong).is_err(), "{wrong:?}");
        }
    }
}
