//! Copies into a tar archive: ustar, and pax records for what does not fit its fields.
//! Never writes a name that could lead out of the directory in which the archive is unpacked.

use super::{
    bytes::{BLOCK, Trouble},
    sink::{File, Item, Meta, Refusal, Sink},
};
use crate::failure::Failure;
use becket_image::{Identity, shown};
use std::io::{self, Write};
use tar::{Builder, EntryType, Header};

/// Names and targets that are longer are in a pax record.
const NAME_LEN: usize = 100;

/// An archive that is written.
pub(super) struct Archive<W: Write> {
    tar: Builder<W>,
    records: Vec<(String, Vec<u8>)>,
    /// What is copied from.
    sources: Vec<Identity>,
}

impl<W: Write> Archive<W> {
    pub(super) fn new(out: W) -> Self {
        Self { tar: Builder::new(out), records: Vec::new(), sources: Vec::new() }
    }

    /// Ends the archive; returns what it was written to, and the files that were copied from.
    pub(super) fn finish(self) -> io::Result<(W, Vec<Identity>)> {
        Ok((self.tar.into_inner()?, self.sources))
    }

    fn header(&mut self, path: &[u8], meta: &Meta, kind: EntryType) -> Header {
        let attributes = &meta.attributes;
        let mut header = Header::new_ustar();
        let default = if kind == EntryType::Directory { 0o755 } else { 0o644 };
        header.set_entry_type(kind);
        header.set_mode(attributes.mode.map_or(default, |mode| u32::from(mode) & 0o7777));
        let (user, group) = attributes.owner.unwrap_or((0, 0));
        header.set_uid(user.into());
        header.set_gid(group.into());
        header.set_size(0);
        if let Some(time) = attributes.modified {
            header.set_mtime(u64::try_from(time.seconds).unwrap_or(0));
            if time.nanoseconds > 0 || time.seconds < 0 {
                self.records.push(("mtime".to_owned(), decimal(time.seconds, time.nanoseconds)));
            }
        }
        let slash: &[u8] = if kind == EntryType::Directory { b"/" } else { b"" };
        self.text(&mut header.as_old_mut().name, &[path, slash].concat(), "path");
        for (name, value) in &meta.xattrs {
            let name = String::from_utf8_lossy(name).replace('%', "%25").replace('=', "%3D");
            self.records.push((format!("SCHILY.xattr.{name}"), value.clone()));
        }
        header
    }

    /// A name in its field, or in a record where it does not fit.
    fn text(&mut self, field: &mut [u8; NAME_LEN], text: &[u8], record: &str) {
        field.iter_mut().zip(text).for_each(|(to, from)| *to = *from);
        if text.len() > field.len() {
            self.records.push((record.to_owned(), text.to_vec()));
        }
    }

    /// Writes what is known of an entry; its bytes come next.
    fn begin(&mut self, header: &mut Header) -> io::Result<()> {
        let records = std::mem::take(&mut self.records);
        if !records.is_empty() {
            let records = records.iter().map(|(name, value)| (name.as_str(), value.as_slice()));
            self.tar.append_pax_extensions(records)?;
        }
        header.set_cksum();
        self.tar.append(header, io::empty())
    }

    fn bytes(&mut self, path: &[u8], header: &mut Header, file: File<'_>) -> Result<(), Trouble> {
        let (stored, len) = (file.pieces(), file.image().len());
        let data: u64 = stored.iter().map(|(start, end)| end - start).sum();
        let mut map = Vec::new();
        if data < len {
            map = sparse_map(stored, len);
            for (name, value) in [
                ("major", b"1".to_vec()),
                ("minor", b"0".to_vec()),
                ("name", path.to_vec()),
                ("realsize", len.to_string().into_bytes()),
            ] {
                self.records.push((format!("GNU.sparse.{name}"), value));
            }
        }
        header.set_size(data + map.len() as u64);
        self.begin(header).map_err(Trouble::Write)?;
        let out = self.tar.get_mut();
        out.write_all(&map).map_err(Trouble::Write)?;
        file.each(|_, bytes| out.write_all(bytes))?;
        let padding = usize::try_from(data.next_multiple_of(BLOCK) - data).unwrap_or(0);
        out.write_all(&[0; BLOCK as usize][..padding]).map_err(Trouble::Write)
    }
}

/// Where the bytes of a file with holes are, as GNU tar's sparse format 1.0 says it; as long as whole blocks.
fn sparse_map(stored: &[(u64, u64)], len: u64) -> Vec<u8> {
    // An empty piece at the end says how long the file is.
    let pieces = stored.iter().map(|(start, end)| (*start, end - start)).chain([(len, 0)]);
    let mut text = format!("{}\n", stored.len() + 1);
    pieces.for_each(|(start, len)| text += &format!("{start}\n{len}\n"));
    let mut map = text.into_bytes();
    map.resize(map.len().next_multiple_of(BLOCK as usize), 0);
    map
}

/// Seconds with a fraction, as pax has them.
fn decimal(seconds: i64, nanoseconds: u32) -> Vec<u8> {
    match (seconds, nanoseconds) {
        (seconds, 0) => seconds.to_string(),
        (seconds @ 0.., nanoseconds) => format!("{seconds}.{nanoseconds:09}"),
        // One half before 1970 is -1 and a half.
        (seconds, nanoseconds) => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanoseconds),
    }
    .into_bytes()
}

impl<W: Write> Sink for Archive<W> {
    fn spare(&mut self, files: &[Identity]) {
        self.sources.extend(files);
    }

    fn file(&mut self, path: &[u8], meta: Meta, file: File<'_>) -> Result<(), Refusal> {
        self.records.clear();
        let mut header = self.header(path, &meta, EntryType::Regular);
        self.bytes(path, &mut header, file).map_err(|trouble| match trouble {
            // The archive says how long the entry is, so it cannot go on without its bytes.
            Trouble::Read(error) => Refusal::All(Failure::io(format!("cannot read {}", shown(path)), &error)),
            Trouble::Write(error) => Refusal::All(Failure::from(error)),
        })
    }

    fn take(&mut self, path: &[u8], meta: Meta, item: Item<'_>) -> Result<(), Refusal> {
        let written = |error: io::Error| Refusal::All(Failure::from(error));
        let kind = match (&item, meta.attributes.mode.unwrap_or(0) & 0xf000) {
            (Item::Directory, _) => EntryType::Directory,
            (Item::Symlink(_), _) => EntryType::Symlink,
            (Item::Hard(_), _) => EntryType::Link,
            (Item::Special, 0x2000) => EntryType::Char,
            (Item::Special, 0x6000) => EntryType::Block,
            (Item::Special, _) => EntryType::Fifo,
        };
        self.records.clear();
        let mut header = self.header(path, &meta, kind);
        match item {
            Item::Symlink(target) => self.text(&mut header.as_old_mut().linkname, &target, "linkpath"),
            Item::Hard(first) => self.text(&mut header.as_old_mut().linkname, first, "linkpath"),
            Item::Special if kind != EntryType::Fifo => {
                let (major, minor) = meta.attributes.device.unwrap_or((0, 0));
                header.set_device_major(major).map_err(written)?;
                header.set_device_minor(minor).map_err(written)?;
            }
            Item::Directory | Item::Special => {}
        }
        self.begin(&mut header).map_err(written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_fraction() {
        assert_eq!(decimal(5, 0), b"5");
        assert_eq!(decimal(5, 30), b"5.000000030");
        assert_eq!(decimal(-1, 500_000_000), b"-0.500000000");
        assert_eq!(decimal(-2, 250_000_000), b"-1.750000000");
    }
}
