//! What can go wrong when an image is opened, said so that a person knows what to do.
//! It never loses the errno: the source is kept beside the sentence.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::backing_url::WantedUrl;
use crate::layer::Foreign;
use crate::source::link::{DialError, Refused};
pub use crate::text::quoted;
use crate::text::shown;
use crate::{Format, LayerError};

/// The class of an [`Error`], for callers that decide by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The path leads nowhere.
    NotFound,
    /// This user may not open it.
    Permission,
    /// There is something, but not something that has bytes to attach.
    NotAnImage,
    /// An option that does not fit this image, or fits none.
    InvalidOption,
    /// Another process has it open in a way that excludes this one.
    InUse,
    /// This system cannot do what was asked for.
    Unsupported,
    /// The system failed.
    Io,
}

/// Why an image was not opened. `Display` says what and why; [`Error::hint`] says what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A component of the path does not exist.
    #[error("{}: not found: {} has no entry {missing:?}", path.display(), deepest.display())]
    NotFound {
        /// As it was given.
        path: PathBuf,
        /// The deepest directory on the way that exists.
        deepest: PathBuf,
        /// The first component that does not.
        missing: String,
    },
    /// A symbolic link on the way points to nothing.
    #[error("{}: {} is a symbolic link to {}, which does not exist", path.display(), link.display(), target.display())]
    DanglingLink {
        /// As it was given.
        path: PathBuf,
        /// The link.
        link: PathBuf,
        /// What it says.
        target: PathBuf,
    },
    /// Symbolic links lead in a circle (or through more than the kernel follows).
    #[error("{}: its symbolic links lead in a circle", path.display())]
    LinkLoop {
        /// As it was given.
        path: PathBuf,
    },
    /// A component in the middle of the path is not a directory.
    #[error("{}: {} is not a directory", path.display(), component.display())]
    NotADirectory {
        /// As it was given.
        path: PathBuf,
        /// The component.
        component: PathBuf,
    },
    /// A name on the way through an image is not in it.
    #[error("{image}: the {format} in it has no entry \"{missing}\"{}", there(entries))]
    Missing {
        /// The path up to the image that was searched.
        image: String,
        /// What that image is.
        format: &'static str,
        /// The path inside it, up to what is not there.
        missing: String,
        /// Some of the names beside it.
        entries: Vec<String>,
    },
    /// A symbolic link on the way through an image leads to nothing that is in it.
    #[error(
        "{image}: the symbolic link \"{link}\" in its {format} leads to \"{target}\", which is not in it"
    )]
    DanglingInside {
        /// The path up to the image that was searched.
        image: String,
        /// What that image is.
        format: &'static str,
        /// The path inside it, up to the link.
        link: String,
        /// What the link, or the last one that it leads to, contains.
        target: String,
    },
    /// A path names a snapshot that cannot be had.
    #[error("{}: snapshot \"{name}\": {why}", path.display())]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// What follows the `@`.
        name: String,
        /// Why.
        why: String,
    },
    /// A path names a partition by what two of them have.
    #[error("{image}: {name} is partition {} and partition {}", partitions[0], partitions[1])]
    Ambiguous {
        /// The path up to the partition table.
        image: String,
        /// As `by-label/root`.
        name: String,
        /// The numbers of the two.
        partitions: [u32; 2],
    },
    /// A path goes on inside something that nothing is known to be in.
    #[error("{image}: nothing can be looked up in it: {why}")]
    NoContainer {
        /// The path up to it.
        image: String,
        /// Why.
        why: String,
        /// What opens it once it is attached as `DEVICE`.
        opens: Option<&'static str>,
    },
    /// An image on the way is damaged, or is something that becket does not know.
    #[error("{image}: {source}")]
    Layer {
        /// The path up to the image.
        image: String,
        /// What is wrong with it.
        source: LayerError,
    },
    /// A file that an image names is not there, or is not one that may be opened.
    #[error("{}: its {what} {name}: {why}", shown(image.as_os_str().as_bytes()))]
    Backing {
        /// The image that names it.
        image: PathBuf,
        /// What it is to the image: `backing file`.
        what: &'static str,
        /// Its name there, safe to show.
        name: String,
        /// What is wrong with it.
        why: String,
        /// The next step, where it is not always the same.
        hint: Option<String>,
        /// It is not there.
        missing: bool,
    },
    /// An image names a URL below itself that the user has not allowed.
    #[error("{}: its backing file {name}: an image opens no URL that you have not allowed", shown(image.as_os_str().as_bytes()))]
    BackingUrl {
        /// The image that names it.
        image: PathBuf,
        /// Its name there, safe to show.
        name: String,
        /// What would have to be opened.
        wanted: WantedUrl,
        /// The command that opens it without that.
        instead: String,
    },
    /// An image refers to another file, and neither the caller nor its name confirms such a format.
    #[error("{}: it begins like a {format} that refers to other files ({name}), and is not named *.{format}", shown(path.as_os_str().as_bytes()))]
    Reference {
        /// As it was given.
        path: PathBuf,
        /// What it begins like.
        format: Format,
        /// What it refers to, safe to show.
        name: String,
    },
    /// The file that is to take what is written is something else.
    #[error("{}: is not an overlay of {}: {why}", shown(path.as_os_str().as_bytes()), shown(image.as_os_str().as_bytes()))]
    Overlay {
        /// As it was given.
        path: PathBuf,
        /// The image that it should lie over.
        image: PathBuf,
        /// What it is instead.
        why: String,
        /// The next step, where it is not always the same.
        hint: Option<String>,
    },
    /// The file cannot be read by this user.
    #[error("{}: cannot be opened: {source}", path.display())]
    Permission {
        /// As it was given.
        path: PathBuf,
        /// The errno.
        source: io::Error,
    },
    /// The server of an image cannot be reached, or does not let it be had.
    #[error("{}: {source}", path.display())]
    Link {
        /// The URI as it was given.
        path: PathBuf,
        /// Why.
        source: DialError,
    },
    /// A directory, FIFO, socket or character device.
    #[error("{}: it is {what}, not an image", path.display())]
    NotAnImage {
        /// As it was given.
        path: PathBuf,
        /// What it is, with its article.
        what: &'static str,
    },
    /// The file or device has no bytes.
    #[error("{}: it is empty", path.display())]
    Empty {
        /// As it was given.
        path: PathBuf,
    },
    /// The offset leaves less than one block.
    #[error("{}: {}", path.display(), left(*size, *offset))]
    NothingLeft {
        /// As it was given.
        path: PathBuf,
        /// Size of the backing in bytes.
        size: u64,
        /// The offset in bytes.
        offset: u64,
        /// The logical block size in bytes.
        block_size: u32,
    },
    /// The size limit is smaller than one block.
    #[error("a size limit of {limit} bytes is less than one block of {block_size}")]
    SizeLimit {
        /// The limit in bytes.
        limit: u64,
        /// The logical block size in bytes.
        block_size: u32,
    },
    /// A block size that no device can have.
    #[error(
        "a block size of {block_size} bytes is impossible: it must be a power of two from 512 to {largest}"
    )]
    BlockSize {
        /// What was asked for, in bytes.
        block_size: u32,
        /// The page size.
        largest: u32,
    },
    /// A server's blocks are larger than those of the device, or of what the image consists of.
    #[error(
        "{}: the server takes requests in multiples of {smallest} bytes only, and {unfit}",
        shown(path.as_os_str().as_bytes())
    )]
    LargeBlocks {
        /// Its URI.
        path: PathBuf,
        /// The server's smallest block in bytes.
        smallest: u32,
        /// What is in other units, for people.
        unfit: String,
    },
    /// Another program holds a lock that excludes this use.
    #[error("{}: in use by another program: {clash}", path.display())]
    InUse {
        /// As it was given.
        path: PathBuf,
        /// Which permission clashes, for people.
        clash: String,
        /// Only readers have it: one more would be let in.
        readers: bool,
    },
    /// The kernel itself uses the bytes, without any lock: a loop device or swap space.
    #[error("{}: in use: {user}", path.display())]
    UsedByKernel {
        /// As it was given.
        path: PathBuf,
        /// What uses it, and where that is mounted.
        user: String,
        /// The command that ends the use.
        end: String,
    },
    /// The kernel itself uses the block device.
    #[error("{}: in use: it, or a partition of it, is mounted, swapped to or part of another device", path.display())]
    Claimed {
        /// As it was given.
        path: PathBuf,
    },
    /// Direct I/O was insisted on.
    #[error("{}: direct I/O is impossible: {reason}", path.display())]
    DirectIo {
        /// As it was given.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The system failed.
    #[error("{}: {what}: {source}", path.display())]
    Io {
        /// As it was given.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The errno.
        source: io::Error,
    },
}

/// What an [`Error::Missing`] calls a partition table.
pub(crate) const PARTITIONS: &str = "partition table";

impl Error {
    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::NotFound { .. }
            | Error::DanglingLink { .. }
            | Error::LinkLoop { .. }
            | Error::NotADirectory { .. }
            | Error::Backing { missing: true, .. }
            | Error::Snapshot { .. }
            | Error::DanglingInside { .. }
            | Error::Missing { .. } => ErrorKind::NotFound,
            Error::Backing { .. } | Error::BackingUrl { .. } | Error::Reference { .. } => {
                ErrorKind::Unsupported
            }
            Error::Permission { .. } => ErrorKind::Permission,
            Error::NotAnImage { .. }
            | Error::Empty { .. }
            | Error::Ambiguous { .. }
            | Error::NoContainer { .. } => ErrorKind::NotAnImage,
            Error::Layer { source, .. } => match source {
                LayerError::Corrupt(_) | LayerError::IsNot(_) => ErrorKind::NotAnImage,
                LayerError::Unsupported(_)
                | LayerError::Limit(_)
                | LayerError::Spent(_)
                | LayerError::Sequential { .. }
                | LayerError::Foreign { .. } => ErrorKind::Unsupported,
                LayerError::Io(_) => ErrorKind::Io,
            },
            Error::Overlay { .. }
            | Error::NothingLeft { .. }
            | Error::SizeLimit { .. }
            | Error::BlockSize { .. } => ErrorKind::InvalidOption,
            Error::InUse { .. } | Error::UsedByKernel { .. } | Error::Claimed { .. } => ErrorKind::InUse,
            Error::DirectIo { .. } | Error::LargeBlocks { .. } => ErrorKind::Unsupported,
            Error::Link { source: DialError::Refused(Refused::Unknown { .. }), .. } => ErrorKind::NotFound,
            Error::Link { source: DialError::Refused(_), .. } => ErrorKind::Unsupported,
            Error::Link { source: DialError::Tls { .. }, .. } => ErrorKind::Permission,
            Error::Link { source: DialError::Helper { errno, .. }, .. } => match *errno {
                libc::ENOENT => ErrorKind::NotFound,
                libc::EBUSY => ErrorKind::InUse,
                libc::EPERM | libc::EACCES | libc::EROFS => ErrorKind::Permission,
                libc::ENOSYS | libc::ENOTSUP => ErrorKind::Unsupported,
                libc::EINVAL => ErrorKind::InvalidOption,
                _ => ErrorKind::Io,
            },
            Error::Link { source: DialError::Io(error) | DialError::Certificates(error), .. } => match error
                .kind()
            {
                io::ErrorKind::InvalidInput => ErrorKind::InvalidOption,
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => ErrorKind::Permission,
                io::ErrorKind::Unsupported => ErrorKind::Unsupported,
                _ => ErrorKind::Io,
            },
            Error::Io { .. } => ErrorKind::Io,
        }
    }

    /// What to do next, where there is something to say.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            // As in a URL.
            Error::NotFound { path, missing, .. } if missing.contains('#') => {
                let inside = path.to_string_lossy().replacen('#', "/", 1);
                let inside = quoted(Path::new(&inside));
                return Some(format!("of a file of this host a path inside the image follows /: {inside}"));
            }
            Error::NotFound { deepest, missing, .. } => {
                return Some(format!("see what is there instead of {missing:?}: ls {}", quoted(deepest)));
            }
            Error::DanglingLink { link, .. } => {
                return Some(format!("correct or remove the link: ls -l {}", quoted(link)));
            }
            Error::LinkLoop { path } => return Some(format!("follow the links: namei -l {}", quoted(path))),
            Error::Snapshot { path, .. } => {
                let path = quoted(path);
                return Some(format!(
                    "see which there are: becket inspect {path}; copy one: becket copy {path}@NAME OUT"
                ));
            }
            Error::NotADirectory { .. } => "a path can go on inside a regular file or a block device only",
            Error::Missing { image, format, missing, .. } => {
                // `by-label/x` is a name of a partition, and no directory.
                let place = if *format == PARTITIONS { PathBuf::from(image) } else { beside(image, missing) };
                let place = quoted(&place);
                return Some(format!("see what is there instead of \"{missing}\": becket ls {place}"));
            }
            Error::DanglingInside { image, link, .. } => {
                let dir = quoted(&beside(image, link));
                return Some(format!("see where the links lead: becket ls -l {dir}"));
            }
            Error::Backing { hint: Some(hint), .. } => return Some(hint.clone()),
            Error::Backing { image, .. } => {
                let image = quoted(image);
                return Some(format!(
                    "see what it is: qemu-img info {image}; name another: qemu-img rebase -u -F FORMAT -b FILE {image}"
                ));
            }
            Error::BackingUrl { wanted, instead, .. } => {
                let url = quoted(Path::new(&shown(wanted.url.as_os_str().as_bytes())));
                return Some(format!("if you trust that server: --backing-url {url}; or {instead}"));
            }
            Error::Reference { path, format, .. } => {
                let path = quoted(path);
                return Some(format!(
                    "if you trust it: becket attach --format {format} {path}; if it is a raw disk: \
                     becket attach --format raw {path} (--format disk for a path that goes on in it)"
                ));
            }
            Error::Overlay { hint: Some(hint), .. } => return Some(hint.clone()),
            Error::Overlay { .. } => {
                "name a file that does not exist, and becket creates the overlay; existing files are never replaced"
            }
            Error::Ambiguous { partitions: [one, other], .. } => {
                return Some(format!("name it by its number: p{one} or p{other}"));
            }
            Error::NoContainer { opens: Some(command), .. } => {
                return Some(format!("attach it with becket, then: {command}"));
            }
            Error::NoContainer { .. } => {
                let known: Vec<&str> = Format::names().filter_map(|names| names.first().copied()).collect();
                let known = known.join(", ").replace("auto, raw, ", "");
                return Some(format!("a path goes on in an image of one of these formats: {known}"));
            }
            Error::Layer { source: LayerError::Corrupt(_), .. } => {
                "check the image with its own tools; --format raw attaches its bytes as they are"
            }
            Error::Layer { source: LayerError::IsNot(_), .. } => {
                "without --format, becket finds out what it is: becket inspect FILE shows it"
            }
            Error::Layer { image, source: LayerError::Foreign { format, .. } } => {
                return Some(converting(format, image));
            }
            Error::Layer { image, source: LayerError::Sequential { packer, .. } } => {
                return Some(unpacking(packer, image));
            }
            Error::Layer { source: LayerError::Spent(_), .. } => NO_LIMITS,
            Error::Layer { .. } => return None,
            Error::Permission { path, .. } => {
                return Some(format!("see who may open it: ls -l {}; or run becket as root", quoted(path)));
            }
            Error::NotAnImage { .. } => "use a regular file or a block device",
            Error::Empty { .. } => "give it a size first, for example: truncate --size 1G FILE",
            Error::NothingLeft { offset: 0, block_size, .. } => {
                return Some(format!("an image needs at least one block of {block_size} bytes"));
            }
            Error::NothingLeft { .. } => "use a smaller --offset",
            Error::SizeLimit { .. } => "use a larger --size-limit",
            Error::BlockSize { .. } => "use --block-size 512 or 4096",
            Error::InUse { readers: true, .. } => {
                "end that use; or attach with --read-only, or with --shared if both users coordinate their writes"
            }
            Error::InUse { .. } => {
                "end that use (devices are in `becket list`); or attach with --shared if both users coordinate \
                 their writes"
            }
            Error::UsedByKernel { end, .. } => {
                return Some(format!(
                    "end that use: {end}; or attach with --shared if both users coordinate their writes"
                ));
            }
            Error::Claimed { path } => {
                let path = quoted(path);
                return Some(format!(
                    "see what uses it: lsblk {path}; findmnt {path}; or attach with --read-only"
                ));
            }
            Error::DirectIo { .. } => "use --direct-io auto",
            Error::LargeBlocks { path, .. } => {
                return Some(format!(
                    "copy it to a file, and attach that: becket copy {} FILE",
                    quoted(path)
                ));
            }
            Error::Link { path, source } => return source.hint(path),
            Error::Io { .. } => return None,
        };
        Some(hint.to_owned())
    }
}

/// What lifts the limits of [`crate::Budget`].
pub(crate) const NO_LIMITS: &str =
    "an image can be made to waste time and memory; if you trust this one, try again with --no-limits";

/// That a file is too small, for people.
fn left(size: u64, offset: u64) -> String {
    match offset {
        0 => format!("it has {size} bytes, less than one block"),
        _ => format!("less than one block is left behind byte {offset}: it has {size} bytes"),
    }
}

/// How a container that becket does not read becomes a raw image.
fn converting(format: &Foreign, image: &str) -> String {
    let (first, path) = outside(image);
    let command = conversion(format.command, path);
    format!("{first}convert it: {command}; --format raw attaches its bytes as they are")
}

/// The command that makes a raw image of the file at `path`, or unpacks it; see [`Foreign`].
fn conversion(command: &str, path: &Path) -> String {
    let out = || quoted(&new_name(path));
    // Word by word: the path may have OUT in it.
    let words = command.split(' ').map(|word| match word {
        "IN" => quoted(path),
        "<IN" => format!("<{}", quoted(path)),
        "OUT" => out(),
        ">OUT" => format!(">{}", out()),
        word => word.to_owned(),
    });
    let line = words.collect::<Vec<_>>().join(" ");
    if command.contains("OUT") { line } else { format!("{line}; then attach what was in it") }
}

/// What another program has to do before it can open an image, and the path of that then.
fn outside(image: &str) -> (&'static str, &Path) {
    let path = Path::new(image);
    // A path that goes on inside an image is none for other programs.
    if path.exists() { ("", path) } else { ("copy it out of its image first; ", Path::new("FILE")) }
}

/// A name for the raw image made from the file at `path`: the name without its last suffix, and not that of
/// an existing file.
fn new_name(path: &Path) -> PathBuf {
    let without = path.with_extension("");
    let mut name = if without.extension().is_some() { without } else { path.with_extension("raw") };
    while name.exists() || name == path {
        name.as_mut_os_string().push(".raw");
    }
    name
}

/// How an image becomes one that can be read anywhere.
fn unpacking(packer: &str, image: &str) -> String {
    let (first, path) = outside(image);
    let unpacked = new_name(path);
    let mut pieces = unpacked.clone().into_os_string();
    pieces.push(".blocks.xz");
    let (packed, unpacked, pieces) = (quoted(path), quoted(&unpacked), quoted(Path::new(&pieces)));
    format!(
        "{first}unpack it: {packer} -dc {packed} >{unpacked}; or compress it in pieces: \
         {packer} -dc {packed} | xz -T0 --block-size=1MiB >{pieces}; --format raw attaches its bytes as they are"
    )
}

/// Some of the names that are there, for a sentence.
fn there(entries: &[String]) -> String {
    match entries {
        [] => "; it is empty".to_owned(),
        names => format!("; there is: {}", names.join(", ")),
    }
}

/// The directory, in this image, of what has this path inside it.
fn beside(image: &str, inside: &str) -> PathBuf {
    inside.rsplit_once('/').map_or_else(|| PathBuf::from(image), |(dir, _)| Path::new(image).join(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_overwrites_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("my OUT IN.img.bz2");
        let here = dir.path().display();
        assert_eq!(
            conversion("bzip2 -dc IN >OUT", &path),
            format!("bzip2 -dc '{here}/my OUT IN.img.bz2' >'{here}/my OUT IN.img'")
        );
        std::fs::write(dir.path().join("my OUT IN.img"), "").unwrap();
        assert_eq!(
            conversion("bzip2 -dc IN >OUT", &path),
            format!("bzip2 -dc '{here}/my OUT IN.img.bz2' >'{here}/my OUT IN.img.raw'")
        );
        assert_eq!(
            conversion("qemu-img convert -f vdi -O raw IN OUT", &dir.path().join("v.vdi")),
            format!("qemu-img convert -f vdi -O raw {here}/v.vdi {here}/v.raw")
        );
        assert_eq!(conversion("unzip IN", Path::new("/a.zip")), "unzip /a.zip; then attach what was in it");
    }
}
