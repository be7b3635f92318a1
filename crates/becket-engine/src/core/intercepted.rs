//! What a queue keeps of operations that an interceptor sees.
//! Decides nothing: see `intercept`.

use std::sync::Arc;

use io_uring::{squeue, types::Timespec};
use rustix::io::Errno;

use crate::fault::{Fate, Interceptor};

/// What a queue keeps for its interceptor.
pub(crate) struct Intercepted {
    pub(super) interceptor: Arc<dyn Interceptor>,
    /// By tag.
    pub(super) under_way: Box<[UnderWay]>,
}

/// Where the operation of a tag is.
pub(super) struct UnderWay {
    pub(super) stage: Stage,
    /// The operation, while it waits.
    pub(super) entry: Option<squeue::Entry>,
    /// For how long; the kernel reads it when the timeout is submitted.
    pub(super) time: Timespec,
    /// What was said of the operation, for when it goes to its file once more.
    pub(super) fate: Fate,
    pub(super) again: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Stage {
    Idle,
    /// It waits, and will be asked about again.
    Waiting,
    /// It was not begun.
    Failed(Errno),
    /// It is at its file; where it is torn, it fails afterwards.
    Begun(Option<Errno>),
}

impl Intercepted {
    pub(crate) fn new(interceptor: Arc<dyn Interceptor>, requests: u16) -> Box<Intercepted> {
        let idle = || UnderWay {
            stage: Stage::Idle,
            entry: None,
            time: Timespec::new(),
            fate: Fate::Pass,
            again: false,
        };
        Box::new(Intercepted { interceptor, under_way: (0..requests).map(|_| idle()).collect() })
    }
}
