//! User-space block devices of the kernel's `ublk_drv`.
//! Knows nothing of image formats: it serves a map and the descriptors it was given.

pub mod control;
