//! An image is exported over NBD to a client in this process: what it writes and reads, what a hostile one
//! does, and what becomes of it when the server leaves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use becket_engine::fault::{Affected, Rule, Struck};
use becket_engine::{Faults, IoThreads};
use becket_image::{DirectIo, OpenOptions as ImageOptions, Opened};
use becket_transport::geometry;
use becket_transport::nbd::{Agreed, Departure, Nbd, STILL};
use becket_transport::serve::{Content, Setup};
use becket_uapi::nbd as uapi;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

const SIZE: usize = 4 << 20;
const DEPTH: u16 = 8;
const PATIENCE: Duration = Duration::from_secs(60);

const SIMPLE: Agreed = agreed(false, false);
const STRUCTURED: Agreed = agreed(true, false);
const EXTENDED: Agreed = agreed(true, true);

const fn agreed(structured: bool, extended: bool) -> Agreed {
    Agreed { export: String::new(), structured, extended, allocation: structured }
}

/// An image, and who exports it.
struct Bench {
    image: tempfile::NamedTempFile,
    export: Nbd,
    threads: IoThreads,
    closed: Receiver<()>,
}

/// How a connection has ended.
type End = Receiver<Option<Departure>>;

impl Bench {
    fn new(read_only: bool) -> Bench {
        Bench::with_faults(read_only, Vec::new())
    }

    fn with_faults(read_only: bool, rules: Vec<Rule>) -> Bench {
        let place = std::env::var_os("BECKET_SCRATCH").map_or_else(std::env::temp_dir, Into::into);
        let image = tempfile::NamedTempFile::new_in(place).unwrap();
        image.as_file().set_len(SIZE as u64).unwrap();
        let threads = IoThreads::start(2).unwrap();
        let (export, closed) = export(image.path(), read_only, rules);
        Bench { image, export, threads, closed }
    }

    fn connect(&self, agreed: Agreed, unread: &[u8]) -> (Client, End) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Client::new(ours, &agreed), self.serve(theirs.into(), agreed, unread.to_vec()))
    }

    fn serve(&self, socket: OwnedFd, agreed: Agreed, unread: Vec<u8>) -> End {
        let (sender, ended) = channel();
        let ended_by = Box::new(move |departure| _ = sender.send(departure));
        self.export.connect(&self.threads, socket, agreed, unread, ended_by).unwrap();
        ended
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.image.path()).unwrap()
    }
}

fn export(path: &Path, read_only: bool, rules: Vec<Rule>) -> (Nbd, Receiver<()>) {
    let options = ImageOptions { shared: true, read_only, ..ImageOptions::default() };
    let Opened { map, sources, block_size, read_only, .. } = becket_image::open(path, &options).unwrap();
    let geometry = geometry(&map, &sources, block_size, read_only, 1 << 20);
    let faults = (!rules.is_empty()).then(|| Faults { rules, ..Faults::default() });
    let content = Content { faults, ..Content::plain(map, sources, DirectIo::Auto) };
    let setup = Setup { id: 1, first: 0, queues: 4, depth: DEPTH, geometry, content };
    let (_, tether) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let (sender, closed) = channel();
    (Nbd::serve(setup, tether, Box::new(move || _ = sender.send(()))).unwrap(), closed)
}

/// The client's side, which checks that the stream stays in step.
struct Client {
    socket: UnixStream,
    extended: bool,
    /// Lengths of reads whose replies are simple: these do not say how long they are.
    reads: BTreeMap<u64, usize>,
    cookie: u64,
}

/// What came of one request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Outcome {
    error: u32,
    /// Parts of the data with their offsets, in the order in which they came.
    parts: Vec<(u64, Vec<u8>)>,
    /// Ranges and their states.
    extents: Vec<(u64, u32)>,
}

impl Client {
    fn new(socket: UnixStream, agreed: &Agreed) -> Client {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Client { socket, extended: agreed.extended, reads: BTreeMap::new(), cookie: 0 }
    }

    /// The bytes of a request, and its cookie.
    fn request(&mut self, command: u16, flags: u16, offset: u64, len: u64, data: &[u8]) -> (u64, Vec<u8>) {
        self.cookie += 1;
        if command == uapi::CMD_READ {
            self.reads.insert(self.cookie, len as usize);
        }
        let request = uapi::Request { flags, command, cookie: self.cookie, offset, len };
        let mut bytes = vec![0; 32];
        let size = request.write(&mut bytes, self.extended).unwrap();
        bytes.truncate(size);
        bytes.extend_from_slice(data);
        (self.cookie, bytes)
    }

    fn send(&mut self, command: u16, flags: u16, offset: u64, len: u64, data: &[u8]) -> u64 {
        let (cookie, bytes) = self.request(command, flags, offset, len, data);
        self.socket.write_all(&bytes).unwrap();
        cookie
    }

    fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.socket.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Reads one reply, or one chunk of it, into what is known; returns the cookie once the reply is whole.
    fn reply(&mut self, known: &mut BTreeMap<u64, Outcome>) -> Option<u64> {
        let mut head = self.take(4);
        let size = uapi::Reply::size(&head).expect("a reply begins");
        head.extend(self.take(size - 4));
        match uapi::Reply::read(&head).unwrap() {
            uapi::Reply::Simple { error, cookie } => {
                let outcome = known.entry(cookie).or_default();
                outcome.error = error;
                if let Some(len) = self.reads.remove(&cookie).filter(|_| error == 0) {
                    let data = self.take(len);
                    known.entry(cookie).or_default().parts.push((u64::MAX, data));
                }
                Some(cookie)
            }
            uapi::Reply::Chunk { flags, kind, cookie, len, .. } => {
                assert!(len < 64 << 20);
                let payload = self.take(len as usize);
                let outcome = known.entry(cookie).or_default();
                match kind {
                    uapi::CHUNK_NONE => assert_eq!(len, 0),
                    uapi::CHUNK_OFFSET_DATA => {
                        outcome.parts.push((uapi::u64_at(&payload, 0).unwrap(), payload[8..].to_vec()));
                    }
                    uapi::CHUNK_BLOCK_STATUS => {
                        assert_eq!(uapi::u32_at(&payload, 0), Some(1));
                        let number = |at| uapi::u32_at(&payload, at).unwrap();
                        let extents = (4..payload.len()).step_by(8);
                        outcome.extents = extents.map(|at| (number(at).into(), number(at + 4))).collect();
                    }
                    uapi::CHUNK_BLOCK_STATUS_EXT => {
                        let count = uapi::u32_at(&payload, 4).unwrap() as usize;
                        assert_eq!(payload.len(), 8 + 16 * count);
                        let number = |at| uapi::u64_at(&payload, at).unwrap();
                        let extents = (8..payload.len()).step_by(16);
                        outcome.extents = extents.map(|at| (number(at), number(at + 8) as u32)).collect();
                    }
                    kind if kind & uapi::CHUNK_IS_ERROR != 0 => {
                        outcome.error = uapi::u32_at(&payload, 0).unwrap();
                        assert!(outcome.error > 0);
                    }
                    kind => panic!("a chunk of kind {kind}"),
                }
                (flags & uapi::CHUNK_DONE != 0).then_some(cookie)
            }
        }
    }

    /// Reads replies until so many are whole.
    fn replies(&mut self, count: usize) -> BTreeMap<u64, Outcome> {
        let (mut known, mut whole) = (BTreeMap::new(), 0);
        while whole < count {
            whole += usize::from(self.reply(&mut known).is_some());
        }
        known
    }

    /// Carries out one request.
    fn one(&mut self, command: u16, flags: u16, offset: u64, len: u64, data: &[u8]) -> Outcome {
        let cookie = self.send(command, flags, offset, len, data);
        self.replies(1).remove(&cookie).unwrap()
    }

    /// The server has ended the connection.
    fn is_ended(&mut self) -> bool {
        let mut rest = [0; 4096];
        loop {
            match self.socket.read(&mut rest) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }
}

/// The data of a read, whatever order its parts came in.
fn data(outcome: &Outcome, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    let mut filled = 0;
    for (at, part) in &outcome.parts {
        let from = if *at == u64::MAX { 0 } else { (at - offset) as usize };
        bytes[from..from + part.len()].copy_from_slice(part);
        filled += part.len();
    }
    assert_eq!(filled, len);
    bytes
}

#[test]
fn any_requests_do_to_the_image_what_they_do_to_a_model() {
    for (round, agreed) in [SIMPLE, STRUCTURED, EXTENDED].into_iter().enumerate() {
        let bench = Bench::new(false);
        let (mut client, end) = bench.connect(agreed, &[]);
        let mut random = SmallRng::seed_from_u64(round as u64 + 1);
        let mut model = vec![0; SIZE];
        const LANES: usize = 4;
        for _ in 0..60 {
            // Requests that are under way together do not overlap. Some are longer than a buffer.
            let (mut batch, mut reads) = (Vec::new(), Vec::new());
            for lane in 0..LANES {
                let most = if random.random_bool(0.2) { SIZE / LANES } else { 40_000 };
                let len = random.random_range(1..=most);
                let from = lane * (SIZE / LANES) + random.random_range(0..=SIZE / LANES - len);
                let (at, range) = (from as u64, from..from + len);
                let durable = if random.random_bool(0.2) { uapi::CMD_FLAG_FUA } else { 0 };
                let bytes = match random.random_range(0..4) {
                    0 => {
                        let bytes: Vec<u8> = (0..len).map(|_| random.random()).collect();
                        model[range].copy_from_slice(&bytes);
                        client.request(uapi::CMD_WRITE, durable, at, len as u64, &bytes).1
                    }
                    1 => {
                        model[range].fill(0);
                        let command = if random.random() { uapi::CMD_TRIM } else { uapi::CMD_WRITE_ZEROES };
                        client.request(command, durable, at, len as u64, &[]).1
                    }
                    _ => {
                        let (cookie, bytes) = client.request(uapi::CMD_READ, 0, at, len as u64, &[]);
                        reads.push((cookie, at, model[range].to_vec()));
                        bytes
                    }
                };
                batch.extend(bytes);
            }
            let mut writer = client.socket.try_clone().unwrap();
            let cuts: Vec<usize> = (0..3).map(|_| random.random_range(0..=batch.len())).collect();
            let outcomes = std::thread::scope(|scope| {
                // In pieces that end anywhere.
                scope.spawn(move || {
                    let mut cuts = cuts;
                    cuts.push(batch.len());
                    cuts.sort_unstable();
                    let mut from = 0;
                    for cut in cuts {
                        writer.write_all(&batch[from..cut]).unwrap();
                        from = cut;
                    }
                });
                client.replies(LANES)
            });
            assert!(outcomes.values().all(|outcome| outcome.error == 0), "{round}");
            for (cookie, at, wanted) in reads {
                assert!(data(&outcomes[&cookie], at, wanted.len()) == wanted, "{round}: read at {at}");
            }
        }
        assert_eq!(client.one(uapi::CMD_FLUSH, 0, 0, 0, &[]).error, 0);
        assert!(bench.bytes() == model, "{round}");
        client.send(uapi::CMD_DISC, 0, 0, 0, &[]);
        assert!(client.is_ended());
        assert!(end.recv_timeout(PATIENCE).unwrap().is_none());
    }
}

#[test]
fn what_cannot_be_is_an_error_of_that_request_alone() {
    let bench = Bench::new(false);
    for agreed in [SIMPLE, STRUCTURED, EXTENDED] {
        let structured = agreed.structured;
        let (mut client, _end) = bench.connect(agreed, &[]);
        let size = SIZE as u64;
        for (command, flags, offset, len, data, error) in [
            (uapi::CMD_READ, 0, size - 1, 2, 0, libc::EINVAL),
            (uapi::CMD_READ, 0, u64::MAX, 2, 0, libc::EINVAL),
            (uapi::CMD_READ, 0, 0, 0, 0, libc::EINVAL),
            (uapi::CMD_READ, 1 << 9, 0, 512, 0, libc::EINVAL),
            (uapi::CMD_WRITE, 0, size - 1, 2, 2, libc::ENOSPC),
            (uapi::CMD_WRITE, 1 << 9, 0, 512, 512, libc::EINVAL),
            (uapi::CMD_TRIM, 0, size, 1, 0, libc::EINVAL),
            (uapi::CMD_WRITE_ZEROES, uapi::CMD_FLAG_FAST_ZERO | uapi::CMD_FLAG_NO_HOLE, 0, 1, 0, 95),
            (uapi::CMD_WRITE_ZEROES, 0, size - 1, 2, 0, libc::ENOSPC),
            (uapi::CMD_WRITE_ZEROES, uapi::CMD_FLAG_FAST_ZERO, u64::MAX, 2, 0, libc::ENOSPC),
            (uapi::CMD_CACHE, 0, size - 1, 2, 0, libc::EINVAL),
            (77, 0, 0, 0, 0, libc::EINVAL),
        ] {
            let bytes = vec![1; data];
            let outcome = client.one(command, flags, offset, len, &bytes);
            assert_eq!(outcome.error, error as u32, "{command} {flags} {offset} {len}");
            assert!(outcome.parts.is_empty());
        }
        // More than one chunk can hold.
        if structured {
            let outcome = client.one(uapi::CMD_READ, uapi::CMD_FLAG_DF, 0, 1 << 20, &[]);
            assert_eq!(outcome.error, libc::EOVERFLOW as u32);
            let outcome = client.one(uapi::CMD_READ, uapi::CMD_FLAG_DF, 0, 1 << 18, &[]);
            assert_eq!((outcome.error, outcome.parts.len()), (0, 1));
        } else {
            assert_eq!(client.one(uapi::CMD_BLOCK_STATUS, 0, 0, 512, &[]).error, libc::EINVAL as u32);
        }
        assert_eq!(client.one(uapi::CMD_READ, 0, 0, 512, &[]).error, 0);
    }
    assert!(bench.bytes().iter().all(|byte| *byte == 0));
    let bench = Bench::new(true);
    let (mut client, _end) = bench.connect(STRUCTURED, &[]);
    for command in [uapi::CMD_WRITE_ZEROES, uapi::CMD_WRITE] {
        let data: &[u8] = if command == uapi::CMD_WRITE { &[1; 512] } else { &[] };
        assert_eq!(client.one(command, 0, 0, 512, data).error, libc::EPERM as u32);
    }
}

#[test]
fn what_is_refused_is_answered_after_its_payload() {
    let bench = Bench::new(false);
    for agreed in [SIMPLE, STRUCTURED, EXTENDED] {
        let len = 300_000;
        let (mut client, end) = bench.connect(agreed, &[]);
        let (cookie, head) = client.request(uapi::CMD_WRITE, 0, SIZE as u64, len, &[]);
        client.socket.write_all(&head).unwrap();
        client.socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let early = client.socket.read(&mut [0; 64]);
        assert_eq!(early.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        client.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        client.socket.write_all(&vec![1; len as usize]).unwrap();
        assert_eq!(client.replies(1)[&cookie].error, libc::ENOSPC as u32);
        // As many as there are tags, and more.
        let refused: Vec<_> = (0..3 * DEPTH)
            .flat_map(|_| client.request(uapi::CMD_WRITE, 0, SIZE as u64, 999, &[1; 999]).1)
            .collect();
        client.socket.write_all(&refused).unwrap();
        let known = client.replies(usize::from(3 * DEPTH));
        assert!(known.values().all(|outcome| outcome.error == libc::ENOSPC as u32));
        assert_eq!(client.one(uapi::CMD_READ, 0, 0, 512, &[]).error, 0);
        // It ends in the middle of one.
        client.socket.write_all(&head).unwrap();
        drop(client);
        assert!(end.recv_timeout(PATIENCE).unwrap().is_none());
    }
}

#[test]
fn holes_are_reported_as_such_and_data_never() {
    let bench = Bench::new(false);
    for agreed in [STRUCTURED, EXTENDED] {
        let (mut client, _end) = bench.connect(agreed, &[]);
        let (hole, len) = (uapi::STATE_HOLE | uapi::STATE_ZERO, 64 << 10);
        client.one(uapi::CMD_WRITE, 0, 1 << 20, len, &vec![7; len as usize]);
        let status = client.one(uapi::CMD_BLOCK_STATUS, 0, 0, SIZE as u64, &[]);
        let mib = 1 << 20;
        let wanted = [(mib, hole), (len, 0), (SIZE as u64 - mib - len, hole)];
        assert_eq!(status.extents, wanted);
        let one = client.one(uapi::CMD_BLOCK_STATUS, uapi::CMD_FLAG_REQ_ONE, mib + 512, 4096, &[]);
        assert_eq!(one.extents, [(4096, 0)]);
    }
}

#[test]
fn long_reads_with_simple_replies_come_in_one_piece_whatever_is_asked_beside_them() {
    let bench = Bench::new(false);
    let content: Vec<u8> = (0..SIZE).map(|at| (at / 512 * 7 + at) as u8).collect();
    std::fs::write(bench.image.path(), &content).unwrap();
    let (mut client, _end) = bench.connect(SIMPLE, &[]);
    // More of them than there are tags, and errors and short reads between them.
    let mut wanted = BTreeMap::new();
    let mut batch = Vec::new();
    for round in 0..3 * u64::from(DEPTH) {
        let at = round * 4096;
        for (offset, len, error) in [(at, 700_000, 0), (at, 100, 0), (SIZE as u64, 512, libc::EINVAL)] {
            let (cookie, bytes) = client.request(uapi::CMD_READ, 0, offset, len, &[]);
            batch.extend(bytes);
            wanted.insert(cookie, (offset, len as usize, error as u32));
        }
    }
    client.socket.write_all(&batch).unwrap();
    let outcomes = client.replies(wanted.len());
    for (cookie, (offset, len, error)) in wanted {
        let outcome = &outcomes[&cookie];
        assert_eq!(outcome.error, error);
        if error == 0 {
            assert!(data(outcome, offset, len) == content[offset as usize..offset as usize + len]);
        }
    }
}

#[test]
fn a_long_read_with_simple_replies_that_fails_reads_no_further() {
    let certain = |kind, struck, range| Rule { kind, struck, chance: 1_000_000, range };
    let fails = certain(Affected::Read, Struck::Error(5), Some((0, 4096)));
    let fails_later = certain(Affected::Read, Struck::Error(5), Some((3 << 20, 4096)));
    // Slow writes show when one is answered before it is done.
    let slow = certain(Affected::Write, Struck::Delay(30), None);
    let bench = Bench::with_faults(false, vec![fails, fails_later, slow]);
    let content: Vec<u8> = (0..SIZE).map(|at| (at / 512 * 7 + at) as u8).collect();
    std::fs::write(bench.image.path(), &content).unwrap();
    let (mut client, end) = bench.connect(SIMPLE, &[]);
    // Around it another long read, and one that is short and fails.
    for round in 0..12u8 {
        let (mut batch, mut wanted) = (Vec::new(), BTreeMap::new());
        for (command, offset, len, error) in [
            (uapi::CMD_READ, 0, 700_000, libc::EIO),
            (uapi::CMD_WRITE, 1 << 20, 8192, 0),
            (uapi::CMD_FLUSH, 0, 0, 0),
            (uapi::CMD_READ, 512, 512, libc::EIO),
            (uapi::CMD_READ, 8192, 700_000, 0),
            (uapi::CMD_READ, 0, 600_000, libc::EIO),
            (uapi::CMD_WRITE, 2 << 20, 8192, 0),
            (uapi::CMD_READ, 8192, 4096, 0),
        ] {
            let bytes = vec![round; if command == uapi::CMD_WRITE { len as usize } else { 0 }];
            let (cookie, bytes) = client.request(command, 0, offset, len, &bytes);
            batch.extend(bytes);
            wanted.insert(cookie, (command, offset as usize, len as usize, error as u32));
        }
        client.socket.write_all(&batch).unwrap();
        let mut known = BTreeMap::new();
        for _ in 0..wanted.len() {
            let cookie = client.reply(&mut known).expect("replies are simple");
            let (command, offset, len, error) = wanted.remove(&cookie).expect("it is answered once");
            let outcome = &known[&cookie];
            assert_eq!(outcome.error, error, "{command} {offset} {len}");
            match command {
                uapi::CMD_READ if error == 0 => {
                    assert!(data(outcome, offset as u64, len) == content[offset..offset + len]);
                }
                uapi::CMD_WRITE => assert!(bench.bytes()[offset..offset + len] == vec![round; len]),
                _ => assert!(outcome.parts.is_empty()),
            }
        }
    }
    // What has been sent cannot be taken back: only the end of the connection says that the rest is missing.
    client.send(uapi::CMD_READ, 0, (3 << 20) - 300_000, 700_000, &[]);
    assert!(client.is_ended());
    assert!(end.recv_timeout(PATIENCE).unwrap().is_none());
}

#[test]
fn a_flush_covers_what_every_connection_has_written() {
    let bench = Bench::new(false);
    let (mut one, _ended) = bench.connect(STRUCTURED, &[]);
    let (mut other, _end) = bench.connect(EXTENDED, &[]);
    for round in 0..8u8 {
        assert_eq!(one.one(uapi::CMD_WRITE, 0, 4096, 4096, &[round; 4096]).error, 0);
        assert_eq!(other.one(uapi::CMD_FLUSH, 0, 0, 0, &[]).error, 0);
        let read = other.one(uapi::CMD_READ, 0, 4096, 4096, &[]);
        assert_eq!(data(&read, 4096, 4096), [round; 4096]);
    }
    assert!(bench.export.served().stats().flush.operations >= 8);
}

#[test]
fn a_client_that_reads_nothing_or_talks_nonsense_harms_itself_only() {
    let bench = Bench::new(false);
    // Replies that nobody reads: nothing more is taken in, and the others go on.
    let (mut deaf, deaf_end) = bench.connect(STRUCTURED, &[]);
    deaf.socket.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut asked = 0;
    while asked < 1_000_000 {
        let (_, bytes) = deaf.request(uapi::CMD_READ, 0, 0, 1 << 18, &[]);
        if deaf.socket.write_all(&bytes).is_err() {
            break;
        }
        asked += 1;
    }
    assert!(asked < 1_000_000, "it waits");
    // A header that is none ends the connection, also one beside replies that are not read.
    let (mut wrong, wrong_end) = bench.connect(SIMPLE, &[]);
    wrong.socket.write_all(&[0xff; 64]).unwrap();
    assert!(wrong.is_ended());
    assert!(wrong_end.recv_timeout(PATIENCE).unwrap().is_none());
    // More than is passed over.
    let (mut vast, vast_end) = bench.connect(EXTENDED, &[]);
    vast.send(uapi::CMD_WRITE, uapi::CMD_FLAG_PAYLOAD_LEN, 0, 1 << 40, &[]);
    assert!(vast.is_ended());
    assert!(vast_end.recv_timeout(PATIENCE).unwrap().is_none());
    // Half a header, and half of a write, and then nothing.
    for len in [9, 28 + 100, 28 + 100_000] {
        let (mut half, half_end) = bench.connect(SIMPLE, &[]);
        let (_, bytes) = half.request(uapi::CMD_WRITE, 0, 0, 200_000, &vec![9; 200_000]);
        half.socket.write_all(&bytes[..len]).unwrap();
        drop(half);
        assert!(half_end.recv_timeout(PATIENCE).unwrap().is_none());
    }
    let (mut good, _end) = bench.connect(STRUCTURED, &[]);
    assert_eq!(data(&good.one(uapi::CMD_READ, 0, 0, 4096, &[]), 0, 4096), [0; 4096]);
    drop(deaf);
    assert!(deaf_end.recv_timeout(PATIENCE).unwrap().is_none());
}

#[test]
fn a_server_that_leaves_waits_for_slow_clients_and_not_for_those_that_stand_still() {
    let bench = Bench::new(false);
    // One reads nothing, one stops in the middle of a write, and one reads some bytes now and then.
    let (mut deaf, deaf_end) = bench.connect(STRUCTURED, &[]);
    let (mut half, half_end) = bench.connect(SIMPLE, &[]);
    let (mut slow, slow_end) = bench.connect(STRUCTURED, &[]);
    let (_idle, idle_end) = bench.connect(SIMPLE, &[]);
    for client in [&mut deaf, &mut slow] {
        let asked: Vec<u8> =
            (0..8).flat_map(|_| client.request(uapi::CMD_READ, 0, 0, 1 << 18, &[]).1).collect();
        client.socket.write_all(&asked).unwrap();
    }
    let (_, bytes) = half.request(uapi::CMD_WRITE, 0, 0, 1 << 20, &[9; 300_000]);
    half.socket.write_all(&bytes).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let began = std::time::Instant::now();
    let reader = std::thread::spawn(move || {
        let mut buffer = [0; 8 << 10];
        while slow.socket.read(&mut buffer).is_ok_and(|len| len > 0) {
            let at_first = began.elapsed() < STILL + Duration::from_secs(2);
            std::thread::sleep(Duration::from_millis(if at_first { 100 } else { 1 }));
        }
    });
    let mut ends = Vec::new();
    while ends.len() < 3 {
        assert!(began.elapsed() < PATIENCE);
        bench.export.leave(&bench.threads).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        let ended = [(&deaf_end, "deaf"), (&half_end, "half"), (&idle_end, "idle")];
        ends.extend(
            ended
                .iter()
                .filter_map(|(end, who)| Some((*who, end.try_recv().ok()?.is_some(), began.elapsed()))),
        );
    }
    for (who, stays, after) in ends {
        assert_eq!((stays, after >= STILL), (who == "idle", who != "idle"), "{who} {after:?}");
    }
    assert!(slow_end.try_recv().is_err(), "it goes on");
    let departure = slow_end.recv_timeout(PATIENCE).unwrap();
    assert!(departure.is_some(), "all its replies have been sent");
    drop(departure);
    reader.join().unwrap();
    bench.closed.recv_timeout(PATIENCE).unwrap();
}

#[test]
fn a_server_that_leaves_gives_its_clients_to_the_next_and_no_request_is_lost() {
    for agreed in [SIMPLE, STRUCTURED, EXTENDED] {
        let mut bench = Bench::new(false);
        let (client, mut end) = bench.connect(agreed, &[]);
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = std::sync::Arc::clone(&stop);
        let worker = std::thread::spawn(move || {
            let (mut client, mut round) = (client, 0u64);
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                round += 1;
                let fill = round as u8;
                let mut batch = Vec::new();
                for slot in 0..6u64 {
                    // Short ones and long ones, more than the staging buffer holds.
                    let len = if slot == 0 { 300_000 } else { 5000 };
                    let at = slot * 400_000;
                    batch.extend(client.request(uapi::CMD_WRITE, 0, at, len, &vec![fill; len as usize]).1);
                }
                client.socket.write_all(&batch).unwrap();
                assert!(client.replies(6).values().all(|outcome| outcome.error == 0));
                let read = client.one(uapi::CMD_READ, 0, 0, 300_000, &[]);
                assert!(data(&read, 0, 300_000).iter().all(|byte| *byte == fill));
            }
            round
        });
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(20));
            bench.export.leave(&bench.threads).unwrap();
            let departure = end.recv_timeout(PATIENCE).unwrap().expect("the client is given back");
            bench.closed.recv_timeout(PATIENCE).unwrap();
            (bench.export, bench.closed) = export(bench.image.path(), false, Vec::new());
            end = bench.serve(departure.socket, departure.agreed, departure.unread);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(worker.join().unwrap() > 0);
    }
}
