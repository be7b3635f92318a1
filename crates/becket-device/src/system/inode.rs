//! What the kernel itself knows of an open file: neither changes while it is open.
//! It never asks the file system, which may be on a network and not answer: supervisors look at the files of
//! all devices.

use std::io;
use std::os::fd::AsFd;

use becket_image::Identity;
use rustix::fs::{AtFlags, FileType, StatxFlags, makedev, statx};

/// What kind of file a descriptor is of, and which one.
pub(crate) fn of(fd: impl AsFd) -> io::Result<(FileType, Identity)> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let known = statx(fd, "", flags, StatxFlags::TYPE | StatxFlags::INO)?;
    let identity = Identity { dev: makedev(known.stx_dev_major, known.stx_dev_minor), ino: known.stx_ino };
    Ok((FileType::from_raw_mode(known.stx_mode.into()), identity))
}

pub(crate) fn is_pipe(fd: &impl AsFd) -> bool {
    of(fd).is_ok_and(|(kind, _)| kind == FileType::Fifo)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn what_is_known_is_what_the_file_system_says() {
        for file in
            [tempfile::tempfile().unwrap(), File::open("/").unwrap(), File::open("/dev/null").unwrap()]
        {
            let asked = file.metadata().unwrap();
            let wanted =
                (FileType::from_raw_mode(asked.mode()), Identity { dev: asked.dev(), ino: asked.ino() });
            assert_eq!(of(&file).unwrap(), wanted);
        }
    }
}
