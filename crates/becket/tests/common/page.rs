//! Single pages of a device past the page cache, with the errno that a program would get.
//! It never tries a second time.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
};

pub(crate) const PAGE: usize = 4096;
pub(crate) const EIO: i32 = 5;
pub(crate) const ENOSPC: i32 = 28;

/// A page where direct I/O takes it.
#[derive(Debug)]
#[repr(align(4096))]
pub(crate) struct Page(pub(crate) [u8; PAGE]);

/// A device, past its page cache.
pub(crate) fn direct(device: &Path) -> File {
    let flags = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(device).unwrap()
}

pub(crate) fn read(file: &File, at: u64) -> Result<Box<Page>, i32> {
    let mut page = Box::new(Page([0; PAGE]));
    file.read_exact_at(&mut page.0, at).map(|()| page).map_err(errno)
}

pub(crate) fn write(file: &File, at: u64, byte: u8) -> Result<(), i32> {
    file.write_all_at(&Page([byte; PAGE]).0, at).map_err(errno)
}

pub(crate) fn sync(file: &File) -> Result<(), i32> {
    file.sync_all().map_err(errno)
}

pub(crate) fn errno(error: io::Error) -> i32 {
    error.raw_os_error().unwrap()
}
