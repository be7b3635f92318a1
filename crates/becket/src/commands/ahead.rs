//! Reads files of images before their bytes are needed, by as many threads as the machine has CPUs: what is
//! compressed is decoded meanwhile. What was read comes in the order in which it was planned, or is written
//! to files of the host, each to its own, in any order.
//! Never keeps more than a few MiB that were not asked for yet, and never more threads than the call lasts.

use super::bytes::{self, Trouble};
use becket_image::{Image, ReadAt as _, encoded::end_of_block};
use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::{self, JoinHandle},
};

/// Bytes that are read at once, and the rest of the last block. Files that follow each other share blocks,
/// so one thread reads them.
const JOB: usize = bytes::CHUNK;
/// Files, or pieces of them, that are read at once.
const PARTS: usize = 64;
/// Jobs that are begun for each thread: one that it does, and what it does next.
const JOBS_FOR_EACH_THREAD: usize = 3;

/// Files that are read, in the order in which they are asked for.
#[derive(Default)]
pub(super) struct Ahead {
    pool: Option<Pool>,
    /// Files of which not everything was begun, with what was not.
    planned: VecDeque<Planned>,
    /// What the next job will read, while it is too little for one.
    open: Vec<Part>,
    begun: VecDeque<mpsc::Receiver<Outcome>>,
    /// What was read last.
    current: Option<Read>,
    /// Memory to read to.
    spare: Vec<Vec<u8>>,
    /// Numbers that were given to files.
    count: u64,
}

/// A file whose bytes will be asked for.
pub(super) struct Contents {
    pub(super) image: Arc<Image>,
    /// What of it will be read: see [`bytes::pieces`].
    pub(super) pieces: Arc<[(u64, u64)]>,
    number: u64,
}

struct Planned {
    number: u64,
    image: Arc<Image>,
    to: Option<Arc<File>>,
    pieces: Arc<[(u64, u64)]>,
    /// How many pieces were begun as a whole, and the first byte behind what was.
    begun: (usize, u64),
}

/// A part of a file.
struct Part {
    file: u64,
    image: Arc<Image>,
    to: Option<Arc<File>>,
    at: u64,
    len: usize,
}

/// What became of the parts that one thread has read.
type Outcome = thread::Result<Read>;

/// Parts that were not taken, and for each whether it could be read. Their bytes are one behind the other.
struct Read {
    parts: VecDeque<(Part, Result<(), Trouble>)>,
    bytes: Vec<u8>,
    /// Where the bytes of the next part begin.
    next: usize,
}

/// What a thread gets: parts, memory for their bytes, and who waits for them.
type Order = (Vec<Part>, Vec<u8>, mpsc::Sender<Outcome>);

struct Pool {
    orders: Option<mpsc::Sender<Order>>,
    threads: Vec<JoinHandle<()>>,
}

impl Ahead {
    /// Plans to read a file, all that it does not know to be zeroes, in whole blocks of 512 bytes; and to
    /// write it at the same offsets of another file.
    pub(super) fn plan(&mut self, image: Arc<Image>, to: Option<Arc<File>>) -> Contents {
        self.count += 1;
        let number = self.count;
        let pieces: Arc<[(u64, u64)]> = bytes::pieces(&image).into();
        let contents = Contents { image: Arc::clone(&image), pieces: Arc::clone(&pieces), number };
        self.planned.push_back(Planned { number, image, to, pieces, begun: (0, 0) });
        self.begin();
        contents
    }

    /// Hands over the bytes of a file, each part with its offset, when they were read and, where that was
    /// planned, written. Files that were planned before it and not asked for are passed over.
    pub(super) fn each(
        &mut self,
        file: &Contents,
        take: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> Result<(), Trouble> {
        self.forget(file.number);
        let taken = self.each_part(file, take);
        self.forget(file.number + 1);
        taken
    }

    /// Forgets what was not begun of files before this one.
    fn forget(&mut self, number: u64) {
        while self.planned.front().is_some_and(|planned| planned.number < number) {
            self.planned.pop_front();
        }
        self.open.retain(|part| part.file >= number);
    }

    fn each_part(
        &mut self,
        file: &Contents,
        mut take: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> Result<(), Trouble> {
        loop {
            if self.current.is_none() && !self.next_job(file.number) {
                return Ok(());
            }
            let Some(read) = &mut self.current else { return Ok(()) };
            if read.parts.front().is_some_and(|(part, _)| part.file > file.number) {
                return Ok(());
            }
            let Some((part, outcome)) = read.parts.pop_front() else {
                self.spare.extend(self.current.take().map(|read| read.bytes));
                self.begin();
                continue;
            };
            let bytes = read.bytes.get(read.next..read.next + part.len).unwrap_or_default();
            read.next += part.len;
            if part.file == file.number {
                outcome?;
                take(part.at, bytes).map_err(Trouble::Write)?;
                crate::progress::moved(part.len);
            }
        }
    }

    /// Gets what was read next, or reads it, if there is more of files up to this one.
    fn next_job(&mut self, number: u64) -> bool {
        if let Some(outcome) = self.begun.pop_front() {
            // A thread that panicked has said so.
            let outcome = outcome.recv().unwrap_or_else(|gone| Err(Box::new(gone)));
            self.current = Some(outcome.unwrap_or_else(|panic| resume_unwind(panic)));
            return true;
        }
        // No thread is at work for us: this one reads.
        self.gather();
        if self.open.first().is_none_or(|part| part.file > number) {
            return false;
        }
        let memory = self.spare.pop().unwrap_or_default();
        self.current = Some(read_all(std::mem::take(&mut self.open), memory));
        true
    }

    /// Hands whole jobs to threads.
    fn begin(&mut self) {
        let threads = self.pool.as_ref().map_or_else(threads, |pool| pool.threads.len());
        while self.begun.len() < threads * JOBS_FOR_EACH_THREAD && self.gather() {
            let pool = self.pool.get_or_insert_with(|| Pool::new(threads));
            let (done, outcome) = mpsc::channel();
            let memory = self.spare.pop().unwrap_or_default();
            pool.give((std::mem::take(&mut self.open), memory, done));
            self.begun.push_back(outcome);
        }
    }

    /// Takes parts of what is planned, until there are enough for a job; whether there are.
    fn gather(&mut self) -> bool {
        let mut len: usize = self.open.iter().map(|part| part.len).sum();
        while len < JOB && self.open.len() < PARTS {
            let Some(first) = self.planned.front_mut() else { return false };
            let Some((start, end)) = first.pieces.get(first.begun.0).copied() else {
                self.planned.pop_front();
                continue;
            };
            let at = start.max(first.begun.1);
            let mut until = end.min(at + (JOB - len) as u64);
            if until < end {
                // No block is decoded twice.
                let block = end_of_block(first.image.map(), first.image.encoded(), until - 1);
                until = block.map_or(until, |block| block.min(end));
            }
            first.begun = (first.begun.0 + usize::from(until == end), until);
            let (file, image, to) = (first.number, Arc::clone(&first.image), first.to.clone());
            let some = usize::try_from(until - at).unwrap_or(usize::MAX);
            self.open.push(Part { file, image, to, at, len: some });
            len += some;
        }
        true
    }
}

/// How many threads are of use beside the one that writes; none on one CPU.
fn threads() -> usize {
    Some(bytes::readers()).filter(|readers| *readers > 1).unwrap_or(0)
}

/// Reads all parts, one behind the other, into memory that may be too small.
fn read_all(parts: Vec<Part>, mut bytes: Vec<u8>) -> Read {
    let all: usize = parts.iter().map(|part| part.len).sum();
    if bytes.len() < all {
        bytes.resize(all, 0);
    }
    let mut rest = bytes.as_mut_slice();
    let mut read = |mut part: Part| {
        let (now, behind) = std::mem::take(&mut rest).split_at_mut(part.len);
        rest = behind;
        let read = part.image.read_at(now, part.at).map_err(Trouble::Read);
        // It is closed with its last part.
        let outcome = read.and_then(|()| match part.to.take() {
            Some(file) => file.write_all_at(now, part.at).map_err(Trouble::Write),
            None => Ok(()),
        });
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
                    let Ok((parts, memory, done)) = order else { return };
                    // Nobody waits any more for what was given up.
                    let _ = done.send(catch_unwind(AssertUnwindSafe(|| read_all(parts, memory))));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that say where they are; from some on they cannot be read.
    struct Numbers(u64);

    impl becket_image::ReadAt for Numbers {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
            if offset + buf.len() as u64 > self.0 {
                return Err(io::Error::other("beyond"));
            }
            for (at, byte) in buf.iter_mut().enumerate() {
                *byte = number(offset + at as u64);
            }
            Ok(())
        }
    }

    fn number(offset: u64) -> u8 {
        u8::try_from((offset / 7 + offset % 251) % 256).unwrap()
    }

    fn image(len: usize, readable: usize) -> Arc<Image> {
        Arc::new(Image::raw(Arc::new(Numbers(readable as u64)), len as u64, 512))
    }

    /// What a file was said to hold, if it holds that.
    fn taken(ahead: &mut Ahead, file: &Contents) -> Result<usize, Trouble> {
        let mut end = 0;
        ahead.each(file, |at, bytes| {
            assert_eq!(at, end as u64, "in order, without a gap");
            assert!(bytes.iter().zip(at..).all(|(byte, at)| *byte == number(at)));
            end += bytes.len();
            Ok(())
        })?;
        Ok(end)
    }

    /// Sizes around the bounds of jobs and parts.
    const SIZES: [usize; 9] = [0, 1, 511, 513, JOB - 1, JOB, JOB + 1, 5 * JOB + 17, 3000];

    /// So many files of these sizes.
    fn planned(ahead: &mut Ahead, count: usize) -> Vec<(usize, Contents)> {
        let sizes = SIZES.iter().cycle().take(count);
        sizes.map(|size| (*size, ahead.plan(image(*size, *size), None))).collect()
    }

    #[test]
    fn files_come_whole_and_in_order() {
        let mut ahead = Ahead::default();
        for (size, file) in &planned(&mut ahead, 400) {
            assert_eq!(taken(&mut ahead, file).unwrap(), *size);
        }
        assert!(ahead.planned.is_empty() && ahead.begun.is_empty() && ahead.open.is_empty());
    }

    #[test]
    fn files_that_nobody_asks_for_are_passed_over() {
        let mut ahead = Ahead::default();
        for (size, file) in planned(&mut ahead, 90).iter().step_by(4) {
            assert_eq!(taken(&mut ahead, file).unwrap(), *size);
        }
        // Not even begun: it would take a long time to read.
        let _large = ahead.plan(image(1 << 50, 1 << 50), None);
        let last = ahead.plan(image(3000, 3000), None);
        assert_eq!(taken(&mut ahead, &last).unwrap(), 3000);
    }

    #[test]
    fn what_cannot_be_read_is_the_trouble_of_that_file_alone() {
        let mut ahead = Ahead::default();
        let files: Vec<Contents> = [(100, 100), (3 * JOB, 2 * JOB), (100, 100), (50, 0), (100, 100)]
            .map(|(len, readable)| ahead.plan(image(len, readable), None))
            .into();
        let outcomes: Vec<bool> = files.iter().map(|file| taken(&mut ahead, file).is_ok()).collect();
        assert_eq!(outcomes, [true, false, true, false, true]);
    }

    #[test]
    fn what_was_planned_is_written_and_closed() {
        let mut ahead = Ahead::default();
        let files: Vec<(usize, Arc<File>, Contents)> = SIZES
            .map(|size| {
                let file = Arc::new(tempfile::tempfile().unwrap());
                let contents = ahead.plan(image(size, size), Some(Arc::clone(&file)));
                (size, file, contents)
            })
            .into();
        for (size, file, contents) in files {
            assert_eq!(taken(&mut ahead, &contents).unwrap(), size);
            let file = Arc::into_inner(file).expect("nothing else has it");
            let mut bytes = vec![0; size];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes.iter().zip(0..).all(|(byte, at)| *byte == number(at)));
            assert_eq!(file.metadata().unwrap().len(), size as u64);
        }
        let full = Arc::new(File::options().write(true).open("/dev/full").unwrap());
        let contents = ahead.plan(image(100, 100), Some(full));
        assert!(matches!(taken(&mut ahead, &contents), Err(Trouble::Write(_))));
    }
}
