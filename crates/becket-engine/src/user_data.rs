//! The word that goes with an operation into the ring and comes back with its completion.
//! Holds everything that is needed to find the owner: no table, no search.

use crate::{Token, target::link::LineWay};

/// Of what nobody waits for; no queue has this index. (The highest number is the thread's own.)
pub(crate) const NOBODY: u64 = u64::MAX - 1;

/// Whose completion it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Serving {
        tag: u16,
    },
    /// An operation that was looked at, or what stands for it.
    Intercepted {
        tag: u16,
    },
    Port(Token),
    /// An operation of a line to a server.
    Link {
        line: u16,
        way: LineWay,
    },
}

/// Packs queue, source and tag into the word that comes back with a completion.
pub(crate) fn user_data(queue: u32, source: Source) -> u64 {
    let low = match source {
        Source::Serving { tag } => u64::from(tag),
        Source::Intercepted { tag } => 2 << 24 | u64::from(tag),
        Source::Link { line, way } => {
            let way = match way {
                LineWay::Sent => 0,
                LineWay::Received => 1,
                LineWay::Answered => 2,
            };
            3 << 24 | way << 16 | u64::from(line)
        }
        Source::Port(token) => 1 << 24 | u64::from(token.kind) << 16 | u64::from(token.tag),
    };
    u64::from(queue) << 32 | low
}

/// The reverse of [`user_data`].
pub(crate) fn source_of(word: u64) -> (u32, Source) {
    let tag = word as u16;
    let source = match word >> 24 & 3 {
        0 => Source::Serving { tag },
        2 => Source::Intercepted { tag },
        3 => {
            let way = match word >> 16 & 3 {
                0 => LineWay::Sent,
                1 => LineWay::Received,
                _ => LineWay::Answered,
            };
            Source::Link { line: tag, way }
        }
        _ => Source::Port(Token { kind: (word >> 16) as u8, tag }),
    };
    ((word >> 32) as u32, source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn user_data_comes_back_as_it_went(queue: u32, kind: u8, tag: u16) {
            let way = [LineWay::Sent, LineWay::Received, LineWay::Answered][usize::from(kind % 3)];
            let link = Source::Link { line: tag, way };
            for source in [Source::Serving { tag }, Source::Intercepted { tag }, Source::Port(Token { kind, tag }), link] {
                prop_assert_eq!(source_of(user_data(queue, source)), (queue, source));
            }
        }
    }
}
