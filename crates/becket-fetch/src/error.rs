//! What can go wrong on the way to an image elsewhere, in sentences for people.
//! It never shows a password, nor the query of a URL, which may be a signature.

use std::io;
use std::path::PathBuf;

/// Why bytes of an object on another host cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL cannot be used.
    #[error("{url}: {why}")]
    Url {
        /// The URL, safe to show.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The server answered, and becket cannot use the answer.
    #[error("{url}: {why}")]
    Refused {
        /// The URL, safe to show.
        url: String,
        /// What is wrong with the answer.
        why: String,
        /// What the user can do.
        fix: Option<String>,
    },
    /// The object is not the one that was opened.
    #[error("{url}: source changed: {why}")]
    Changed {
        /// The URL, safe to show.
        url: String,
        /// How that was seen.
        why: String,
    },
    /// All bytes of an object are there, and they are others than the digest says that names it.
    #[error("{url}: its bytes are not those of its digest")]
    Digest {
        /// The URL, safe to show.
        url: String,
    },
    /// The server cannot be reached, or does not answer in time.
    #[error("{url}: no answer for {seconds} s: {why}")]
    Away {
        /// The URL, safe to show.
        url: String,
        /// How long it was tried.
        seconds: u64,
        /// The last failure.
        why: String,
    },
    /// A compressed file cannot be decoded.
    #[error("{file}: {why}")]
    Stream {
        /// Its path or URL, safe to show.
        file: String,
        /// What is wrong with it, or with the room for it.
        why: String,
        /// What the user can do.
        fix: Option<String>,
    },
    /// The store has too little room for what a compressed file yields.
    #[error("{file}: the store has too little room for it: {done} bytes were decoded, and {free} are left")]
    NoRoom {
        /// Its path or URL, safe to show.
        file: String,
        /// How many bytes were decoded.
        done: u64,
        /// How many are free.
        free: u64,
    },
    /// The store has no room for all of an object that it is to keep.
    #[error("{url}: the store has no room for all of it: {stored} bytes of it are there")]
    Full {
        /// The URL, safe to show.
        url: String,
        /// How many bytes of it the store has.
        stored: u64,
    },
    /// The store may not have all of an object that it is to keep.
    #[error(
        "{url}: --store-limit allows {limit} bytes, too few for all of it: {stored} bytes of it are there"
    )]
    Limit {
        /// The URL, safe to show.
        url: String,
        /// How many bytes of it the store has.
        stored: u64,
        /// How many bytes the store may have of all objects.
        limit: u64,
    },
    /// A path leads into a store, to a file that is not complete.
    #[error("{path}: it is a file of becket's store, in which not all of {of} is there")]
    Incomplete {
        /// The path.
        path: String,
        /// What it is a part of, safe to show.
        of: String,
        /// What the user can do.
        fix: String,
    },
    /// Nothing says where the user's store is.
    #[error(
        "there is no place for the store: $BECKET_STORE is not set, and neither $XDG_CACHE_HOME nor $HOME to \
         a directory's whole path"
    )]
    NoStore,
    /// The store on this host fails.
    #[error("{path}: {what}: {source}")]
    Store {
        /// The file or directory.
        path: PathBuf,
        /// What could not be done.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

const MAKE_ROOM: &str = "make room there, or name another directory by --store DIR";

impl Error {
    /// One word for scripts.
    pub fn kind(&self) -> &'static str {
        match self {
            Error::Url { .. } => "url",
            Error::Refused { .. } => "origin",
            Error::Changed { .. } => "source_changed",
            Error::Digest { .. } => "source_damaged",
            Error::Away { .. } => "origin_away",
            Error::Stream { .. } | Error::NoRoom { .. } => "stream",
            Error::Store { .. }
            | Error::NoStore
            | Error::Full { .. }
            | Error::Limit { .. }
            | Error::Incomplete { .. } => "store",
        }
    }

    /// What the user can do about it.
    pub fn fix(&self) -> Option<&str> {
        match self {
            Error::Refused { fix, .. } | Error::Stream { fix, .. } => fix.as_deref(),
            Error::Incomplete { fix, .. } => Some(fix),
            Error::NoStore => Some("set one of them, or name the directory by --store DIR"),
            Error::NoRoom { .. } => Some("name a directory on a larger file system by --store DIR"),
            Error::Changed { .. } => Some("run the command again to use the new version"),
            Error::Digest { .. } => Some(
                "the registry's copy is damaged: push the image again; nothing of it is kept, and the next \
                 command fetches it anew",
            ),
            Error::Away { .. } => Some("check the network and the server; --origin-timeout waits longer"),
            Error::Limit { .. } => Some("allow more by --store-limit; what is in use does not make way"),
            Error::Full { .. } => Some(MAKE_ROOM),
            Error::Store { source, .. } if is_full(source) => Some(MAKE_ROOM),
            _ => None,
        }
    }

    pub(crate) fn store(path: impl Into<PathBuf>, what: &'static str) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::Store { path, what, source }
    }
}

/// Whether there is no room.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        let kind = match &error {
            Error::Store { source, .. } => source.kind(),
            Error::Away { .. } => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
