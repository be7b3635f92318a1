//! Why a layer cannot be read.
//! It never loses the errno, and knows a spent budget from a failed read.

use std::io;

use crate::budget::Spent;

/// Why a layer could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// It says something that cannot be.
    #[error("it is damaged: {0}")]
    Corrupt(String),
    /// It was said to be of a format that it is not of.
    #[error("it is not {0}")]
    IsNot(String),
    /// It uses something that becket does not know.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// It is compressed in a way that cannot be read from the middle.
    #[error("it is compressed by {packer} and can only be read from its start: {why}")]
    Sequential {
        /// The program that compressed it.
        packer: &'static str,
        /// Why it can be read in no other way.
        why: String,
        /// How many bytes it yields, where it says that.
        yields: Option<u64>,
    },
    /// It is a container that becket does not read, and another program does.
    #[error("it is {}, which becket does not read{}", format.what, because(why.as_deref()))]
    Foreign {
        /// Which.
        format: &'static Foreign,
        /// What of it becket does not read, where that is less than all such files.
        why: Option<String>,
    },
    /// It may be sound, but is larger than what becket reads.
    #[error("too large: {0}")]
    Limit(String),
    /// It may be sound, but takes more to be parsed than it may.
    #[error(transparent)]
    Spent(#[from] Spent),
    /// The bytes could not be read.
    #[error("it cannot be read: {0}")]
    Io(#[source] io::Error),
}

/// Parsers read by [`crate::ReadAt`], whose errors are those of the system: a spent budget comes that way,
/// too.
impl From<io::Error> for LayerError {
    fn from(error: io::Error) -> LayerError {
        Spent::of(&error).map_or(LayerError::Io(error), LayerError::Spent)
    }
}

/// A format that becket does not read.
#[derive(Debug)]
pub struct Foreign {
    /// Its short name, as `inspect` shows it.
    pub name: &'static str,
    /// What such a file is, with its article.
    pub what: &'static str,
    /// Whether it holds a disk; else it is compressed, or an archive.
    pub(crate) disk: bool,
    /// The command that makes a raw image of the file `IN` in the file `OUT`.
    pub(crate) command: &'static str,
}

/// The end of a sentence.
fn because(why: Option<&str>) -> String {
    why.map_or_else(String::new, |why| format!(": {why}"))
}

/// A [`LayerError::Corrupt`].
pub(crate) fn corrupt<T>(what: impl Into<String>) -> Result<T, LayerError> {
    Err(LayerError::Corrupt(what.into()))
}

/// A [`LayerError::Unsupported`].
pub(crate) fn unsupported<T>(what: impl Into<String>) -> Result<T, LayerError> {
    Err(LayerError::Unsupported(what.into()))
}
