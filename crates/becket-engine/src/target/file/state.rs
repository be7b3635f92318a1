//! What a file's target remembers of a request from one operation to the next. Only that target reads it.

/// The means by which a range is zeroed, from the cheapest to the surest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Zeroing {
    /// `fallocate` with a hole.
    Punch,
    /// `fallocate` with `ZERO_RANGE`.
    Range,
    /// Writing zeroes.
    Write,
}

/// How far the means of a file have been tried for one request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileState {
    /// The operation in flight goes through the page cache. One that went the straight way does not.
    pub(super) buffered: bool,
    /// The rest of the request does, since direct I/O was refused.
    pub(super) buffered_only: bool,
    /// The file system refused an operation's flags: the rest of the request does without.
    pub(super) bare: bool,
    /// It is to be durable, and parts of it are in the page cache.
    pub(super) cached: bool,
    /// The operation is a direct write that is counted: see `mix`.
    pub(super) counted: bool,
    /// How ranges are zeroed, where the request lets their blocks go.
    pub(super) zeroing: Zeroing,
}

impl FileState {
    /// Of a request that has just begun.
    pub(crate) const FRESH: FileState = FileState {
        buffered: false,
        buffered_only: false,
        bare: false,
        cached: false,
        counted: false,
        zeroing: Zeroing::Punch,
    };

    /// Whether a sync must follow the request's last piece.
    pub(crate) fn is_cached(&self) -> bool {
        self.cached
    }

    /// The operation in flight goes past the page cache.
    #[cfg(test)]
    pub(crate) fn is_direct(&self) -> bool {
        !self.buffered
    }
}
