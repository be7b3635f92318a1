//! Varlink's frames: messages that end in NUL, cut out of what a stream yields, with the descriptors that
//! came along. It reads nothing itself, does not look into a message, and keeps no more than one frame may
//! have, beside what was read at once.

use std::io;

use crate::contract::protocol::MOST_FDS;
use crate::contract::wrong;

/// Bytes that a frame may have: a list of some ten thousand devices.
pub(crate) const LONGEST: usize = 64 << 20;

/// What was read of a stream and not yet taken. `F` is a descriptor.
pub(crate) struct Frames<F> {
    bytes: Vec<u8>,
    /// Bytes at the beginning that are known to have no NUL.
    searched: usize,
    /// Each with the place of a byte of its frame.
    fds: Vec<(usize, F)>,
}

impl<F> Frames<F> {
    pub(crate) fn new() -> Frames<F> {
        Frames { bytes: Vec::new(), searched: 0, fds: Vec::new() }
    }

    /// Adds what one read has yielded. The kernel ends a read behind bytes that came with descriptors, so
    /// those belong to the frame of the last byte.
    ///
    /// # Errors
    /// The frame that has begun is too long, or has too many descriptors.
    pub(crate) fn add(&mut self, bytes: &[u8], fds: Vec<F>) -> io::Result<()> {
        self.bytes.extend_from_slice(bytes);
        let last = self.bytes.len().saturating_sub(1);
        self.fds.extend(fds.into_iter().map(|fd| (last, fd)));
        if self.searched > LONGEST {
            return Err(wrong("a message is too long"));
        }
        if self.fds.len() > MOST_FDS {
            return Err(wrong("a message has too many descriptors"));
        }
        Ok(())
    }

    /// Takes the next whole frame, without its NUL.
    pub(crate) fn take(&mut self) -> Option<(Vec<u8>, Vec<F>)> {
        let unknown = self.bytes.get(self.searched..).unwrap_or_default();
        let Some(found) = unknown.iter().position(|byte| *byte == 0) else {
            self.searched = self.bytes.len();
            return None;
        };
        let end = self.searched + found;
        let rest = self.bytes.split_off(end + 1);
        let mut frame = std::mem::replace(&mut self.bytes, rest);
        frame.pop();
        self.searched = 0;
        let own = self.fds.iter().take_while(|(place, _)| *place <= end).count();
        let fds = self.fds.drain(..own).map(|(_, fd)| fd).collect();
        self.fds.iter_mut().for_each(|(place, _)| *place -= end + 1);
        Some((frame, fds))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all<F>(frames: &mut Frames<F>) -> Vec<(Vec<u8>, Vec<F>)> {
        std::iter::from_fn(|| frames.take()).collect()
    }

    proptest! {
        /// Whatever the reads are, the frames are those that were sent, with their descriptors.
        #[test]
        fn frames_come_as_they_were_sent(
            sent in prop::collection::vec((prop::collection::vec(1u8.., 0..40), 0usize..3, any::<u8>()), 0..12),
            pause in prop::collection::vec(any::<bool>(), 12),
        ) {
            let mut frames = Frames::new();
            let (mut taken, mut unread, mut next) = (Vec::new(), Vec::new(), 0);
            let mut expected = Vec::new();
            for ((text, count, cut), pause) in sent.into_iter().zip(pause) {
                let fds: Vec<usize> = (next..next + count).collect();
                next += count;
                expected.push((text.clone(), fds.clone()));
                let mut bytes = text;
                bytes.push(0);
                // A read takes descriptors with some of their message, and with what was sent before it.
                let first = if count == 0 { 0 } else { 1 + usize::from(cut) % bytes.len() };
                let rest = bytes.split_off(first);
                unread.extend(bytes);
                if count > 0 {
                    frames.add(&std::mem::take(&mut unread), fds).unwrap();
                    taken.extend(all(&mut frames));
                }
                unread.extend(rest);
                if pause {
                    frames.add(&std::mem::take(&mut unread), Vec::new()).unwrap();
                    taken.extend(all(&mut frames));
                }
            }
            frames.add(&unread, Vec::new()).unwrap();
            taken.extend(all(&mut frames));
            prop_assert_eq!(taken, expected);
        }

        /// No byte is lost, whatever comes.
        #[test]
        fn any_bytes_are_frames_and_a_rest(reads in prop::collection::vec((any::<Vec<u8>>(), 0usize..4), 0..20)) {
            let (mut frames, mut joined, mut fds) = (Frames::new(), Vec::new(), 0);
            let whole: Vec<u8> = reads.iter().flat_map(|(bytes, _)| bytes.clone()).collect();
            for (bytes, count) in reads {
                frames.add(&bytes, vec![(); count]).unwrap();
                for (frame, own) in all(&mut frames) {
                    prop_assert!(!frame.contains(&0));
                    joined.extend(frame);
                    joined.push(0);
                    fds += own.len();
                }
                prop_assert!(frames.take().is_none());
            }
            joined.extend_from_slice(&frames.bytes);
            prop_assert_eq!(joined, whole);
            prop_assert!(frames.fds.len() <= MOST_FDS + fds);
        }
    }

    #[test]
    fn what_has_no_end_is_refused() {
        let mut frames = Frames::<()>::new();
        let read = vec![b' '; 1 << 20];
        let refused =
            (0..LONGEST >> 20).any(|_| frames.add(&read, Vec::new()).is_err() || frames.take().is_some());
        assert!(!refused, "as long as it may be");
        frames.add(b"  ", Vec::new()).unwrap();
        assert!(frames.take().is_none() && frames.add(b" ", Vec::new()).is_err());

        let mut frames = Frames::new();
        frames.add(b"{", vec![(); MOST_FDS]).unwrap();
        assert!(frames.add(b"}", vec![()]).is_err());
    }
}
