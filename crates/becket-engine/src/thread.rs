//! I/O threads: each owns one ring and serves the queues of many devices.
//! A thread never waits for anything but its ring and never holds a lock while it serves.

mod change;

use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::Instant,
};

use io_uring::{opcode, types::Fd};
use rustix::event::{EventfdFlags, eventfd};

use crate::{
    Error, Memory, NewQueue, Serving,
    decode::{Addressee, Hand, Mailbox, Note, Quick},
    queue::Queue,
    ring::{BATCH, Ring},
    user_data::source_of,
};

/// Marks completions of the wake-up descriptor; no queue has this index.
const WAKE: u64 = u64::MAX;
/// Orders to a thread that may wait in its inbox before the sender does.
const INBOX: usize = 16;

/// An order to a thread.
enum Order {
    Add(NewQueue, SyncSender<Result<u64, Error>>),
    Prepare(u64, Arc<Serving>, SyncSender<Result<bool, Error>>),
    Hold(u64, SyncSender<bool>),
    /// By what was prepared, or as before.
    LetGo(u64, bool, SyncSender<bool>),
    Leave(u64, SyncSender<()>),
    GiveUpReads(u64, Instant, SyncSender<()>),
    Room(u32, SyncSender<u32>),
    Stop,
    /// Stands for a mistake of ours.
    #[cfg(test)]
    Panic,
}

/// Names a queue for as long as it lives; never used again afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueId {
    thread: usize,
    serial: u64,
}

/// The I/O threads of a process.
pub struct IoThreads {
    threads: Vec<Thread>,
}

struct Thread {
    inbox: SyncSender<Order>,
    wake: Arc<OwnedFd>,
    /// At least so many requests in registered memory could another queue have; see [`IoThreads::room_for`].
    room: AtomicU32,
    handle: Option<JoinHandle<()>>,
}

impl IoThreads {
    /// Starts `count` threads (at least one). They inherit privileges and memory settings of the caller.
    ///
    /// # Errors
    /// A thread or its ring cannot be had; those that were started have ended again.
    pub fn start(count: usize) -> Result<IoThreads, Error> {
        let mut started = IoThreads { threads: Vec::with_capacity(count.max(1)) };
        for index in 0..count.max(1) {
            let spawn = |source| Error::Spawn { thread: index, source };
            let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| spawn(errno.into()))?);
            let (inbox, orders) = sync_channel(INBOX);
            let (ready, is_ready) = sync_channel(1);
            let bell = Arc::clone(&wake);
            let handle = std::thread::Builder::new()
                .name(format!("becket-io/{index}"))
                .spawn(move || match Server::new(index, bell, orders) {
                    Ok(mut server) => {
                        // Declared after the server, so that it sees a panic first.
                        let _whole = AllOrNothing;
                        let _ = ready.send(Ok(()));
                        server.run();
                    }
                    Err(error) => {
                        let _ = ready.send(Err(error));
                    }
                })
                .map_err(spawn)?;
            let room = AtomicU32::new(0);
            started.threads.push(Thread { inbox, wake, room, handle: Some(handle) });
            is_ready.recv().unwrap_or(Err(Error::Gone { thread: index }))?;
        }
        Ok(started)
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.threads.len()
    }

    /// Gives a queue to a thread and returns when its first commands are with the kernel.
    ///
    /// # Errors
    /// The ring has no room, memory is short, or the port refused to start; the queue is gone and its
    /// `on_closed` has run or was dropped. Where the port had handed commands to the kernel, this happens
    /// when they have come back.
    pub fn add(&self, thread: usize, queue: NewQueue) -> Result<QueueId, Error> {
        added(thread, self.give(thread, queue)?)
    }

    /// The same with several at once, each beside the number of its thread.
    ///
    /// # Errors
    /// As [`IoThreads::add`] of one of them; the others stay.
    pub fn add_all(&self, queues: Vec<(usize, NewQueue)>) -> Result<Vec<QueueId>, Error> {
        let give = |(thread, queue)| (thread, self.give(thread, queue));
        let given: Vec<_> = queues.into_iter().map(give).collect();
        // All are waited for, whatever has failed: who hears of it may end the device.
        let all: Vec<_> = given.into_iter().map(|(thread, answer)| added(thread, answer?)).collect();
        all.into_iter().collect()
    }

    /// How many requests each of `queues` more queues of a thread could have under way in [`Registered`]
    /// memory.
    ///
    /// Only [`add`](IoThreads::add) makes it less.
    ///
    /// [`Registered`]: crate::Memory::Registered
    ///
    /// # Errors
    /// The thread is no longer there.
    pub fn room(&self, thread: usize, queues: u32) -> Result<u32, Error> {
        self.ask(thread, |reply| Order::Room(queues, reply))
    }

    /// How many requests one more queue of a thread could have under way in [`Registered`] memory, by
    /// [`IoThreads::room`] or at least; the thread is only woken for it where what it said last, less what
    /// was added since, is not enough for `depth`. Who asks and adds beside others takes turns with them.
    ///
    /// [`Registered`]: crate::Memory::Registered
    ///
    /// # Errors
    /// The thread is no longer there.
    pub fn room_for(&self, thread: usize, depth: u16) -> Result<u32, Error> {
        let known = &self.threads.get(thread).ok_or(Error::Gone { thread })?.room;
        if known.load(Ordering::Relaxed) < depth.into() {
            known.store(self.room(thread, 1)?, Ordering::Relaxed);
        }
        Ok(known.load(Ordering::Relaxed))
    }

    /// Gives a queue to a thread. What it takes of the registered memory is in one piece, so the widest place
    /// that is left is smaller by no more than that.
    fn give(&self, thread: usize, queue: NewQueue) -> Result<Receiver<Result<u64, Error>>, Error> {
        if let Some(known) = self.threads.get(thread).map(|thread| &thread.room)
            && queue.memory == Memory::Registered
        {
            let rest = known.load(Ordering::Relaxed).saturating_sub(queue.depth.into());
            known.store(rest, Ordering::Relaxed);
        }
        self.tell(thread, |reply| Order::Add(queue, reply))
    }

    /// Has a queue take no more requests, and end once those that it has are finished; returns before that.
    /// One that has ended is left alone.
    ///
    /// # Errors
    /// The thread is no longer there.
    pub fn leave(&self, queue: QueueId) -> Result<(), Error> {
        self.ask(queue.thread, |reply| Order::Leave(queue.serial, reply))
    }

    /// Has the reads of a queue fail that have waited for the server of a source since before `when`: nobody
    /// wants their bytes any more. A queue that has ended is left alone.
    ///
    /// # Errors
    /// The thread is no longer there.
    pub fn give_up_reads(&self, queue: QueueId, when: Instant) -> Result<(), Error> {
        self.ask(queue.thread, |reply| Order::GiveUpReads(queue.serial, when, reply))
    }

    /// Gives a thread an order and waits for the answer.
    fn ask<T>(&self, thread: usize, order: impl FnOnce(SyncSender<T>) -> Order) -> Result<T, Error> {
        self.tell(thread, order)?.recv().map_err(|_| Error::Gone { thread })
    }

    /// Gives a thread an order; the answer comes later.
    fn tell<T>(
        &self,
        thread: usize,
        order: impl FnOnce(SyncSender<T>) -> Order,
    ) -> Result<Receiver<T>, Error> {
        let gone = || Error::Gone { thread };
        let target = self.threads.get(thread).ok_or_else(gone)?;
        let (reply, answer) = sync_channel(1);
        target.order(order(reply)).map_err(|()| gone())?;
        Ok(answer)
    }
}

/// Waits for what a thread says of a queue that it was given.
fn added(thread: usize, answer: Receiver<Result<u64, Error>>) -> Result<QueueId, Error> {
    let serial = answer.recv().map_err(|_| Error::Gone { thread })??;
    Ok(QueueId { thread, serial })
}

impl Drop for IoThreads {
    fn drop(&mut self) {
        for thread in &mut self.threads {
            let _ = thread.order(Order::Stop);
            if let Some(handle) = thread.handle.take() {
                let _ = handle.join();
            }
        }
    }
}

impl Thread {
    fn order(&self, order: Order) -> Result<(), ()> {
        self.inbox.send(order).map_err(|_| ())?;
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).map(drop).map_err(|_| ())
    }
}

/// Ends the process when its thread panics.
///
/// Unwinding would free buffers that the kernel still fills, and leave devices without a server in a process
/// that looks alive. When the process ends, the kernel fails their requests and the supervisor sees it.
struct AllOrNothing;

impl Drop for AllOrNothing {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// A thread's own state.
struct Server {
    index: usize,
    ring: Ring,
    queues: Vec<Option<Queue>>,
    /// Serial numbers of the queues, by the same index.
    serials: Vec<u64>,
    last_serial: u64,
    orders: Receiver<Order>,
    wake: Arc<OwnedFd>,
    woken: Box<[u8; 8]>,
    /// Where others leave word about blocks, and the list that it is exchanged for.
    mailbox: Arc<Mailbox>,
    notes: Vec<(Addressee, Note)>,
    /// For blocks that this thread decodes itself.
    hand: Hand,
    /// Queues of which something has completed in this turn, each once.
    turning: Vec<u32>,
    stopping: bool,
}

impl Server {
    fn new(index: usize, wake: Arc<OwnedFd>, orders: Receiver<Order>) -> Result<Server, Error> {
        let ring = Ring::new(index)?;
        let mut server = Server {
            index,
            ring,
            queues: Vec::new(),
            serials: Vec::new(),
            last_serial: 0,
            orders,
            mailbox: Arc::new(Mailbox::new(Arc::clone(&wake))),
            notes: Vec::new(),
            hand: Hand::default(),
            wake,
            woken: Box::new([0; 8]),
            turning: Vec::with_capacity(BATCH),
            stopping: false,
        };
        server.listen().map_err(|source| Error::Ring { thread: index, source })?;
        Ok(server)
    }

    /// Has the ring report when the wake-up descriptor is written to.
    fn listen(&mut self) -> std::io::Result<()> {
        // Not a registered descriptor: see `Ring::releases_at_once`.
        let read = opcode::Read::new(Fd(self.wake.as_raw_fd()), self.woken.as_mut_ptr(), 8);
        self.ring.push(&read.build().user_data(WAKE))
    }

    fn run(&mut self) {
        while !(self.stopping && self.queues.iter().all(Option::is_none)) {
            let taken = match self.ring.wait() {
                Ok(taken) => taken,
                // A ring that cannot be entered serves no request: the process ends, and the supervisor sees
                // it.
                Err(error) => {
                    tracing::error!("I/O thread {}: io_uring_enter failed: {error}", self.index);
                    std::process::abort();
                }
            };
            for index in 0..taken {
                let completion = self.ring.taken(index);
                if completion.user_data == WAKE {
                    self.woken();
                    continue;
                }
                let (index, source) = source_of(completion.user_data);
                if let Some(Some(queue)) = self.queues.get_mut(index as usize) {
                    queue.complete(&mut self.ring, source, completion);
                    if queue.turns() {
                        self.turning.push(index);
                    }
                }
            }
            while let Some(quick) = self.end_turns() {
                self.decode(quick);
            }
        }
    }

    /// Ends the turn of all queues of which something has completed. With a block that this thread is to
    /// decode itself, which it may where no other queue waits for it.
    fn end_turns(&mut self) -> Option<Quick> {
        let may = self.turning.len() == 1;
        let mut own = None;
        while let Some(index) = self.turning.pop() {
            if let Some(Some(queue)) = self.queues.get_mut(index as usize) {
                own = queue.end_turn(&mut self.ring, may);
                self.release_ended(index);
            }
        }
        own
    }

    /// Decodes a block, and takes in what there is to hear of it. What is queued goes to the kernel first.
    fn decode(&mut self, quick: Quick) {
        // A ring that cannot be entered is seen when it is waited for.
        let _ = self.ring.submit();
        quick.decode(&mut self.hand, &self.mailbox);
        self.hear();
    }

    fn release_ended(&mut self, index: u32) {
        if let Some(slot) = self.queues.get_mut(index as usize)
            && slot.as_ref().is_some_and(Queue::has_ended)
            && let Some(queue) = slot.take()
            && let Err(error) = queue.release(&mut self.ring)
        {
            tracing::error!("I/O thread {}: {error}", self.index);
        }
    }

    fn woken(&mut self) {
        while let Ok(order) = self.orders.try_recv() {
            match order {
                Order::Add(queue, reply) => {
                    let _ = reply.send(self.add(queue));
                }
                Order::Prepare(serial, serving, reply) => {
                    let _ = reply.send(self.prepare(serial, serving));
                }
                Order::Hold(serial, reply) => {
                    if let Some(queue) = self.queue(serial) {
                        queue.hold(reply);
                    }
                }
                Order::LetGo(serial, change, reply) => {
                    let _ = reply.send(self.let_go(serial, change));
                }
                Order::Leave(serial, reply) => {
                    self.order_queue(serial, Queue::leave);
                    let _ = reply.send(());
                }
                Order::GiveUpReads(serial, when, reply) => {
                    let when = self.ring.time_of(when);
                    self.order_queue(serial, |queue, ring| queue.give_up_reads(ring, when));
                    let _ = reply.send(());
                }
                Order::Room(queues, reply) => {
                    let _ = reply.send(self.ring.room(queues));
                }
                Order::Stop => self.stopping = true,
                #[cfg(test)]
                Order::Panic => panic!("as the test wants"),
            }
        }
        self.hear();
        if let Err(error) = self.listen() {
            tracing::error!("I/O thread {} takes no more orders: {error}", self.index);
            self.stopping = true;
        }
    }

    /// Takes in what others have left word of.
    fn hear(&mut self) {
        self.mailbox.take(&mut self.notes);
        for ((index, tag), note) in self.notes.drain(..) {
            // A queue stays as long as it waits for word.
            if let Some(Some(queue)) = self.queues.get_mut(index as usize) {
                queue.note_came(&mut self.ring, tag, note);
                if queue.turns() {
                    self.turning.push(index);
                }
            }
        }
    }

    fn add(&mut self, new: NewQueue) -> Result<u64, Error> {
        let index = match self.queues.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                self.queues.push(None);
                self.serials.push(0);
                self.queues.len() - 1
            }
        };
        let (mut queue, started) = Queue::start(&mut self.ring, index as u32, new, &self.mailbox)?;
        queue.end_turn(&mut self.ring, false);
        if queue.has_ended() {
            queue.release(&mut self.ring)?;
        } else {
            self.queues[index] = Some(queue);
        }
        self.last_serial += 1;
        self.serials[index] = self.last_serial;
        self.ring.submit().map_err(|source| Error::Ring { thread: self.index, source })?;
        started.map(|()| self.last_serial)
    }

    fn prepare(&mut self, serial: u64, serving: Arc<Serving>) -> Result<bool, Error> {
        let Some(index) = self.find(serial) else { return Ok(false) };
        let Some(queue) = self.queues[index].as_mut() else { return Ok(false) };
        queue.prepare(&mut self.ring, serving).map(|()| true)
    }

    fn find(&self, serial: u64) -> Option<usize> {
        self.serials.iter().position(|other| *other == serial)
    }

    /// The queue that an order names.
    fn queue(&mut self, serial: u64) -> Option<&mut Queue> {
        let index = self.find(serial)?;
        self.queues[index].as_mut()
    }

    fn order_queue(&mut self, serial: u64, order: impl FnOnce(&mut Queue, &mut Ring)) {
        let Some(index) = self.find(serial) else { return };
        let Some(queue) = self.queues[index].as_mut() else { return };
        order(queue, &mut self.ring);
        self.release_ended(index as u32);
    }

    fn let_go(&mut self, serial: u64, change: bool) -> bool {
        let Some(index) = self.find(serial) else { return false };
        let Some(queue) = self.queues[index].as_mut() else { return false };
        let was_held = queue.let_go(&mut self.ring, change).unwrap_or_else(|error| {
            // The queue goes on; slots of the table stay taken.
            tracing::error!("I/O thread {}: {error}", self.index);
            true
        });
        self.release_ended(index as u32);
        was_held
    }
}

impl std::fmt::Debug for IoThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IoThreads").field("count", &self.count()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_thread_is_asked_for_room_only_where_what_is_known_is_not_enough() {
        let threads = IoThreads::start(1).unwrap();
        let known = || threads.threads[0].room.load(Ordering::Relaxed);
        assert_eq!(known(), 0);
        let all = threads.room(0, 1).unwrap();
        assert_eq!(threads.room_for(0, 4).unwrap(), all);
        assert_eq!(known(), all);
        threads.threads[0].room.store(5, Ordering::Relaxed);
        assert_eq!(threads.room_for(0, 5).unwrap(), 5);
        assert_eq!(known(), 5, "it was not asked");
        assert_eq!(threads.room_for(0, 6).unwrap(), all);
        assert_eq!(known(), all);
        assert_eq!(threads.room_for(0, u16::MAX).unwrap(), all, "no ring has so many places");
        assert!(threads.room_for(1, 1).is_err());
    }

    #[test]
    fn a_thread_that_panics_ends_the_process() {
        const CHILD: &str = "BECKET_TEST_PANICS";
        if std::env::var_os(CHILD).is_some() {
            let threads = IoThreads::start(1).unwrap();
            threads.threads[0].order(Order::Panic).unwrap();
            drop(threads);
            std::process::exit(0);
        }
        let name = "thread::tests::a_thread_that_panics_ends_the_process";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(libc::SIGABRT), "{child:?}");
    }
}
