//! What a command of a port carries to the kernel, and what comes back.
//! Never interprets either: both belong to the port.

/// What the kernel said to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// The command's result.
    pub result: i32,
    /// The command goes on and will answer again.
    pub more: bool,
    /// The buffer that the kernel picked for this answer; [`Io::picked`](crate::Io::picked) reads it.
    pub buffer: Option<u16>,
}

/// Tells a port which of its commands has completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// The port's own meaning.
    pub kind: u8,
    /// The request's tag.
    pub tag: u16,
}

impl Token {
    /// In place of a tag: of no request. No queue is so deep.
    pub const NO_TAG: u16 = u16::MAX;
    /// Kinds from here on are the engine's own, below.
    const OWN: u8 = 254;
    /// What [`Io::receive_staged`](crate::Io::receive_staged) began has come: a number of bytes, 0 at the end
    /// of the stream, or a negative errno.
    pub const STAGED: Token = Token { kind: Token::OWN, tag: Token::NO_TAG };
    /// What [`Io::send`](crate::Io::send) began has ended: the number of bytes sent, or a negative errno.
    pub const SENT: Token = Token { kind: Token::OWN + 1, tag: Token::NO_TAG };
}
