//! The offers that becket serves: one file each, and one line in [`OFFERS`].
//! The rest of the supervisor asks what an offer can do, and never which one it is.

mod export;
mod fuse;
mod ublk;

use std::sync::{Arc, OnceLock};

use becket_transport::Kind;

use super::driver::{Driver, Offer};
use crate::contract::{Error, ErrorKind};
use crate::record::runtime::Runtime;

/// All of them.
pub(super) static OFFERS: [Offer; 4] = [ublk::OFFER, fuse::OFFER, export::NBD, export::VHOST_USER];

/// The offers of a supervisor and their drivers, each opened when the first device needs it.
pub(super) struct Drivers(Vec<Entry>);

/// An offer, and its driver once that is open.
type Entry = (&'static Offer, OnceLock<Arc<dyn Driver>>);

impl Drivers {
    pub(super) fn new(offers: &'static [Offer]) -> Drivers {
        Drivers(offers.iter().map(|offer| (offer, OnceLock::new())).collect())
    }

    pub(super) fn offers(&self) -> impl Iterator<Item = &'static Offer> {
        self.0.iter().map(|(offer, _)| *offer)
    }

    /// What devices of that kind can do.
    ///
    /// # Errors
    /// becket serves none of that kind.
    pub(super) fn offer(&self, kind: Kind) -> Result<&'static Offer, Error> {
        self.find(kind).map(|(offer, _)| *offer)
    }

    /// The driver of devices of that kind.
    ///
    /// # Errors
    /// becket serves none of that kind, or the driver cannot be used.
    pub(super) fn driver(&self, kind: Kind, runtime: &Runtime) -> Result<Arc<dyn Driver>, Error> {
        let (offer, opened) = self.find(kind)?;
        if let Some(driver) = opened.get() {
            return Ok(Arc::clone(driver));
        }
        // Of two that come first, one's is closed again.
        let driver = (offer.open)(runtime)?;
        Ok(Arc::clone(opened.get_or_init(|| driver)))
    }

    /// Whether a driver was opened.
    pub(super) fn is_open(&self, kind: Kind) -> bool {
        self.find(kind).is_ok_and(|(_, opened)| opened.get().is_some())
    }

    /// Uses this driver instead of the kernel's.
    #[cfg(test)]
    pub(super) fn set(&self, kind: Kind, driver: Arc<dyn Driver>) {
        assert!(self.find(kind).unwrap().1.set(driver).is_ok(), "it has one");
    }

    fn find(&self, kind: Kind) -> Result<&Entry, Error> {
        self.0.iter().find(|(offer, _)| offer.kind == kind).ok_or_else(|| Error::Failed {
            kind: ErrorKind::InvalidOption,
            message: format!("becket's server makes no {kind} devices"),
            hint: None,
        })
    }
}

#[cfg(test)]
#[path = "third_tests.rs"]
mod third;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_served_kind_has_one_offer_and_no_other_has_any() {
        let drivers = Drivers::new(&OFFERS);
        for kind in Kind::ALL {
            let its = OFFERS.iter().filter(|offer| offer.kind == kind).count();
            assert_eq!(its, usize::from(kind.is_served()), "{kind}");
            assert_eq!(drivers.offer(kind).is_ok(), kind.is_served(), "{kind}");
        }
    }
}
