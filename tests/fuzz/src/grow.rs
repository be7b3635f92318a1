//! Any bytes as a qcow2 that is written: a writable image must hold what was written, and everything else as
//! before.
//! It never accepts a difference: a wrong byte is a panic.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use becket_image::{Grow as _, Grower, Image, ReadAt, Storage, Wanted, unpack_alone, unpack_writable};

/// Bytes of a page of the file, and bytes of the disk that are looked at.
const PAGE: u64 = 512;
const SEEN: u64 = 256 << 10;

/// A file in memory that takes none for holes.
#[derive(Debug, Default)]
struct Sparse(Mutex<(u64, BTreeMap<u64, Vec<u8>>)>);

impl Sparse {
    fn pages<T>(&self, with: impl FnOnce(&mut (u64, BTreeMap<u64, Vec<u8>>)) -> T) -> T {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ReadAt for Sparse {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.pages(|(len, pages)| {
            if offset.checked_add(buf.len() as u64).is_none_or(|end| end > *len) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            for (at, byte) in (offset..).zip(buf) {
                *byte = pages.get(&(at / PAGE)).map_or(0, |page| page[(at % PAGE) as usize]);
            }
            Ok(())
        })
    }
}

impl Storage for Sparse {
    fn size(&self) -> io::Result<u64> {
        Ok(self.pages(|(len, _)| *len))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.pages(|(old, pages)| {
            pages.retain(|page, _| page * PAGE < len);
            if let Some(last) = pages.get_mut(&(len / PAGE)) {
                last[(len % PAGE) as usize..].fill(0);
            }
            *old = len;
        });
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.pages(|(len, pages)| {
            *len = (*len).max(offset + bytes.len() as u64);
            for (at, byte) in (offset..).zip(bytes) {
                let page = pages.entry(at / PAGE).or_insert_with(|| vec![0; PAGE as usize]);
                page[(at % PAGE) as usize] = *byte;
            }
        });
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

fn image(file: &Arc<Sparse>) -> Option<Image> {
    let len = file.size().ok()?;
    Some(Image::raw(Arc::clone(file) as Arc<dyn ReadAt>, len, 512))
}

/// The first bytes of a disk by sectors; nothing for those that cannot be read.
fn sectors(disk: &Image) -> Vec<Option<Vec<u8>>> {
    let end = disk.len().min(SEEN);
    (0..end).step_by(512).map(|at| disk.read_some(at, 512.min((end - at) as usize)).ok()).collect()
}

/// A qcow2 without a backing file, which is written where that is allowed.
pub(crate) fn qcow2_written(bytes: &[u8]) -> bool {
    let file = Arc::new(Sparse::default());
    let written = file.write_at(bytes, 0).ok().and_then(|()| write(&file));
    written.is_some()
}

/// Writes some clusters and looks at all; nothing where that cannot be done.
fn write(file: &Arc<Sparse>) -> Option<()> {
    let old = unpack_writable(&image(file)?).ok()??;
    let mut expected = sectors(&old);
    let mut grower = Grower::over(Arc::clone(file) as Arc<dyn Storage>, old.clone()).ok()?;
    let unit = grower.unit();
    let units = old.len().min(SEEN).div_ceil(unit);
    grower.placed(&mut |_, _| {}).ok()?;
    // Two that follow each other, and the last.
    let wanted = [0, 1, units / 2, units - 1].map(|unit| unit.min(units - 1));
    let wanted = wanted.map(|unit| Wanted { unit, zeroed: false });
    // A cluster that cannot be read cannot be copied, so it gets no place.
    let places = grower.place(&wanted);
    for (Wanted { unit: number, .. }, place) in wanted.iter().zip(places.iter().flatten()) {
        let len = unit.min(SEEN - number * unit).min(old.len() - number * unit);
        file.write_at(&vec![0xa5; len as usize], *place).ok()?;
        let first = (number * unit / 512) as usize;
        for sector in expected.iter_mut().skip(first).take(len.div_ceil(512) as usize) {
            *sector = sector.as_ref().map(|bytes| vec![0xa5; bytes.len()]).or_else(|| Some(vec![0xa5; 512]));
        }
    }
    let closed = grower.close();
    assert!(closed.is_ok(), "the image cannot be closed: {closed:?} after {places:?}");
    let now = unpack_alone(&image(file)?);
    assert!(matches!(now, Ok(Some(_))), "it is not an image any more: {now:?}");
    let disk = now.ok()??;
    for (number, (expected, now)) in expected.iter().zip(sectors(&disk)).enumerate() {
        assert!(expected.is_none() || *expected == now, "sector {number} is not what it was");
    }
    places.is_ok().then_some(())
}
