//! Writes a cpio archive ("newc", the kernel's initramfs format) of directories and files, all owned by root.
//! Never reads the file system: what goes in is given, so that an archive needs no root to be made.

use std::io::{self, Write};

/// An archive being written.
pub(crate) struct Archive<W: Write> {
    to: W,
    inode: u32,
}

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

impl<W: Write> Archive<W> {
    /// Starts an archive.
    pub(crate) fn new(to: W) -> Archive<W> {
        Archive { to, inode: 0 }
    }

    /// Adds a directory; its parent must have been added before.
    pub(crate) fn directory(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, DIRECTORY | 0o755, &[])
    }

    /// Adds a file with these contents.
    pub(crate) fn file(&mut self, name: &str, executable: bool, contents: &[u8]) -> io::Result<()> {
        self.entry(name, REGULAR | if executable { 0o755 } else { 0o644 }, contents)
    }

    /// Adds a symbolic link.
    pub(crate) fn symlink(&mut self, name: &str, target: &str) -> io::Result<()> {
        self.entry(name, SYMLINK | 0o777, target.as_bytes())
    }

    /// Writes the end of the archive and gives the writer back.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, &[])?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn entry(&mut self, name: &str, mode: u32, contents: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let size = u32::try_from(contents.len()).map_err(io::Error::other)?;
        let name_size = u32::try_from(name.len() + 1).map_err(io::Error::other)?;
        // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.to.write_all(header.as_bytes())?;
        self.to.write_all(name.as_bytes())?;
        self.to.write_all(&[0])?;
        self.pad(header.len() + name.len() + 1)?;
        self.to.write_all(contents)?;
        self.pad(contents.len())
    }

    fn pad(&mut self, written: usize) -> io::Result<()> {
        self.to.write_all(&[0; 3][..written.wrapping_neg() % 4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_end_with_the_trailer() {
        let mut archive = Archive::new(Vec::new());
        archive.directory("bin").unwrap();
        archive.file("bin/sh", true, b"hello").unwrap();
        archive.symlink("init", "bin/sh").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(text.matches("070701").count(), 4);
        assert!(text.contains("TRAILER!!!"));
        // The second header starts where the first entry, padded, ends: 110 bytes and "bin\0".
        assert_eq!(&bytes[116..122], b"070701");
        let mode = u32::from_str_radix(std::str::from_utf8(&bytes[116 + 14..116 + 22]).unwrap(), 16).unwrap();
        assert_eq!(mode, 0o100_755);
    }
}
