//! The kernel's drivers by which the client makes devices, one line each. Devices of all other kinds have a
//! server.

use becket_transport::Kind;

use crate::client::dm::Mapper;
use crate::client::kernel_made::KernelDriver;
use crate::client::loop_::Loop;

static DRIVERS: [(Kind, &dyn KernelDriver); 2] = [(Kind::Dm, &Mapper), (Kind::Loop, &Loop)];

/// The driver of devices of that kind; `None` if they have a server.
pub(crate) fn of(kind: Kind) -> Option<&'static dyn KernelDriver> {
    DRIVERS.iter().find(|(its, _)| *its == kind).map(|(_, driver)| *driver)
}

/// All of them.
pub(crate) fn all() -> impl Iterator<Item = &'static dyn KernelDriver> {
    DRIVERS.iter().map(|(_, driver)| *driver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_a_driver_here_or_a_server() {
        for kind in Kind::ALL {
            assert_eq!(of(kind).is_none(), kind.is_served(), "{kind}");
        }
    }
}
