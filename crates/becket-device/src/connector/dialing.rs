//! Connections to an NBD server.
//! It connects to the one export that the user named.
//!
//! It keeps a copy of each connection that it has made ([`History`]). As long as the server has ended none of
//! them, the server that a new connection leads to is the one that has the bytes of earlier ones; that is how
//! it can say what became of a dead worker's writes (`Earlier`). And a dead worker's connection is ended in
//! order, before another worker gets one: its last writes have landed then, and no later ones of theirs are
//! undone.

use std::os::fd::OwnedFd;
use std::time::Duration;

use becket_image::link::channel::{Earlier, Legacy};
use becket_image::link::{Agreed, Endpoint, Wanted, dial};

use super::history::History;
use super::maker::{Failure, Maker};
use crate::contract::link::Connect;

/// How long a server may take to accept and negotiate.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Dialing {
    endpoint: Endpoint,
    agreed: Agreed,
    history: History,
}

impl Dialing {
    /// To the server that an order names.
    pub(super) fn new(order: Connect, legacy: Option<Legacy>) -> Result<Dialing, String> {
        let history = History::new(order.shares, order.again, legacy);
        Ok(Dialing { endpoint: Endpoint::parse(&order.uri)?, agreed: order.agreed, history })
    }

    fn dial(&self) -> Result<OwnedFd, String> {
        // Workers understand simple replies.
        let wanted = Wanted { tls: self.endpoint.tls, ..Wanted::default() };
        let (socket, agreed) = dial(&self.endpoint, wanted, PATIENCE).map_err(|error| error.to_string())?;
        if agreed.size != self.agreed.size {
            return Err(format!(
                "the export has {} bytes, and had {} when it was attached",
                agreed.size, self.agreed.size
            ));
        }
        if !agreed.is_like(&self.agreed) {
            return Err("the export is another kind of export than when it was attached".to_owned());
        }
        Ok(socket)
    }
}

impl Maker for Dialing {
    fn prepares(&mut self, session: u64) -> bool {
        self.history.prepares(session)
    }

    fn attempt(&mut self, session: u64) -> Result<(OwnedFd, Earlier), Failure> {
        let socket = self.dial().map_err(Failure::Away)?;
        let earlier = self.history.made(session, &socket);
        Ok((socket, earlier))
    }

    fn ends(self: Box<Self>, _: bool) -> Option<Legacy> {
        self.history.legacy()
    }
}
