//! NTFS 3.1, the file system of Windows, and the versions before it that lie in the same way.
//! It never replays the log: what a crash has left there is not seen.
//!
//! Our own, because the crates that read NTFS bring a dozen others, and do not report where compressed bytes
//! are. A file is known by its reference: the number of its record, and how often that was used again.
//!
//! Followed: the documentation of the Linux-NTFS project, and ntfs-3g where it is laxer.

mod directory;
mod file;
mod link;
mod record;
mod runs;

use std::ops::ControlFlow;
use std::sync::Arc;

use file::{File, Volume};
use link::Meant;
use record::kind;

use super::attributes::{FoundXattrs, VALUE_MAX};
use super::{
    About, Attributes, Entry, FileSystem, LayerError, NodeKind, Stat, Time, Xattrs, corrupt, unsupported,
};
use crate::bytes::{part, u8_at, u16_at, u64_at, utf16_le};
use crate::image::{Image, Layout};

/// Records that have a number of their own.
const VOLUME: u64 = 3;
const ROOT: u64 = 5;

/// An open NTFS.
#[derive(Debug)]
struct Ntfs {
    about: About,
    volume: Volume,
}

/// Opens the file system in `image`, when there is one.
pub(super) fn open(image: &Image) -> Result<Option<Arc<dyn FileSystem>>, LayerError> {
    let boot = image.read_some(0, 512)?;
    if boot.len() < 512 || part(&boot, 3, 8) != b"NTFS    " {
        return Ok(None);
    }
    let sector = u64::from(u16_at(&boot, 11));
    let per_cluster = match u8_at(&boot, 13) {
        // Above 64 KiB it is the negative of a power of two.
        count @ 0xf4.. => 1 << (256 - u64::from(count)),
        count => count.into(),
    };
    let cluster = sector * per_cluster;
    // A length in clusters, or the negative of a power of two in bytes.
    let record = match u8_at(&boot, 64) {
        exponent @ 0xe1..=0xf7 => 1 << (256 - u64::from(exponent)),
        count => cluster * u64::from(count),
    };
    let powers = [sector, cluster, record].iter().all(|number| number.is_power_of_two());
    // Windows makes records of 1 or 4 KiB.
    let sizes = (256..=4096).contains(&sector) && cluster <= 2 << 20 && (512..=4096).contains(&record);
    if !powers || !sizes {
        return corrupt(format!(
            "NTFS with sectors of {sector} bytes, clusters of {cluster} and records of {record}"
        ));
    }
    let first = u64_at(&boot, 48).checked_mul(cluster);
    let first =
        first.ok_or_else(|| LayerError::Corrupt("the records of NTFS are behind all bytes".to_owned()))?;
    let volume = Volume::open(image, cluster, usize::try_from(record).unwrap_or(0), first)?;
    let mut about = About {
        format: "ntfs",
        uuid: Some(format!("{:016X}", u64_at(&boot, 72))),
        notes: vec![format!("clusters of {cluster}")],
        ..About::default()
    };
    let file = volume.file(VOLUME)?;
    let label = file.value(&volume, kind::VOLUME_NAME, 512)?.map(|text| utf16_le(&text));
    about.label = label.filter(|label| !label.is_empty());
    let state = file.value(&volume, kind::VOLUME_INFORMATION, 512)?.unwrap_or_default();
    match (u8_at(&state, 8), u8_at(&state, 9)) {
        (1, 2) | (3, _) => about.notes.push(format!("version {}.{}", u8_at(&state, 8), u8_at(&state, 9))),
        (major, minor) => return unsupported(format!("NTFS {major}.{minor}")),
    }
    if u16_at(&state, 10) & 1 != 0 {
        about.notes.push("the NTFS is mounted or was not unmounted".to_owned());
    }
    Ok(Some(Arc::new(Ntfs { about, volume })))
}

/// What a file is, and how many bytes it has.
fn stat_of(file: &File, meant: &Meant) -> Result<Stat, LayerError> {
    let kind = match meant.kind() {
        Some(kind) => kind,
        None if file.is_directory() => NodeKind::Directory,
        None => NodeKind::File,
    };
    let size = match kind {
        NodeKind::Symlink => meant.target()?.len() as u64,
        NodeKind::File => file.stream(kind::DATA, &[])?.map_or(0, |stream| stream.size()),
        NodeKind::Directory | NodeKind::Other => 0,
    };
    Ok(Stat { kind, size })
}

impl Ntfs {
    /// A file, and what it stands for.
    fn file(&self, node: u64) -> Result<(File, Meant), LayerError> {
        let file = self.volume.file(node)?;
        let meant = link::meant(&self.volume, &file)?;
        Ok((file, meant))
    }
}

impl FileSystem for Ntfs {
    fn about(&self) -> &About {
        &self.about
    }

    fn root(&self) -> u64 {
        ROOT
    }

    fn stat(&self, node: u64) -> Result<Stat, LayerError> {
        let (file, meant) = self.file(node)?;
        stat_of(&file, &meant)
    }

    fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
        let (file, meant) = self.file(node)?;
        let Stat { kind, size } = stat_of(&file, &meant)?;
        let links = file.names();
        let standard = file.standard(&self.volume)?;
        Ok(Attributes {
            links: Some(links),
            identity: (links > 1 && kind != NodeKind::Directory).then_some(node & record::NUMBER),
            modified: Some(time(u64_at(&standard, 8))),
            device: meant.device(),
            ..Attributes::of(kind, size)
        })
    }

    /// Further streams of bytes that a file has, as ntfs-3g shows them.
    fn xattrs(&self, node: u64) -> Result<Xattrs, LayerError> {
        let file = self.volume.file(node)?;
        let mut found = FoundXattrs::default();
        for name in file.stream_names() {
            let Some(stream) = file.stream(kind::DATA, name)? else { continue };
            found.push(b"user.", utf16_le(name).as_bytes(), stream.read(&self.volume, VALUE_MAX)?)?;
        }
        Ok(found.all())
    }

    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
        let hidden = dir & record::NUMBER == ROOT;
        let file = self.volume.file(dir)?;
        if !file.is_directory() {
            return corrupt("this is not a directory");
        }
        directory::list(&self.volume, &file, &mut |name, node| {
            // The file system's own files; the root directory is one of its own entries.
            if hidden && node & record::NUMBER < 16 {
                return ControlFlow::Continue(());
            }
            entry(name, node)
        })
    }

    fn same_name(&self, one: &[u8], other: &[u8]) -> bool {
        super::same_but_for_case(one, other)
    }

    fn read_link(&self, node: u64) -> Result<Vec<u8>, LayerError> {
        self.file(node)?.1.target()
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        let (file, meant) = self.file(node)?;
        if stat_of(&file, &meant)?.kind != NodeKind::File {
            return corrupt("this is not a regular file");
        }
        meant.is_read()?;
        match file.stream(kind::DATA, &[])? {
            Some(stream) => stream.lay_out(&self.volume),
            None => Layout::of(&self.volume.image),
        }
    }

    fn writable(&self, _: u64) -> Result<(), String> {
        Err("becket only reads files in NTFS".to_owned())
    }
}

/// A moment, counted in 100 nanoseconds from the start of 1601.
fn time(ticks: u64) -> Time {
    const SECOND: u64 = 10_000_000;
    let seconds = i64::try_from(ticks / SECOND).unwrap_or(0) - 11_644_473_600;
    Time { seconds, nanoseconds: u32::try_from(ticks % SECOND).unwrap_or(0) * 100 }
}
