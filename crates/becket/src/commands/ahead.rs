//! Reads files of images before their bytes are needed, by as many threads as the machine has CPUs: what is
//! compressed is decoded meanwhile. What was read comes in the order in which it was planned.
//! Never keeps more than a few MiB that were not asked for yet, and never more threads than the call lasts.

use super::bytes::{Trouble, pieces};
use becket_image::{Image, ReadAt as _};
use std::{
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, Condvar, Mutex, PoisonError, mpsc},
    thread::{self, JoinHandle},
};

/// Bytes that are read at once. Files that follow each other share blocks, so one thread reads them.
const JOB: usize = 1 << 20;
/// Files, or pieces of them, that are read at once.
const PARTS: usize = 64;
/// Jobs that are begun for each thread: one that it does, and what it does next.
const JOBS_FOR_EACH_THREAD: usize = 3;
/// The bytes that are written come from one thread, which more of them would not make faster.
const THREADS_MAX: usize = 8;

/// Files that are read, in the order in which they are asked for.
#[derive(Default)]
pub(super) struct Ahead {
    pool: Option<Pool>,
    /// Files of which not everything was begun, with what was not.
    planned: VecDeque<Planned>,
    /// What the next job will read, while it is too little for one.
    open: Vec<Part>,
    begun: VecDeque<Arc<Job>>,
    /// What was read last, and how much of it was taken.
    current: Option<(Read, usize)>,
    /// Memory to read to.
    spare: Vec<Vec<u8>>,
    /// Numbers that were given to files.
    count: u64,
}

/// A file whose bytes will be asked for.
pub(super) struct Contents {
    pub(super) image: Arc<Image>,
    number: u64,
}

struct Planned {
    number: u64,
    image: Arc<Image>,
    pieces: std::vec::IntoIter<(u64, u64)>,
    piece: (u64, u64),
}

/// A part of a file.
struct Part {
    file: u64,
    image: Arc<Image>,
    at: u64,
    len: usize,
}

/// Parts that one thread reads.
struct Job {
    outcome: Mutex<Option<thread::Result<Read>>>,
    done: Condvar,
}

/// Parts with their bytes, one behind the other, and for each whether it could be read.
struct Read {
    parts: Vec<(Part, io::Result<()>)>,
    bytes: Vec<u8>,
    /// Where the bytes of the next part begin.
    next: usize,
}

/// What a thread gets: parts, memory for their bytes, and who waits for them.
type Order = (Vec<Part>, Vec<u8>, Arc<Job>);

struct Pool {
    orders: Option<mpsc::Sender<Order>>,
    threads: Vec<JoinHandle<()>>,
}

impl Ahead {
    /// Plans to read a file: all that it does not know to be zeroes, in whole blocks of 512 bytes.
    pub(super) fn plan(&mut self, image: Arc<Image>) -> Contents {
        self.count += 1;
        let number = self.count;
        let pieces = pieces(&image).into_iter();
        self.planned.push_back(Planned { number, image: Arc::clone(&image), pieces, piece: (0, 0) });
        self.begin();
        Contents { image, number }
    }

    /// Hands over the bytes of a file, each part with its offset. Files that were planned before it and not
    /// asked for are passed over.
    pub(super) fn each(
        &mut self,
        file: &Contents,
        mut take: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> Result<(), Trouble> {
        while self.planned.front().is_some_and(|planned| planned.number < file.number) {
            self.planned.pop_front();
        }
        self.open.retain(|part| part.file >= file.number);
        loop {
            if self.current.is_none() && !self.next_job(file.number) {
                return Ok(());
            }
            let Some((read, at)) = &mut self.current else { return Ok(()) };
            let Some((part, outcome)) = read.parts.get_mut(*at).filter(|(part, _)| part.file <= file.number)
            else {
                if *at < read.parts.len() {
                    return Ok(());
                }
                let (read, _) = self.current.take().unwrap_or_default();
                self.spare.push(read.bytes);
                self.begin();
                continue;
            };
            let bytes = read.bytes.get(read.next..read.next + part.len).unwrap_or_default();
            (read.next, *at) = (read.next + part.len, *at + 1);
            if part.file == file.number {
                std::mem::replace(outcome, Ok(())).map_err(Trouble::Read)?;
                take(part.at, bytes).map_err(Trouble::Write)?;
                crate::progress::moved(part.len);
            }
        }
    }

    /// Gets what was read next, or reads it, if there is more of files up to this one.
    fn next_job(&mut self, number: u64) -> bool {
        if let Some(job) = self.begun.pop_front() {
            let mut outcome = job.outcome.lock().unwrap_or_else(PoisonError::into_inner);
            while outcome.is_none() {
                outcome = job.done.wait(outcome).unwrap_or_else(PoisonError::into_inner);
            }
            match outcome.take() {
                Some(Err(panic)) => resume_unwind(panic),
                read => self.current = read.and_then(Result::ok).map(|read| (read, 0)),
            }
            return true;
        }
        // No thread is at work for us: this one reads.
        self.gather();
        if self.open.first().is_none_or(|part| part.file > number) {
            return false;
        }
        let memory = self.spare.pop().unwrap_or_default();
        self.current = Some((read_all(std::mem::take(&mut self.open), memory), 0));
        true
    }

    /// Hands whole jobs to threads.
    fn begin(&mut self) {
        let threads = self.pool.as_ref().map_or_else(threads, |pool| pool.threads.len());
        while self.begun.len() < threads * JOBS_FOR_EACH_THREAD && self.gather() {
            let pool = self.pool.get_or_insert_with(|| Pool::new(threads));
            let job = Arc::new(Job { outcome: Mutex::new(None), done: Condvar::new() });
            let memory = self.spare.pop().unwrap_or_default();
            pool.give((std::mem::take(&mut self.open), memory, Arc::clone(&job)));
            self.begun.push_back(job);
        }
    }

    /// Takes parts of what is planned, until there are enough for a job; whether there are.
    fn gather(&mut self) -> bool {
        let mut len: usize = self.open.iter().map(|part| part.len).sum();
        while len < JOB && self.open.len() < PARTS {
            let Some(first) = self.planned.front_mut() else { return false };
            if first.piece.0 == first.piece.1 {
                match first.pieces.next() {
                    Some(piece) => first.piece = piece,
                    None => drop(self.planned.pop_front()),
                }
                continue;
            }
            let (at, end) = first.piece;
            let some = usize::try_from(end - at).unwrap_or(usize::MAX).min(JOB - len);
            self.open.push(Part { file: first.number, image: Arc::clone(&first.image), at, len: some });
            first.piece.0 += some as u64;
            len += some;
        }
        true
    }
}

impl Default for Read {
    fn default() -> Self {
        Self { parts: Vec::new(), bytes: Vec::new(), next: 0 }
    }
}

/// How many threads are of use beside the one that writes; none on one CPU.
fn threads() -> usize {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    if cpus > 1 { cpus.min(THREADS_MAX) } else { 0 }
}

/// Reads all parts, one behind the other, into memory that may be too small.
fn read_all(parts: Vec<Part>, mut bytes: Vec<u8>) -> Read {
    let all: usize = parts.iter().map(|part| part.len).sum();
    if bytes.len() < all {
        bytes.resize(all, 0);
    }
    let mut rest = bytes.as_mut_slice();
    let mut read = |part: Part| {
        let (now, behind) = std::mem::take(&mut rest).split_at_mut(part.len);
        rest = behind;
        let outcome = part.image.read_at(now, part.at);
        (part, outcome)
    };
    let parts = parts.into_iter().map(&mut read).collect();
    Read { parts, bytes, next: 0 }
}

impl Pool {
    fn new(count: usize) -> Self {
        let (orders, receiver) = mpsc::channel::<Order>();
        let receiver = Arc::new(Mutex::new(receiver));
        let work = || {
            let receiver = Arc::clone(&receiver);
            thread::spawn(move || {
                loop {
                    let order = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((parts, memory, job)) = order else { return };
                    let read = catch_unwind(AssertUnwindSafe(|| read_all(parts, memory)));
                    *job.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(read);
                    job.done.notify_one();
                }
            })
        };
        Self { orders: Some(orders), threads: (0..count).map(|_| work()).collect() }
    }

    fn give(&self, order: Order) {
        // The threads receive for as long as the pool is there.
        let _ = self.orders.as_ref().map(|orders| orders.send(order));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.orders = None;
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}
