//! System use fields: how Rock Ridge says names, modes and links.
//! It never follows more continuations than a record can sensibly have.

use crate::bytes::{part, u8_at, u32_at};
use crate::image::Image;
use crate::layer::{LINK_MAX, LayerError, NAME_MAX, corrupt};

/// Continuation areas of one record. mkisofs makes one or two.
const CONTINUATIONS_MAX: usize = 32;

/// What the system use fields of one record say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SystemUse {
    /// The name; empty when they say none.
    pub(super) name: Vec<u8>,
    /// Mode bits.
    pub(super) mode: Option<u16>,
    /// Target of a symbolic link.
    pub(super) link: Option<Vec<u8>>,
    /// The block of a directory that was moved elsewhere.
    pub(super) child: Option<u32>,
    /// Whether this directory was moved here from elsewhere.
    pub(super) relocated: bool,
    /// Whether the file is compressed with zisofs.
    pub(super) compressed: bool,
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
                b"PX" => found.mode = Some(u32_at(field, 4) as u16),
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
