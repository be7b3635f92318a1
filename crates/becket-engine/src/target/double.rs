//! A target for tests of the core that is nothing like a file: bytes in memory, no slot in the ring's
//! table, no facts, nothing that blocks, a sync of its own. A script says what becomes of its pieces.

use std::{
    collections::VecDeque,
    fs::File,
    os::fd::{AsRawFd as _, BorrowedFd},
    os::unix::fs::FileExt as _,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use becket_image::{DirectIo, zeroes::ZEROES};
use io_uring::{
    opcode, squeue,
    types::{Fd, Timespec},
};
use rustix::io::Errno;

use super::{
    contract::{Completed, Piece, SLOTS, Target},
    straight::Straight,
    syncs::Syncs,
};
use crate::{
    Op,
    fault::{self, Interceptor, Operation},
    governor::Governor,
    slot::{Slot, Step, Way},
};

/// How long a piece that is late takes.
pub(crate) const LATE: Duration = Duration::from_millis(20);
static LATE_SPEC: Timespec = Timespec::new().nsec(20_000_000);

/// What becomes of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// At most so many bytes of it are moved.
    Short(u64),
    /// It fails with EIO and changes nothing.
    Fails,
    /// It is begun after [`LATE`].
    Late,
    /// It is not there: a note must come first. Only of the double.
    Waits,
}

/// What becomes of the next pieces, in their order; those behind them are whole. It also notes what is
/// durable. A file has the same done to it as an interceptor.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) bytes: File,
    pub(crate) fates: Mutex<VecDeque<Fate>>,
    pub(crate) sync_fails: AtomicBool,
    /// Syncs that were begun.
    pub(crate) syncs: AtomicUsize,
    /// What was there when the last of them was begun.
    pub(crate) durable: Mutex<Vec<u8>>,
}

impl Script {
    pub(crate) fn new(bytes: File) -> Arc<Script> {
        let (fates, durable) = Default::default();
        Arc::new(Script {
            bytes,
            fates,
            sync_fails: AtomicBool::new(false),
            syncs: AtomicUsize::new(0),
            durable,
        })
    }

    pub(crate) fn now(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes.metadata().unwrap().len() as usize];
        self.bytes.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn next(&self) -> Option<Fate> {
        self.fates.lock().unwrap().pop_front()
    }

    /// A sync begins; whether it succeeds.
    fn sync(&self) -> Result<(), Errno> {
        self.syncs.fetch_add(1, SeqCst);
        if self.sync_fails.load(SeqCst) {
            return Err(Errno::IO);
        }
        *self.durable.lock().unwrap() = self.now();
        Ok(())
    }
}

impl Interceptor for Script {
    fn fate(&self, operation: &Operation<'_>) -> fault::Fate {
        if operation.op == Op::Flush {
            return self.sync().map_or_else(fault::Fate::Fail, |()| fault::Fate::Pass);
        }
        match self.next().filter(|_| !operation.waited) {
            Some(Fate::Short(len)) => fault::Fate::Short(len),
            Some(Fate::Fails) => fault::Fate::Fail(Errno::IO),
            Some(Fate::Late) => fault::Fate::Wait(LATE),
            Some(Fate::Waits) => unreachable!("all of a file is there"),
            None => fault::Fate::Pass,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Double {
    script: Arc<Script>,
    syncs: Syncs,
    /// Its first byte can be read by nobody: EIO.
    broken: File,
}

impl Double {
    pub(crate) fn new(script: Arc<Script>, queues: usize) -> Double {
        let broken = File::open("/proc/self/mem").unwrap();
        Double { script, syncs: Syncs::new(queues, None), broken }
    }

    fn failing(&self) -> squeue::Entry {
        // The kernel looks at the descriptor, not at the memory.
        let nowhere = ZEROES.as_ptr().cast_mut();
        opcode::Read::new(Fd(self.broken.as_raw_fd()), nowhere, 1).build()
    }
}

impl Target for Double {
    fn descriptors(&self) -> [Option<BorrowedFd<'_>>; SLOTS] {
        [None; SLOTS]
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn operate(&self, piece: &Piece, slot: &mut Slot, _: &mut Governor) -> Result<Step, Errno> {
        slot.way = Way::Free;
        match self.script.next() {
            Some(Fate::Waits) => return Ok(Step::Waits),
            Some(Fate::Late) => return Ok(Step::Operate(opcode::Timeout::new(&LATE_SPEC).build())),
            Some(Fate::Fails) => return Ok(Step::Operate(self.failing())),
            Some(Fate::Short(len)) => slot.asked = slot.asked.min(len),
            None => {}
        }
        let (memory, address) = (Fd(self.script.bytes.as_raw_fd()), piece.carrier.address as usize);
        let write = |from: *const u8, len| opcode::Write::new(memory, from, len).offset(piece.offset).build();
        Ok(Step::Operate(match slot.request.op {
            Op::Read => {
                opcode::Read::new(memory, address as *mut u8, slot.asked as u32).offset(piece.offset).build()
            }
            Op::Write { .. } => write(address as *const u8, slot.asked as u32),
            _ => {
                slot.asked = slot.asked.min(ZEROES.len() as u64);
                write(ZEROES.as_ptr(), slot.asked as u32)
            }
        }))
    }

    fn completed(&self, slot: &mut Slot, result: i32) -> Result<Completed, Errno> {
        if result != -Errno::TIME.raw_os_error() {
            slot.absorb(result)?;
        }
        Ok(Completed::GoesOn)
    }

    fn straight(&self, _: &Piece, _: &Slot) -> Option<Straight> {
        None
    }

    fn syncs(&self) -> &Syncs {
        &self.syncs
    }

    fn sync(&self, _: u32) -> Step {
        Step::Operate(self.script.sync().map_or_else(|_| self.failing(), |()| opcode::Nop::new().build()))
    }

    fn sync_now(&self) -> Result<(), Errno> {
        self.script.sync()
    }

    fn read_unit(&self, _: DirectIo) -> Option<u64> {
        None
    }

    fn unit(&self, _: &Slot) -> u64 {
        1
    }
}
