//! Connections to an NBD server.
//! It connects to the one export that the user named.
//!
//! It keeps a copy of each connection that it has made ([`History`]). As long as the server has ended none of
//! them, the server that a new connection leads to is the one that has the bytes of earlier ones; that is how
//! it can say what became of a dead worker's writes (`Earlier`). And a dead worker's connection is ended in
//! order, before another worker gets one: its last writes have landed then, and no later ones of theirs are
//! undone.
//!
//! What the export holds is asked over one connection more, by which nothing is read or written.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use becket_image::link::channel::{Earlier, Legacy};
use becket_image::link::states::Describer;
use becket_image::link::{Agreed, Dialed, Endpoint, Trust, Wanted, dial, probe};

use super::history::History;
use super::maker::{Describes, Failure, Left, Maker};
use crate::contract::link::Connect;

/// How long a server may take to accept and negotiate, and then to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// However soon requests are to fail, so much time it has.
const LEAST: Duration = Duration::from_millis(100);

pub(super) struct Dialing {
    endpoint: Endpoint,
    /// What connections are secured by, where they are.
    trust: Option<Trust>,
    /// The threads that relay between TLS and workers.
    relays: Vec<JoinHandle<()>>,
    agreed: Agreed,
    patience: Duration,
    /// A new device's first connection, until a worker gets it.
    unused: Option<OwnedFd>,
    history: History,
    describer: Arc<Describer>,
}

impl Dialing {
    /// To the server that an order names. `legacy` and `unused` are what it has inherited.
    pub(super) fn new(
        order: Connect,
        trust: Option<Trust>,
        legacy: Option<Legacy>,
        unused: Option<OwnedFd>,
    ) -> Result<Dialing, String> {
        let Connect { uri, agreed, shares, again, timeout, writes, .. } = order;
        let history = History::new(shares, again, legacy);
        let history = if writes { history } else { history.of_readers() };
        let patience = timeout.map_or(PATIENCE, Duration::from_secs).clamp(LEAST, PATIENCE);
        let endpoint = Endpoint::parse(&uri)?;
        let describer = Arc::new(Describer::new(endpoint.clone(), trust.clone(), patience));
        let mut dialing = Dialing {
            endpoint,
            trust,
            relays: Vec::new(),
            agreed,
            patience,
            unused: None,
            history: history.within(patience),
            describer,
        };
        if !again {
            // A new device is refused that would wait for its server at once.
            let answers = |socket: &OwnedFd| probe(socket, &agreed, patience).is_ok();
            dialing.unused = Some(unused.filter(answers).map_or_else(|| dialing.dial(), Ok)?);
        }
        Ok(dialing)
    }

    fn dial(&mut self) -> Result<OwnedFd, String> {
        // Workers understand simple replies.
        let dialed = dial(&self.endpoint, Wanted::default(), self.trust.as_ref(), self.patience);
        let Dialed { socket, agreed, relay } = dialed.map_err(|error| error.to_string())?;
        self.relays.retain(|relay| !relay.is_finished());
        self.relays.extend(relay);
        // A longer one is followed: the bytes that it had are still there.
        if agreed.size < self.agreed.size {
            return Err(format!("the export has {} bytes, and had {} before", agreed.size, self.agreed.size));
        }
        if !agreed.is_like(&Agreed { size: agreed.size, ..self.agreed }) {
            return Err("the export is another kind of export than when it was attached".to_owned());
        }
        self.agreed.size = agreed.size;
        probe(&socket, &agreed, self.patience).map_err(|error| error.to_string())?;
        Ok(socket)
    }
}

impl Maker for Dialing {
    fn prepares(&mut self, session: u64) -> bool {
        self.history.prepares(session)
    }

    fn reported(&mut self, session: u64) {
        self.history.reported(session);
    }

    fn left(&mut self, session: u64, inode: u64) {
        self.history.left(session, inode);
    }

    fn describes(&self) -> Option<Describes> {
        let describer = Arc::clone(&self.describer);
        Some(Box::new(move |offset, len| describer.states(offset, len)))
    }

    fn attempt(&mut self, session: u64) -> Result<(OwnedFd, Earlier), Failure> {
        let socket = self.unused.take().map_or_else(|| self.dial(), Ok).map_err(Failure::Away)?;
        let earlier = self.history.made(session, &socket);
        Ok((socket, earlier))
    }

    fn size(&self) -> Option<u64> {
        Some(self.agreed.size)
    }

    fn look(&mut self) -> Result<(), Failure> {
        self.dial().map(drop).map_err(Failure::Away)
    }

    fn ends(self: Box<Self>, _: bool) -> Left {
        Left { legacy: self.history.legacy(), relays: self.relays }
    }
}
