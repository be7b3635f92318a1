//! The clients of exports in a worker: counted, handed to what serves them, and given back when it leaves.
//! It reads nothing of what they send.

use std::sync::{Arc, Mutex};

use crate::contract::export::Visits;
use crate::system::sync::lock;

/// How many clients an export has had. Each change is reported in the order in which it happens.
pub(super) struct Count {
    visits: Mutex<Visits>,
    report: Box<dyn Fn(Visits) + Send + Sync>,
}

impl Count {
    pub(super) fn new(report: impl Fn(Visits) + Send + Sync + 'static) -> Arc<Count> {
        Arc::new(Count { visits: Mutex::default(), report: Box::new(report) })
    }

    /// A client has come.
    pub(super) fn begin(&self) {
        self.change(|visits| visits.begun += 1);
    }

    /// One has gone.
    pub(super) fn end(&self) {
        self.change(|visits| visits.ended += 1);
    }

    /// Says again how many there are.
    pub(super) fn say(&self) {
        self.change(|_| {});
    }

    fn change(&self, change: impl FnOnce(&mut Visits)) {
        // Held while it is reported, so that the last report is the last count.
        let mut visits = lock(&self.visits);
        change(&mut visits);
        (self.report)(*visits);
    }
}
