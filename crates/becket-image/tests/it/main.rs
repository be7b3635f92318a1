//! The public face of becket-image, tested on real files, locks and devices.
//! It never leaves anything behind, and says so when a test cannot run here.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod btrfs;
mod common;
mod damage;
mod devices;
mod disks;
mod foreign;
mod honest;
mod hostile;
mod known;
mod labels;
mod layers;
mod locks;
mod lvm2;
mod map;
mod open;
mod packed;
mod qcow2;
mod qcow2_guard;
mod snapshots;
mod tables;
mod through;
mod trees;
mod trust;
mod vmdk;
mod windows;
mod xfs;
