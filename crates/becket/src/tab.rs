//! A table of devices and exports, /etc/beckettab: `NAME IMAGE [OPTIONS]`, one a line, which the machine
//! attaches when it starts. A line with the option `nbd=ADDRESS` or `vhost-user=ADDRESS` is an export.
//! A wrong line affects only itself: the others are read all the same.

use crate::args::{AttachLine, DeviceOptions, Export, ExportLine, LineParser};
use std::{
    collections::HashMap,
    ffi::OsString,
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

/// Where the machine's table is.
pub(crate) const TABLE: &str = "/etc/beckettab";
/// Longest table, in bytes: some ten thousand lines.
const LONGEST: u64 = 1 << 20;

/// A line of the table.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) line: usize,
    pub(crate) name: String,
    /// Absolute, or the name of an image on a server.
    pub(crate) image: PathBuf,
    pub(crate) device: DeviceOptions,
    /// Set if the image is not to be a block device.
    pub(crate) export: Option<Box<Export>>,
    pub(crate) start: Start,
}

/// When the machine attaches it, and what hangs on that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Start {
    /// Only when something asks for it.
    pub(crate) noauto: bool,
    /// The machine's start neither waits for it nor fails with it.
    pub(crate) nofail: bool,
    /// The image is on the network.
    pub(crate) netdev: bool,
}

/// A line that makes no sense.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) line: usize,
    /// Its first word, where it has words.
    pub(crate) name: Option<String>,
    pub(crate) why: String,
}

/// The text of a table.
pub(crate) fn text(table: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(table)?.take(LONGEST + 1).read_to_end(&mut text)?;
    if text.len() as u64 > LONGEST {
        return Err(io::Error::other(format!("longer than {LONGEST} bytes")));
    }
    Ok(text)
}

/// The entries of a table, without comments and empty lines. `given` are options for each line that does not
/// set them itself.
pub(crate) fn entries(text: &[u8], given: &[OsString]) -> Vec<Result<Entry, Wrong>> {
    let mut names: HashMap<String, usize> = HashMap::new();
    let mut addresses: HashMap<String, usize> = HashMap::new();
    let mut parsers = Parsers { devices: LineParser::new(), exports: None };
    let lines = text.split(|&byte| byte == b'\n').zip(1..);
    let read = |(text, line)| {
        let wrong = |why: String| Err(Wrong { line, name: name(text), why });
        let entry = match parse(text, line, given, &mut parsers).transpose()? {
            Ok(entry) => entry,
            Err(why) => return Some(wrong(why)),
        };
        // A second line of that name would be another unit's file in the first one's place.
        if let Some(first) = names.get(&entry.name) {
            return Some(wrong(format!("{} is the name of line {first} already", entry.name)));
        }
        // Each line is attached by itself, so the socket of one is in the way of the other.
        let address = entry.export.as_deref().and_then(|export| becket_device::spelled(export.address()));
        if let Some(address) = address {
            if let Some(first) = addresses.get(&address) {
                return Some(wrong(format!(
                    "{address} is the address of line {first} already: each line needs one of its own"
                )));
            }
            addresses.insert(address, line);
        }
        names.insert(entry.name.clone(), line);
        Some(Ok(entry))
    };
    lines.filter_map(read).collect()
}

/// The name of a line whose rest may make no sense.
fn name(text: &[u8]) -> Option<String> {
    let words = crate::words::words(std::str::from_utf8(text).ok()?).ok()?;
    words.into_iter().next()
}

/// Whether a path means the same to the service manager, and is a word of a unit.
fn is_a_place(path: &Path) -> bool {
    path.is_absolute() && path.to_str().is_some_and(|text| !text.chars().any(char::is_control))
}

/// One for each kind of line. Most tables have no exports.
struct Parsers {
    devices: LineParser<AttachLine>,
    exports: Option<LineParser<ExportLine>>,
}

/// Whether it names an image of a server: a URL, or an image of Ceph.
fn is_on_a_server(image: &str) -> Result<bool, String> {
    if image.chars().any(char::is_control) {
        return Ok(false);
    }
    let link = becket_image::link::is_link(Path::new(image));
    if link {
        let (uri, _) = becket_image::link::split_inside(image.as_ref());
        let endpoint = becket_image::link::Endpoint::parse(&uri.to_string_lossy());
        endpoint.map_err(|why| format!("{image:?} cannot be used: {why}"))?;
    }
    Ok(link || becket_fetch::is_remote(image.as_ref()))
}

fn parse(
    text: &[u8],
    line: usize,
    given: &[OsString],
    parsers: &mut Parsers,
) -> Result<Option<Entry>, String> {
    let text = std::str::from_utf8(text).map_err(|_| "it is not UTF-8".to_owned())?;
    let words = crate::words::words(text).map_err(|(column, what)| format!("column {column}: {what}"))?;
    let (name, image, options) = match words.as_slice() {
        [] => return Ok(None),
        [name, image] => (name, image, ""),
        [name, image, options] => (name, image, options.as_str()),
        [_] => return Err("it has no image: a line is NAME IMAGE [OPTIONS]".to_owned()),
        _ => return Err("it has more than three words: a line is NAME IMAGE [OPTIONS]".to_owned()),
    };
    becket_device::check_name(name).map_err(|error| error.to_string())?;
    let netdev = is_on_a_server(image)?;
    if !netdev && !is_a_place(Path::new(image)) {
        return Err(format!("{image:?} is not an absolute path, nor the name of an image of a server"));
    }
    let mut start = Start { netdev, ..Start::default() };
    let mut words = given.to_vec();
    let mut exported = false;
    for option in options.split(',').filter(|option| !matches!(*option, "" | "-" | "none" | "defaults")) {
        match option {
            "noauto" => start.noauto = true,
            "nofail" => start.nofail = true,
            "_netdev" => start.netdev = true,
            "ro" => words.push("--read-only".into()),
            _ if option.starts_with("backing-url=") => {
                start.netdev = true;
                words.push(format!("--{option}").into());
            }
            _ if option.starts_with("nbd=") || option.starts_with("vhost-user=") => {
                exported = true;
                words.push(format!("--{option}").into());
            }
            // Not one of those that a device has, or that of another device.
            _ if option.starts_with('-') || option.split('=').next() == Some("name") => {
                return Err(format!("{option:?} is not an option of a line"));
            }
            _ => words.push(format!("--{option}").into()),
        }
    }
    words.push(format!("--name={name}").into());
    // What follows the dashes of an export is a command. No image begins with a dash.
    words.extend((!exported).then(|| "--".into()));
    words.push(image.into());
    let (image, device, export) = if exported {
        let parser = parsers.exports.get_or_insert_with(LineParser::new);
        let ExportLine { export } = parser.parse(words)?;
        check_places(&export)?;
        (PathBuf::from(image), export.device(), Some(Box::new(export)))
    } else {
        let AttachLine { image, device } = parsers.devices.parse(words)?;
        (image, device, None)
    };
    if let Some(cow) = device.image.cow.as_deref().filter(|cow| !is_a_place(cow)) {
        return Err(format!("{cow:?} is not an absolute path"));
    }
    Ok(Some(Entry { line, name: name.clone(), image, device, export, start }))
}

/// What an export names on the machine must mean the same to the service manager.
fn check_places(export: &Export) -> Result<(), String> {
    let paths = [export.socket(), export.tls.as_deref()];
    match paths.into_iter().flatten().find(|path| !is_a_place(path)) {
        Some(path) => Err(format!("{path:?} is not an absolute path")),
        None if export.address().starts_with("fd:") => {
            Err("nobody hands a descriptor to a line: use unix:PATH, tcp:HOST:PORT or systemd".to_owned())
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one(line: &str) -> Result<Entry, String> {
        let mut found = entries(line.as_bytes(), &[]);
        assert_eq!(found.len(), 1, "{line}");
        found.remove(0).map_err(|wrong| wrong.why)
    }

    #[test]
    fn lines_are_read_as_they_are_meant() {
        let text = "# disks\n\nroot /srv/root.img ro\n  'data' '/srv/my data.img'\tnofail,offset=1MiB,via=loop # x\n\
            net /nfs/a.img _netdev,noauto,read-only\nplain /a -\nother /b defaults\r\n";
        let found: Vec<Entry> = entries(text.as_bytes(), &[]).into_iter().map(Result::unwrap).collect();
        let names: Vec<_> = found.iter().map(|entry| (entry.line, entry.name.as_str())).collect();
        assert_eq!(names, [(3, "root"), (4, "data"), (5, "net"), (6, "plain"), (7, "other")]);
        assert!(found[0].device.read_only && !found[1].device.read_only);
        assert_eq!(found[1].image, Path::new("/srv/my data.img"));
        assert_eq!((found[1].device.image.offset, found[1].device.name.as_deref()), (1 << 20, Some("data")));
        assert_eq!(found[1].start, Start { nofail: true, ..Start::default() });
        assert_eq!(found[2].start, Start { noauto: true, netdev: true, nofail: false });
        assert_eq!(found[3].start, Start::default());
    }

    #[test]
    fn an_image_on_a_server_comes_after_the_network() {
        let found = one("a rbd:pool/image#p1 ro,ceph-id=me").unwrap();
        assert!(found.start.netdev && found.device.read_only);
        assert_eq!(found.image, Path::new("rbd:pool/image#p1"));
        assert_eq!(found.device.image.store.ceph_id.as_deref(), Some("me"));
        for url in ["nbd://host/export", "https://host/a.iso#p1", "s3://bucket/key", "oci://host/name:tag"] {
            assert!(one(&format!("a {url} ro")).unwrap().start.netdev, "{url}");
        }
        let below = one("a /a.qcow2 backing-url=nbd://h/,backing-url=https://h/a").unwrap();
        assert!(below.start.netdev && below.device.image.store.backing_urls.len() == 2);
        assert!(one("a /a.qcow2 backing-url=/srv").unwrap_err().contains("it is no URL"));
        assert!(one("a 'https://h/\r[Service]'").unwrap_err().contains("not an absolute path"));
        assert!(one("a rbd:image").unwrap_err().contains("it names no pool"));
    }

    #[test]
    fn what_is_given_holds_where_the_line_says_nothing() {
        let found = entries(b"a /a offset=8K\nb /b", &["--offset=4K".into(), "--shared".into()]);
        let found: Vec<Entry> = found.into_iter().map(Result::unwrap).collect();
        assert_eq!((found[0].device.image.offset, found[1].device.image.offset), (8192, 4096));
        assert!(found[0].device.image.shared && found[1].device.image.shared);
    }

    #[test]
    fn a_line_with_an_address_is_an_export() {
        let vm = one("vm /srv/vm.qcow2 vhost-user=unix:/run/vm.sock,queues=2,cow=/srv/today.qcow2").unwrap();
        let export = vm.export.unwrap();
        assert_eq!(export.vhost_user.as_deref(), Some("unix:/run/vm.sock"));
        assert_eq!((export.socket(), export.images.len()), (Some(Path::new("/run/vm.sock")), 1));
        assert_eq!((vm.image.to_str(), vm.device.queues), (Some("/srv/vm.qcow2"), Some(2)));
        assert_eq!(vm.device.image.cow.as_deref(), Some(Path::new("/srv/today.qcow2")));
        let nbd = one("b /b ro,nofail,nbd=tcp:0.0.0.0,tls=/pki,tls-allow=a,tls-allow=b").unwrap();
        let export = nbd.export.unwrap();
        assert_eq!((export.tls_allow.len(), export.name.as_deref()), (2, Some("b")));
        assert!(nbd.device.read_only && nbd.start.nofail && export.socket().is_none());
        assert!(one("a /b ro").unwrap().export.is_none());
    }

    #[test]
    fn a_wrong_line_says_why() {
        for (line, why) in [
            ("name", "it has no image"),
            ("a /b ro x", "more than three words"),
            ("a b.img", "not an absolute path"),
            ("../a /b", "does not begin with a letter or digit"),
            ("a/b /b", "only letters, digits"),
            ("a@b /b", "only letters, digits"),
            ("a%n /b", "only letters, digits"),
            ("'a\tb' /b", "only letters, digits"),
            ("'' /b", "it is empty"),
            ("a '/b\r[Service]'", "not an absolute path"),
            ("a '/b", "column 3: this quote is not closed"),
            ("a /b flat", "unexpected argument '--flat'"),
            ("a /b offset=x", "'x' for '--offset"),
            ("a /b read-only=yes", "unexpected value 'yes'"),
            ("a /b --offset=1", "\"--offset=1\" is not an option of a line"),
            ("a /b name=c", "\"name=c\" is not an option of a line"),
            ("a /b name", "\"name\" is not an option of a line"),
            ("a /b nbd=unix:s.sock", "\"s.sock\" is not an absolute path"),
            ("a /b nbd=tcp:::1,tls=pki", "\"pki\" is not an absolute path"),
            ("a /b nbd=fd:3", "nobody hands a descriptor to a line"),
            ("a /b nbd=tcp:h,vhost-user=unix:/s", "cannot be used with"),
            ("a /b nbd=tcp:h,via=loop", "unexpected argument '--via'"),
            ("a /b tls=/pki", "unexpected argument '--tls'"),
            ("a /b nbd", "unexpected argument '--nbd'"),
        ] {
            let reported = one(line).unwrap_err();
            assert!(reported.contains(why), "{line}: {reported}");
        }
        assert!(one(&format!("{} /b", "a".repeat(64))).unwrap_err().contains("longer than 63"));
        assert_eq!(entries(b"\xff /b", &[]).remove(0).unwrap_err().why, "it is not UTF-8");
    }

    #[test]
    fn a_wrong_line_concerns_no_other() {
        let found = entries(b"a /a\nb\na /again\nc /c", &[]);
        let lines: Vec<_> = found
            .iter()
            .map(|found| found.as_ref().map_or_else(|w| -(w.line as i32), |e| e.line as i32))
            .collect();
        assert_eq!(lines, [1, -2, -3, 4]);
        assert_eq!(found[2].as_ref().unwrap_err().why, "a is the name of line 1 already");
    }

    /// The second one could not listen there, and would fail when the machine starts.
    #[test]
    fn two_lines_at_one_address_are_seen_when_the_table_is_read() {
        let wrong = |first: &str, second: &str| {
            let found = entries(format!("a /a {first}\nb /b {second}\nc /c ro").as_bytes(), &[]);
            assert!(found[0].is_ok() && found[2].is_ok(), "{found:?}");
            found[1].as_ref().err().map(|wrong| wrong.why.clone())
        };
        for (first, second) in [
            ("nbd=unix:/run/s", "nbd=unix:/run/s"),
            ("nbd=unix:/run/s", "vhost-user=unix:/run/./s"),
            ("nbd=tcp:10.0.0.1", "nbd=tcp:10.0.0.1:10809"),
            ("nbd=tcp:[::1]", "nbd=tcp:[::1]:10809"),
        ] {
            let why = wrong(first, second).unwrap_or_else(|| panic!("{first} {second}"));
            assert!(why.contains("is the address of line 1 already: each line needs one"), "{why}");
        }
        for (first, second) in [
            ("nbd=unix:/run/s", "nbd=unix:/run/t"),
            ("nbd=tcp:10.0.0.1", "nbd=tcp:10.0.0.2"),
            ("nbd=tcp:10.0.0.1:7", "nbd=tcp:10.0.0.1:8"),
            // A free port, and the socket of each unit.
            ("nbd=tcp:10.0.0.1:0", "nbd=tcp:10.0.0.1:0"),
            ("nbd=systemd", "nbd=systemd"),
        ] {
            assert_eq!(wrong(first, second), None);
        }
        let found = entries(b"a /a nbd=unix:/s,flat\nb /b nbd=unix:/s", &[]);
        assert!(found[0].is_err() && found[1].is_ok(), "a line that is left out has no address");
    }

    #[test]
    fn a_table_that_is_not_there_or_is_too_long_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("tab");
        assert_eq!(text(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        File::create(&path).unwrap().set_len(LONGEST + 1).unwrap();
        assert!(text(&path).unwrap_err().to_string().contains("longer than"));
    }

    proptest! {
        #[test]
        fn any_table_is_read(text in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = entries(&text, &[]);
        }

        #[test]
        fn any_line_that_is_taken_is_safe_to_name(line in "[a-c/ '\"\\\\,=.%@\n\r\t-]{0,40}") {
            for entry in entries(line.as_bytes(), &[]).into_iter().flatten() {
                prop_assert!(becket_device::check_name(&entry.name).is_ok());
                let image = entry.image.to_str().unwrap();
                prop_assert!(image.starts_with('/') && !image.chars().any(char::is_control));
            }
        }
    }
}
