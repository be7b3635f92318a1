//! What is said with a client before it has agreed on an export: NBD's handshake, by becket-transport.
//! It holds no more than a client may send until then.

use becket_transport::nbd::{self, Handshake, Step};

use crate::contract::export::Shown;

/// What came of what was said.
pub(super) enum Turn {
    /// More has to be said.
    More,
    /// TLS begins with the next byte.
    StartTls,
    /// The client wants that export. Said again when asked again.
    Agreed { number: u32, terms: serde_json::Value },
    /// The conversation is over.
    Ended(String),
}

pub(super) struct Talk {
    handshake: Handshake,
    /// The numbers of the exports, as they are in the handshake's list.
    numbers: Vec<u32>,
}

impl Talk {
    pub(super) fn new(shown: &[Shown], tls: bool) -> Talk {
        let export = |shown: &Shown| nbd::Shown {
            name: shown.name.clone(),
            size: shown.size,
            read_only: shown.read_only,
            rotational: shown.rotational,
            trims: shown.discards,
            smallest: shown.block_size,
            preferred: shown.preferred,
        };
        let numbers = shown.iter().map(|shown| shown.number).collect();
        Talk { handshake: Handshake::new(shown.iter().map(export).collect(), tls), numbers }
    }

    pub(super) fn hear(&mut self, bytes: &[u8]) {
        self.handshake.hear(bytes);
    }

    pub(super) fn turn(&mut self) -> Turn {
        match self.handshake.step() {
            Step::More => Turn::More,
            Step::StartTls => Turn::StartTls,
            Step::End(why) => Turn::Ended(why.to_owned()),
            Step::Agreed(at, agreed) => match (self.numbers.get(at), serde_json::to_value(agreed)) {
                (Some(number), Ok(terms)) => Turn::Agreed { number: *number, terms },
                _ => Turn::Ended("its terms cannot be written".to_owned()),
            },
        }
    }

    pub(super) fn take_output(&mut self) -> Vec<u8> {
        self.handshake.take_output()
    }

    /// TLS is up. What came before that was read as plain bytes is returned.
    pub(super) fn secured(&mut self) -> Vec<u8> {
        self.handshake.secured()
    }

    /// It gets nothing, and hears why; whether that was not said before.
    pub(super) fn refuse_stranger(&mut self) -> bool {
        self.handshake.refuse_stranger()
    }

    pub(super) fn into_unread(self) -> Vec<u8> {
        self.handshake.into_unread()
    }
}
