//! How a file is compressed, and the pieces that its reader finds in it.
//! It never takes a piece that is longer than becket decodes at once.

use crate::codec::Codec;
use crate::encoded::{Block, STORED_MAX};
use crate::image::Layout;
use crate::layer::{Format, LayerError};

/// How an image can be packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Xz,
    Zstd,
    Gzip,
}

impl Kind {
    pub(crate) fn format(self) -> Format {
        match self {
            Kind::Xz => Format::Xz,
            Kind::Zstd => Format::Zstd,
            Kind::Gzip => Format::Gzip,
        }
    }

    fn codec(self) -> Codec {
        match self {
            Kind::Xz => Codec::XzBlock,
            Kind::Zstd => Codec::Zstd,
            Kind::Gzip => Codec::GzipMember,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Xz => "xz",
            Kind::Zstd => "zstd",
            Kind::Gzip => "gzip",
        }
    }
}

/// The pieces of a file, as its reader finds them.
pub(super) struct Pieces {
    pub(super) kind: Kind,
    pub(super) layout: Layout,
    pub(super) count: u32,
    /// What the longest yields.
    pub(super) longest: u32,
}

impl Pieces {
    /// The next piece is packed in `len` bytes from byte `at` on and yields exactly `yields`.
    pub(super) fn push(&mut self, at: u64, len: u64, yields: u64) -> Result<(), LayerError> {
        self.fits(yields, "")?;
        self.fits(len, "compressed ")?;
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

    /// That a piece is no longer than becket decodes at once.
    pub(super) fn fits(&self, len: u64, what: &str) -> Result<(), LayerError> {
        if len > STORED_MAX.into() {
            return self.sequential(format!(
                "a piece of it has {len} {what}bytes, and at most {STORED_MAX} are taken"
            ));
        }
        Ok(())
    }

    /// That the file can be read from its start only.
    pub(super) fn sequential<T>(&self, why: impl Into<String>) -> Result<T, LayerError> {
        Err(LayerError::Sequential { packer: self.kind.name(), why: why.into() })
    }
}
