//! How a file is compressed, and the pieces that its reader finds in it.
//! It never takes a piece that is longer than becket decodes at once.

use crate::codec::Codec;
use crate::encoded::{Block, STORED_MAX};
use crate::image::Layout;
use crate::layer::{Format, LayerError};

/// How an image can be packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    Xz,
    Zstd,
    Gzip,
}

impl Packing {
    pub(crate) fn format(self) -> Format {
        match self {
            Packing::Xz => Format::Xz,
            Packing::Zstd => Format::Zstd,
            Packing::Gzip => Format::Gzip,
        }
    }

    fn codec(self) -> Codec {
        match self {
            Packing::Xz => Codec::XzBlock,
            Packing::Zstd => Codec::Zstd,
            Packing::Gzip => Codec::GzipMember,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Packing::Xz => "xz",
            Packing::Zstd => "zstd",
            Packing::Gzip => "gzip",
        }
    }
}

/// The pieces of a file, as its reader finds them.
pub(super) struct Pieces {
    pub(super) kind: Packing,
    pub(super) layout: Layout,
    pub(super) count: u32,
    /// What the longest yields.
    pub(super) longest: u32,
    /// What all yield.
    yields: u64,
    /// Why not all of them can be taken.
    too_long: Option<String>,
}

impl Pieces {
    pub(super) fn new(kind: Packing, layout: Layout) -> Pieces {
        Pieces { kind, layout, count: 0, longest: 0, yields: 0, too_long: None }
    }

    /// The next piece is packed in `len` bytes from byte `at` on and yields exactly `yields`.
    pub(super) fn push(&mut self, at: u64, len: u64, yields: u64) -> Result<(), LayerError> {
        self.yields = self.yields.saturating_add(yields);
        let too_long = too_long(yields, "").or_else(|| too_long(len, "compressed "));
        self.too_long = self.too_long.take().or(too_long);
        if self.too_long.is_some() {
            return Ok(());
        }
        // Both fit: they are no larger than a block.
        let small = |number: u64| u32::try_from(number).unwrap_or(0);
        let yields = small(yields);
        if yields == 0 {
            return Ok(());
        }
        self.count = self.count.saturating_add(1);
        self.longest = self.longest.max(yields);
        let block = Block { start: 0, len: yields, input: at, input_len: small(len), skip: 0, yields };
        self.layout.encoded(self.kind.codec(), block)
    }

    /// The same for what is taken for the last piece, unless it is found: that it is not too long.
    pub(super) fn fits(&self, yields: u64) -> Result<(), LayerError> {
        let all = self.yields.saturating_add(yields);
        too_long(yields, "").map_or(Ok(()), |why| self.sequential(why, Some(all)))
    }

    /// That all pieces could be taken.
    pub(super) fn end(&mut self) -> Result<(), LayerError> {
        self.too_long.take().map_or(Ok(()), |why| self.sequential(why, Some(self.yields)))
    }

    /// That the file can be read from its start only; and how many bytes it yields.
    pub(super) fn sequential<T>(&self, why: impl Into<String>, yields: Option<u64>) -> Result<T, LayerError> {
        Err(LayerError::Sequential { packer: self.kind.name(), why: why.into(), yields })
    }
}

/// Why a piece is longer than becket decodes at once, if it is.
fn too_long(len: u64, what: &str) -> Option<String> {
    let why = || format!("a piece of it has {len} {what}bytes, and at most {STORED_MAX} are taken");
    (len > STORED_MAX.into()).then(why)
}
