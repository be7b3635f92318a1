use proptest::prelude::*;

use super::*;

fn up() -> (Line, OwnedFd) {
    let mut line = Line::new(4).unwrap();
    let (ours, theirs) = rustix::pipe::pipe().unwrap();
    line.connected(ours, None);
    (line, theirs)
}

/// Has pieces sent as a whole.
fn send(line: &mut Line) {
    line.next_send(false).unwrap();
    let all = line.sending as i32;
    assert!(line.sent(all).unwrap().is_none());
    assert_eq!(line.after_sending(), None);
}

/// Receives these bytes, and takes in what is answered: tags with results, and the bytes of reads.
/// What has completed, by tag and result, and the bytes of reads.
type Received = (Vec<(u16, i32)>, Vec<u8>);

fn receive(line: &mut Line, bytes: &[u8]) -> Result<Received, Why> {
    let (mut answers, mut data) = (Vec::new(), Vec::new());
    line.next_receive().unwrap();
    line.staging.slice(0)[line.end..line.end + bytes.len()].copy_from_slice(bytes);
    line.received(bytes.len() as i32)?;
    let mut copy = |_, _, bytes: &[u8]| {
        data.extend_from_slice(bytes);
        Ok(())
    };
    while let Some(answer) = line.answered(&mut copy)? {
        answers.push(answer);
    }
    Ok((answers, data))
}

fn reply(line: &Line, tag: u16, error: u32) -> Vec<u8> {
    let serial = line.pieces[usize::from(tag)].serial;
    let mut bytes = vec![0; Reply::SIMPLE_SIZE];
    let cookie = cookie(line.generation, serial, tag);
    Reply::Simple { error, cookie }.write(&mut bytes, false).unwrap();
    bytes
}

fn read(len: u32) -> Ask {
    Ask { command: nbd::CMD_READ, len, ..Ask::default() }
}

#[test]
fn answers_come_in_any_order_and_in_any_pieces() {
    let (mut line, _end) = up();
    line.queue(0, read(8));
    line.queue(1, Ask { command: nbd::CMD_FLUSH, ..Ask::default() });
    line.queue(2, read(4));
    send(&mut line);
    let all =
        [reply(&line, 2, 0), b"four".to_vec(), reply(&line, 1, 5), reply(&line, 0, 0), b"eight by".to_vec()];
    let (mut answers, mut data) = (Vec::new(), Vec::new());
    for byte in all.concat() {
        let (more, bytes) = receive(&mut line, &[byte]).unwrap();
        answers.extend(more);
        data.extend(bytes);
    }
    assert_eq!(answers, [(2, 4), (1, -libc::EIO), (0, 8)]);
    assert_eq!(data, b"foureight by");
    assert_eq!(line.busy, 0);
}

#[test]
fn what_was_not_asked_is_a_lie_and_what_was_not_answered_is_sent_again() {
    let (mut line, _end) = up();
    line.queue(0, read(4));
    send(&mut line);
    let answer = reply(&line, 0, 0);
    receive(&mut line, &[answer.clone(), b"done".to_vec()].concat()).unwrap();
    line.queue(1, read(4));
    send(&mut line);
    let lie = receive(&mut line, &answer).unwrap_err();
    assert!(matches!(lie, Why::Lies(_)), "it was answered before");
    assert!(line.breaks(lie).is_some() && line.settles().is_some());
    assert!(line.asks());
    let (ours, _theirs) = rustix::pipe::pipe().unwrap();
    line.connected(ours, None);
    send(&mut line);
    let answer = [reply(&line, 1, 0), b"more".to_vec()].concat();
    let (answers, _) = receive(&mut line, &answer).unwrap();
    assert_eq!(answers, [(1, 4)]);
}

#[test]
fn what_is_answered_while_it_is_sent_ends_when_that_has_ended() {
    let (mut line, _end) = up();
    line.queue(
        0,
        Ask { command: nbd::CMD_WRITE, len: 4, address: [0_u8; 4].as_ptr() as u64, ..Ask::default() },
    );
    line.next_send(false).unwrap();
    let answer = reply(&line, 0, 0);
    let (answers, _) = receive(&mut line, &answer).unwrap();
    assert!(answers.is_empty(), "the kernel has its bytes");
    let left = line.sending as i32;
    assert!(line.sent(left).unwrap().is_none());
    assert_eq!(line.after_sending(), Some((0, 4)));
}

#[test]
fn a_server_that_says_nothing_is_given_up_for_reads_or_where_the_user_has_set_a_time() {
    let flush = Ask { command: nbd::CMD_FLUSH, ..Ask::default() };
    for (patience, ask, looks) in [
        (None, read(4), Some(13)),
        (None, flush, None),
        (Some(Duration::from_secs(7)), flush, Some(3)),
        (Some(Duration::from_secs(1000)), read(4), Some(13)),
    ] {
        let (mut line, _end) = up();
        let (ours, _theirs) = rustix::pipe::pipe().unwrap();
        line.connected(ours, patience);
        assert!((0..50).all(|_| !line.is_silent()), "nothing waits for it");
        line.queue(0, ask);
        line.queue(1, read(8));
        send(&mut line);
        assert!(!line.is_silent(), "it was asked a moment ago");
        assert_eq!((1..100).find(|_| line.is_silent()), looks, "{patience:?} {ask:?}");
        // One answer begins the time anew.
        let answer = [reply(&line, 1, 0), b"eight by".to_vec()].concat();
        receive(&mut line, &answer).unwrap();
        assert!(!line.is_silent());
        assert_eq!((1..100).find(|_| line.is_silent()), looks, "{patience:?} {ask:?}");
    }
}

#[test]
fn a_connection_that_is_let_go_of_is_not_ended() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut line = Line::new(4).unwrap();
    line.connected(ours.try_clone().unwrap().into(), None);
    line.queue(0, read(4));
    send(&mut line);
    line.next_receive().unwrap();
    assert!(line.has_sent(|tag| tag == 0) && !line.has_sent(|tag| tag == 1));
    assert_eq!(line.lets_go(), [None, Some(Way::Received)]);
    assert!(line.settles().is_none(), "the kernel still receives");
    assert!(line.has_sent(|_| true) && line.take_back(|_, _| true).is_none());
    assert_eq!(line.received(-libc::ECANCELED), Err(Why::Ended));
    assert!(line.settles().is_some());
    assert!(!line.has_sent(|_| true) && line.take_back(|_, _| true) == Some(0));
    std::io::Write::write_all(&mut &theirs, b"more").unwrap();
    let mut bytes = [0; 4];
    std::io::Read::read_exact(&mut &ours, &mut bytes).unwrap();
    assert_eq!(&bytes, b"more");
}

proptest! {
    #[test]
    fn whatever_a_server_says_has_an_end(said in prop::collection::vec(any::<u8>(), 1..2048), good in any::<bool>()) {
        let (mut line, _end) = up();
        line.queue(0, read(100));
        line.queue(1, read(3));
        send(&mut line);
        let mut bytes = if good { reply(&line, 1, 0) } else { Vec::new() };
        bytes.extend(said);
        if let Ok((answers, _)) = receive(&mut line, &bytes) {
            prop_assert!(answers.len() <= 2);
        }
    }
}

/// A server, a queue and the kernel between them, as one sequence of steps says.
struct World {
    line: Line,
    /// The server's end of the connection.
    _end: OwnedFd,
    /// What each tag was asked for, and not yet answered with.
    asked: [Option<Ask>; 4],
    /// What the server has answered on this connection.
    replied: [bool; 4],
    wire: std::collections::VecDeque<u8>,
    answers: usize,
}

impl World {
    fn new() -> World {
        let (line, end) = up();
        let wire = std::collections::VecDeque::new();
        World { line, _end: end, asked: [None; 4], replied: [false; 4], wire, answers: 0 }
    }

    fn answered(&mut self, (tag, result): (u16, i32)) {
        let ask = self.asked[usize::from(tag)].take().expect("it was asked, and is answered once");
        assert_eq!(result, ask.len as i32, "tag {tag}");
        self.answers += 1;
    }

    fn ask(&mut self, tag: u16, ask: Ask) {
        if self.asked[usize::from(tag)].is_none() {
            self.asked[usize::from(tag)] = Some(ask);
            self.replied[usize::from(tag)] = false;
            self.line.queue(tag, ask);
        }
    }

    /// The kernel sends a part of what it has.
    fn sends(&mut self, part: usize) {
        let _ = self.line.next_send(false);
        if self.line.sending > 0 {
            let count = 1 + part % self.line.sending;
            if let Err(why) = self.line.sent(count as i32) {
                return self.breaks(why);
            }
        }
        while let Some(answer) = self.line.after_sending() {
            self.answered(answer);
        }
    }

    /// The server answers a request that has come to it.
    fn replies(&mut self, tag: u16) {
        let piece = self.line.pieces[usize::from(tag)];
        let there = matches!(piece.stage, Stage::Sending | Stage::Sent) && piece.answer.is_none();
        if there && !std::mem::replace(&mut self.replied[usize::from(tag)], true) {
            self.wire.extend(reply(&self.line, tag, 0));
            if piece.ask.command == nbd::CMD_READ {
                self.wire.extend((0..piece.ask.len).map(|at| at as u8));
            }
        }
    }

    /// The kernel receives so many bytes of what the server has said.
    fn receives(&mut self, most: usize) {
        let _ = self.line.next_receive();
        let room = match self.line.receiving {
            Receiving::Nothing => return,
            Receiving::Staged => STAGING - self.line.end,
            Receiving::Direct(left) => left as usize,
        };
        let bytes: Vec<u8> = self.wire.drain(..most.min(room).min(self.wire.len())).collect();
        if bytes.is_empty() {
            return;
        }
        if self.line.receiving == Receiving::Staged {
            let end = self.line.end;
            self.line.staging.slice(0)[end..end + bytes.len()].copy_from_slice(&bytes);
        }
        let mut said = self.line.received(bytes.len() as i32).map(|()| None);
        loop {
            match said {
                Ok(Some(answer)) => self.answered(answer),
                Ok(None) => {}
                Err(why) => return self.breaks(why),
            }
            said = self.line.answered(&mut |_, from, bytes| {
                // A read's bytes lie where they belong.
                assert!((from..).zip(bytes).all(|(at, byte)| *byte == at as u8));
                Ok(())
            });
            if said == Ok(None) {
                return;
            }
        }
    }

    /// The connection is given up, and there is another one.
    fn breaks(&mut self, why: Why) {
        self.line.breaks(why);
        if self.line.sending > 0 {
            assert!(self.line.sent(-libc::EPIPE).is_err());
        }
        if self.line.receiving != Receiving::Nothing {
            assert!(self.line.received(-libc::ECANCELED).is_err());
        }
        while let Some(answer) = self.line.after_sending() {
            self.answered(answer);
        }
        assert!(self.line.settles().is_some());
        let (ours, end) = rustix::pipe::pipe().unwrap();
        self.line.connected(ours, None);
        self._end = end;
        self.wire.clear();
        self.replied = [false; 4];
    }

    fn step(&mut self, kind: u8, one: u8, two: u16) {
        let tag = u16::from(one % 4);
        match kind {
            0 | 1 => self.ask(tag, read(u32::from(two) + 1)),
            2 => self.ask(tag, Ask { command: nbd::CMD_FLUSH, ..Ask::default() }),
            3 => self.sends(two.into()),
            4 | 5 => self.replies(tag),
            6 | 7 => self.receives(usize::from(two)),
            8 => self.breaks(Why::Ended),
            // The server says what nobody asked for, where an answer could begin or in the midst of one.
            _ => self.wire.extend(two.to_le_bytes().iter().cycle().take(usize::from(one))),
        }
    }
}

proptest! {
    /// Whatever is said in between: a request is answered once, and by what was asked.
    #[test]
    fn each_request_is_answered_once_through_any_number_of_connections(
        steps in prop::collection::vec((0..9_u8, any::<u8>(), any::<u16>()), 1..300),
    ) {
        let mut world = World::new();
        steps.into_iter().for_each(|(kind, one, two)| world.step(kind, one, two));
        for _ in 0..64 {
            world.sends(usize::MAX - 1);
            (0..4).for_each(|tag| world.replies(tag));
            (0..4).for_each(|_| world.receives(usize::MAX));
        }
        prop_assert!(world.asked.iter().all(Option::is_none), "{:?} {:?}", world.asked, world.line.pieces);
        prop_assert_eq!(world.line.busy, 0);
    }

    #[test]
    fn lies_in_between_end_a_connection_and_nothing_else(
        steps in prop::collection::vec((0..10_u8, any::<u8>(), any::<u16>()), 1..300),
    ) {
        let mut world = World::new();
        // What is said inside of a read's data is data: results are as asked, bytes need not be.
        for (kind, one, two) in steps {
            if kind == 9 && world.line.payload.is_some() {
                continue;
            }
            world.step(kind, one, two);
        }
    }
}
