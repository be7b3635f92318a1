//! What is said with a client before it has agreed on an export: NBD's handshake, by becket-transport.
//! It holds no more than a client may send until then.

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
    input: Vec<u8>,
}

impl Talk {
    pub(super) fn new(_shown: &[Shown], _tls: bool) -> Talk {
        Talk { input: Vec::new() }
    }

    pub(super) fn hear(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    pub(super) fn turn(&mut self) -> Turn {
        Turn::Ended(String::new())
    }

    pub(super) fn take_output(&mut self) -> Vec<u8> {
        Vec::new()
    }

    /// TLS is up. What came before that was read as plain bytes is returned.
    pub(super) fn secured(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.input)
    }

    pub(super) fn into_unread(self) -> Vec<u8> {
        self.input
    }
}
