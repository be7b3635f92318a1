//! System use fields: how Rock Ridge says names, modes and links.
//! It never follows more continuations than a record can sensibly have.

use crate::bytes::{part, u8_at, u32_at};
use crate::image::Image;
use crate::layer::{LINK_MAX, LayerError, NAME_MAX, Time, corrupt};

/// Continuation areas of one record. mkisofs makes one or two.
const CONTINUATIONS_MAX: usize = 32;

/// What the system use fields of one record say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SystemUse {
    /// The name; empty when they say none.
    pub(super) name: Vec<u8>,
    /// Mode bits, links, user, group, and a number that all names of the file share (0 for none).
    pub(super) posix: Option<Posix>,
    /// Major and minor number of a device.
    pub(super) device: Option<(u32, u32)>,
    /// When it was changed last.
    pub(super) modified: Option<Time>,
    /// Target of a symbolic link.
    pub(super) link: Option<Vec<u8>>,
    /// The block of a directory that was moved elsewhere.
    pub(super) child: Option<u32>,
    /// Whether this directory was moved here from elsewhere.
    pub(super) relocated: bool,
    /// Whether the file is compressed with zisofs.
    pub(super) compressed: bool,
}

/// What the field PX says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Posix {
    pub(super) mode: u16,
    pub(super) links: u32,
    pub(super) owner: (u32, u32),
    pub(super) serial: u32,
}

/// Whether Rock Ridge is used, according to the root directory's own first record; and how many bytes of each
/// record's system use area must be skipped.
pub(super) fn rock_ridge(root: &[u8]) -> Option<usize> {
    let record = part(root, 0, u8_at(root, 0).into());
    // Its name is one byte long. CD-ROM XA puts 14 bytes of its own in front.
    let fields = record.get(34..)?;
    let begins = |from: usize| {
        let field = part(fields, from, 7);
        (part(field, 0, 2) == b"SP" && part(field, 4, 2) == b"\xbe\xef").then(|| u8_at(field, 6).into())
    };
    begins(0).or_else(|| begins(14))
}

/// Reads the fields in `area`, and where they go on.
pub(super) fn read(area: &[u8], image: &Image, block: u64) -> Result<SystemUse, LayerError> {
    let mut found = SystemUse::default();
    let mut link = Link::default();
    let mut area = area.to_vec();
    for _ in 0..CONTINUATIONS_MAX {
        let mut more = None;
        let mut rest = area.as_slice();
        // Fields end with the area, with padding, or with ST.
        while rest.len() >= 4 {
            let len = usize::from(u8_at(rest, 2));
            if len < 4 || len > rest.len() {
                break;
            }
            let (field, next) = rest.split_at(len);
            rest = next;
            match part(field, 0, 2) {
                b"NM" if u8_at(field, 4) & 0x6 == 0 => {
                    found.name.extend_from_slice(part(field, 5, len));
                    if found.name.len() > NAME_MAX {
                        return corrupt(format!("a name of {} bytes or more", found.name.len()));
                    }
                }
                b"PX" => {
                    let number = |at| u32_at(field, at);
                    found.posix = Some(Posix {
                        mode: number(4) as u16,
                        links: number(12),
                        owner: (number(20), number(28)),
                        // Fields of version 1.10 end before it.
                        serial: number(36),
                    });
                }
                b"PN" => found.device = Some(device(u32_at(field, 4), u32_at(field, 12))),
                b"TF" => found.modified = modified(field),
                b"SL" => link.add(field),
                b"CL" => found.child = Some(u32_at(field, 4)),
                b"RE" => found.relocated = true,
                b"ZF" => found.compressed = true,
                b"CE" => more = Some((u32_at(field, 4), u32_at(field, 12), u32_at(field, 20))),
                b"ST" => break,
                _ => {}
            }
        }
        let Some((number, offset, len)) = more else {
            found.link = link.target();
            return Ok(found);
        };
        // A continuation lies in one block.
        let len = usize::try_from(u64::from(len).min(block)).unwrap_or(0);
        area = image.read_vec(u64::from(number) * block + u64::from(offset), len)?;
    }
    corrupt("the system use fields of a directory record go on without end")
}

/// A device's numbers: in a field each, or both in the second as an older system packed them.
fn device(high: u32, low: u32) -> (u32, u32) {
    if high == 0 && low > 0xff { (low >> 8, low & 0xff) } else { (high, low) }
}

/// The time of the last change in a field of times.
fn modified(field: &[u8]) -> Option<Time> {
    const CREATED: u8 = 1;
    const MODIFIED: u8 = 2;
    const LONG: u8 = 0x80;
    let flags = u8_at(field, 4);
    let len = if flags & LONG == 0 { 7 } else { 17 };
    let stamp = part(field, 5 + if flags & CREATED == 0 { 0 } else { len }, len);
    if flags & MODIFIED == 0 || stamp.len() < len {
        return None;
    }
    if flags & LONG == 0 { short_time(stamp) } else { long_time(stamp) }
}

/// A time in seven bytes, the last of which is the zone in quarters of an hour.
pub(super) fn short_time(stamp: &[u8]) -> Option<Time> {
    let number = |at| u32::from(u8_at(stamp, at));
    let date = (1900 + i64::from(number(0)), number(1), number(2));
    in_zone(Time::of_date(date, (number(3), number(4), number(5)))?, u8_at(stamp, 6))
}

/// A time in sixteen digits, the last two of which are hundredths of a second, and the zone.
fn long_time(stamp: &[u8]) -> Option<Time> {
    let number = |at, len| std::str::from_utf8(part(stamp, at, len)).ok()?.parse::<u32>().ok();
    let date = (i64::from(number(0, 4)?), number(4, 2)?, number(6, 2)?);
    let time = Time::of_date(date, (number(8, 2)?, number(10, 2)?, number(12, 2)?))?;
    in_zone(Time { nanoseconds: number(14, 2)? * 10_000_000, ..time }, u8_at(stamp, 16))
}

/// A zone that cannot be is none, as for the kernel: genisoimage writes such ones.
fn in_zone(time: Time, zone: u8) -> Option<Time> {
    let zone = Some(i64::from(zone.cast_signed())).filter(|zone| (-52..=52).contains(zone));
    Some(Time { seconds: time.seconds - zone.unwrap_or(0) * 900, ..time })
}

/// A symbolic link as it is put together of its components.
#[derive(Debug, Default)]
struct Link {
    target: Vec<u8>,
    seen: bool,
    /// The last component goes on in the next one.
    open: bool,
}

impl Link {
    fn add(&mut self, field: &[u8]) {
        self.seen = true;
        let mut rest = field.get(5..).unwrap_or_default();
        while rest.len() >= 2 && (self.target.len() as u64) <= LINK_MAX {
            let (flags, len) = (u8_at(rest, 0), usize::from(u8_at(rest, 1)));
            let text = part(rest, 2, len);
            let slash = !self.target.is_empty() && !self.open && self.target != b"/";
            if slash {
                self.target.push(b'/');
            }
            match flags & 0xe {
                2 => self.target.push(b'.'),
                4 => self.target.extend_from_slice(b".."),
                8 => self.target = b"/".to_vec(),
                _ => self.target.extend_from_slice(text),
            }
            self.open = flags & 1 != 0;
            rest = rest.get(2 + len..).unwrap_or_default();
        }
    }

    fn target(self) -> Option<Vec<u8>> {
        self.seen.then_some(self.target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(fields: &[&[u8]]) -> String {
        let mut link = Link::default();
        for components in fields {
            let mut field = b"SL\0\x01\0".to_vec();
            field.extend_from_slice(components);
            link.add(&field);
        }
        String::from_utf8(link.target().unwrap()).unwrap()
    }

    #[test]
    fn a_name_is_no_longer_than_the_kernel_takes() {
        let image = Image::raw(std::sync::Arc::new(vec![0; 2048]), 2048, 2048);
        let field = |len: u8| [&b"NM"[..], &[5 + len, 1, 1], &vec![b'x'; len.into()]].concat();
        let name = |lens: &[u8]| {
            let area: Vec<u8> = lens.iter().flat_map(|len| field(*len)).collect();
            read(&area, &image, 2048).map(|found| found.name.len())
        };
        assert_eq!(name(&[200, 55]).unwrap(), 255);
        assert!(name(&[200, 56]).unwrap_err().to_string().contains("a name of 256 bytes"));
        assert!(name(&[250; 100]).is_err());
    }

    #[test]
    fn links_are_put_together() {
        assert_eq!(link(&[b"\0\x01a\0\x02bc"]), "a/bc");
        assert_eq!(link(&[b"\x08\0\0\x01a"]), "/a");
        assert_eq!(link(&[b"\x04\0\x02\0\0\x01x"]), ".././x");
        assert_eq!(link(&[b"\x01\x01a", b"\0\x01b"]), "ab", "a component goes on in the next field");
        assert_eq!(link(&[b"\0\x01a", b"\0\x01b"]), "a/b");
    }
}
