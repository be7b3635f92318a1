//! The options of `becket store`.
//! Never does anything: what a command does lives in `commands`.

use super::image::{StoreDir, StoreOptions};
use clap::{Args, Subcommand};

/// List, check, fill or empty the store of what was fetched from web servers
///
/// The store keeps the parts of images on web servers that were read once. An object of the store is one
/// version of what a URL has. Each part has a checksum, and a part that is damaged is fetched again.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  becket store list
  becket store prefetch https://example.org/disk.img
  becket store trace https://example.org/disk.img >start.trace    # after attach --record
  becket store verify
  becket store drop https://example.org/disk.img")]
pub(crate) struct Store {
    #[command(subcommand)]
    pub(crate) action: StoreAction,
}

/// What is done with the store.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreAction {
    /// List what the store has
    List {
        #[command(flatten)]
        store: StoreDir,
        /// Only what it has of these URLs
        #[arg(value_name = "URL")]
        urls: Vec<String>,
    },
    /// Compare what the store has with its checksums; what is damaged is fetched again when it is needed
    Verify {
        #[command(flatten)]
        store: StoreDir,
        /// Only what it has of these URLs
        #[arg(value_name = "URL")]
        urls: Vec<String>,
    },
    /// Write what was needed of an image since `attach --record`, for `attach --prefetch`
    Trace {
        #[command(flatten)]
        store: StoreDir,
        /// The image
        #[arg(value_name = "URL")]
        url: String,
    },
    /// Fetch all of these images into the store, or what a trace names
    Prefetch {
        #[command(flatten)]
        store: StoreOptions,
        /// Only what this trace names, in its order
        #[arg(long, value_name = "TRACE", value_hint = clap::ValueHint::FilePath)]
        trace: Option<std::path::PathBuf>,
        /// Images to fetch
        #[arg(required = true, value_name = "URL")]
        urls: Vec<String>,
    },
    /// Remove what the store has of these URLs, unless it is in use
    Drop {
        #[command(flatten)]
        store: StoreDir,
        /// What to remove
        #[arg(value_name = "URL", required_unless_present = "all")]
        urls: Vec<String>,
        /// Remove everything that is not in use
        #[arg(short, long, conflicts_with = "urls")]
        all: bool,
    },
}
