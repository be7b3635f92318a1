//! Chunks that are in memory, because the store has no room for them or because there is to be none: the
//! first that came is the first to go. It never lets a chunk go that is not whole, and never takes more than
//! its bound.

use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use becket_image::filled::{Presence, Where};

/// How many bytes of an object are in memory at most; one chunk has at most a sixteenth of that.
const MOST: u64 = 256 << 20;
/// How much goes at once, at least: readers look again whenever something goes.
const AT_ONCE: u64 = MOST / 8;

/// See the module.
#[derive(Debug)]
pub(crate) struct InMemory {
    line: Mutex<Arrived>,
    who: Mutex<Who>,
}

/// Who lets chunks of the table go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    /// This process.
    We,
    /// This process, as soon as its predecessor has ended.
    Next,
    /// Another process, to which the table was lent; or nobody, because the table has no room.
    Others,
}

#[derive(Debug, Default)]
struct Arrived {
    /// Whole chunks, the first that came in front.
    whole: VecDeque<u64>,
    /// Bytes of chunks, whole or not.
    bytes: u64,
}

impl Arrived {
    /// The chunks that are there.
    fn of(presence: &Presence) -> Arrived {
        let in_memory = |chunk: &u64| presence.place(*chunk) == Some(Where::Memory);
        let whole: VecDeque<u64> = (0..presence.chunks()).filter(in_memory).collect();
        let bytes = whole.len() as u64 * presence.chunk();
        Arrived { whole, bytes }
    }
}

impl InMemory {
    /// Of a table that nobody else has, or else of one that a `predecessor` may still use.
    pub(crate) fn of(presence: &Presence, predecessor: bool) -> InMemory {
        let who = match (presence.is_roomy(), predecessor) {
            (false, _) => Who::Others,
            (true, true) => Who::Next,
            (true, false) => Who::We,
        };
        InMemory { line: Mutex::new(Arrived::of(presence)), who: Mutex::new(who) }
    }

    fn line(&self) -> MutexGuard<'_, Arrived> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The whole chunks that there are.
    pub(crate) fn chunks(&self) -> Vec<u64> {
        self.line().whole.iter().copied().collect()
    }

    /// From now on nothing goes and nothing comes.
    pub(crate) fn lend(&self) {
        *self.who() = Who::Others;
    }

    fn who(&self) -> MutexGuard<'_, Who> {
        self.who.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this process may let chunks go.
    fn may(&self, presence: &Presence) -> bool {
        let mut who = self.who();
        if *who == Who::Next && presence.is_alone() {
            *who = Who::We;
            // The predecessor has changed it until now.
            *self.line() = Arrived::of(presence);
        }
        *who == Who::We
    }

    /// Takes room for one more chunk. Returns the chunks that have to go for it, which the caller lets go by
    /// [`InMemory::free`].
    ///
    /// # Errors
    /// The chunks are another process's, by now or still.
    pub(crate) fn take(&self, presence: &Presence) -> io::Result<Vec<u64>> {
        if !self.may(presence) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let chunk = presence.chunk();
        let mut line = self.line();
        line.bytes += chunk;
        let mut gone = Vec::new();
        if line.bytes > MOST {
            while line.bytes > MOST - AT_ONCE
                && let Some(first) = line.whole.pop_front()
            {
                line.bytes -= chunk;
                gone.push(first);
            }
        }
        Ok(gone)
    }

    /// A chunk for which room was taken is whole.
    pub(crate) fn is_whole(&self, chunk: u64) {
        self.line().whole.push_back(chunk);
    }

    /// Room that was taken is not needed after all.
    pub(crate) fn give_back(&self, chunk: u64) {
        let mut line = self.line();
        line.bytes = line.bytes.saturating_sub(chunk);
    }

    /// Frees the memory of chunks: first nobody finds them any more.
    pub(crate) fn free(presence: &Presence, chunks: &[u64]) -> io::Result<()> {
        presence.depart(chunks.iter().copied());
        let len = presence.chunk();
        let mut chunks = chunks.to_vec();
        chunks.sort_unstable();
        // Neighbours go by one system call.
        let runs = chunks.chunk_by(|one, next| one + 1 == *next);
        runs.filter_map(|run| Some((run.first()? * len, run.len() as u64 * len)))
            .try_for_each(|(start, len)| presence.memory().free(start, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_came_go_first_and_no_more_than_the_bound_is_taken() {
        let chunk = 16 << 20;
        let presence = Presence::new(64 * chunk, chunk).unwrap();
        let memory = InMemory::of(&presence, false);
        for number in 0..16 {
            assert_eq!(memory.take(&presence).unwrap(), [0; 0]);
            presence.memory().write(&[1; 4096], number * chunk).unwrap();
            presence.put(number, Where::Memory);
            memory.is_whole(number);
        }
        assert_eq!(memory.take(&presence).unwrap(), [0, 1, 2]);
        InMemory::free(&presence, &[0, 1, 2]).unwrap();
        assert_eq!(presence.there(), (13 * chunk, 13 * chunk));
        memory.give_back(chunk);
        let successor = InMemory::of(&presence, false);
        assert_eq!(successor.chunks(), (3..16).collect::<Vec<_>>());
        for _ in 0..3 {
            assert_eq!(successor.take(&presence).unwrap(), [0; 0]);
        }
        assert_eq!(successor.take(&presence).unwrap(), [3, 4, 5]);
        memory.lend();
        assert_eq!(memory.take(&presence).unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    /// Runs itself once more as the other process, whose standard input is the table.
    #[test]
    fn two_processes_never_let_chunks_of_one_table_go() {
        const OTHER: &str = "BECKET_TEST_OTHER_PROCESS";
        const NAME: &str = "memory::tests::two_processes_never_let_chunks_of_one_table_go";
        if std::env::var_os(OTHER).is_some() {
            let table = std::io::stdin();
            rustix::fs::fcntl_lock(&table, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
            println!("locked");
            std::thread::sleep(std::time::Duration::from_secs(60));
        }
        let presence = Presence::new(64 << 20, 1 << 20).unwrap();
        presence.put(5, Where::Memory);
        let memory = InMemory::of(&presence, true);
        let mut other = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture"])
            .env(OTHER, "1")
            .stdin(std::fs::File::from(presence.fd().try_clone_to_owned().unwrap()))
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = io::BufReader::new(other.stdout.take().unwrap());
        assert!(io::BufRead::lines(lines).map_while(Result::ok).any(|line| line.contains("locked")));
        assert_eq!(memory.take(&presence).unwrap_err().kind(), io::ErrorKind::StorageFull);
        presence.put(6, Where::Memory);
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(memory.take(&presence).unwrap(), [0; 0]);
        assert_eq!(memory.chunks(), [5, 6], "with what the predecessor has brought last");
    }
}
