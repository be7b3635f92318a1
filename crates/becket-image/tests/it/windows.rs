//! NTFS and exFAT, filled through other programs' drivers: becket shows what those show.
//! It never takes becket's own word for what a file system holds, and leaves no mount behind.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use becket_image::Format;
use becket_image::layer::{FileSystem, NodeKind, find};
use becket_testkit::image::random_bytes;
use becket_testkit::{require_plain_machine, require_root, tool, wait_until};
use rustix::fs::XattrFlags;

use crate::common::{LoopDevice, dir, file, skip};
use crate::layers::fs_in;
use crate::trees::{Tree, found, same, seen};

/// Trees of each kind; BECKET_WINDOWS_ROUNDS asks for more.
const ROUNDS: u64 = 1;

/// A file system that a program serves by FUSE, until it is dropped.
struct Served(PathBuf);

impl Served {
    fn new(program: &str, options: &str, image: &Path, point: &Path) -> Served {
        fs::create_dir_all(point).unwrap();
        tool(Command::new(program).env("TZ", "UTC").args(["-o", options]).arg(image).arg(point));
        Served(point.to_owned())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        becket_testkit::umount(&self.0);
        // The program writes the last blocks once the mount is gone.
        let point = self.0.to_str().unwrap().to_owned();
        let ended = || {
            fs::read_dir("/proc").unwrap().flatten().all(|process| {
                let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
                !String::from_utf8_lossy(&line).contains(&point)
            })
        };
        assert!(wait_until(std::time::Duration::from_secs(20), ended), "its program ends");
    }
}

/// Fills a mounted file system: many names, holes, pieces; and links and further streams where it has them.
fn fill(root: &Path, seed: u64, links: bool) {
    let mut dirs = vec![root.to_owned()];
    for step in 0..300 {
        let dice = random_bytes(4, seed * 1000 + step);
        let dir = dirs[usize::from(dice[0]) % dirs.len()].clone();
        let name = match dice[1] % 4 {
            0 => format!("{step}"),
            1 => format!("wörk 文 𝄞 {step}"),
            _ => format!("{step} {}", "long".repeat(usize::from(dice[2]) % 55)),
        };
        let path = dir.join(name);
        match dice[3] % 10 {
            0 => {
                fs::create_dir(&path).unwrap();
                dirs.push(path);
            }
            1 if links => symlink("t/ä".repeat(1 + usize::from(dice[2]) % 80), &path).unwrap(),
            2 if links => {
                let other = dir.join(format!("other {step}"));
                fs::write(&other, b"two names").unwrap();
                fs::hard_link(&other, &path).unwrap();
            }
            _ => {
                let size = [0, 1, 100, 500, 700, 4096, 5000, 70_000, 400_001][usize::from(dice[2]) % 9];
                let file = File::create(&path).unwrap();
                // What compresses well, and what does not.
                let bytes = match dice[2] % 2 {
                    0 => random_bytes(size, step),
                    _ => format!("{step} and again, ").repeat(size / 10).into_bytes(),
                };
                file.write_all_at(&bytes, 0).unwrap();
                if dice[1].is_multiple_of(5) {
                    file.set_len(bytes.len() as u64 + 200_000).unwrap();
                }
                if links && dice[1].is_multiple_of(7) {
                    let value = random_bytes(usize::from(dice[0]) * 20, step);
                    rustix::fs::setxattr(&path, "user.stream", &value, XattrFlags::empty()).unwrap();
                }
            }
        }
    }
    // Directories of many blocks, of which some are given back.
    for (name, count) in [("few", 12), ("some", 90), ("many", 3000)] {
        let dir = root.join(format!("dir {name}"));
        fs::create_dir(&dir).unwrap();
        let name = |number| dir.join(format!("an entry with a long name, number {number:06}"));
        (0..count).for_each(|number| fs::write(name(number), format!("{number}")).unwrap());
        (count / 3..count / 2).for_each(|number| fs::remove_file(name(number)).unwrap());
    }
    // Two files that grow in turn, each between the pieces of the other; and one with as many holes.
    let files = ["one", "two"].map(|name| File::create(root.join(name)).unwrap());
    for piece in 0..400_u64 {
        let bytes = [random_bytes(2500, piece), vec![7; 2500]].concat();
        files.iter().for_each(|file| file.write_all_at(&bytes, piece * 5000).unwrap());
    }
    if links {
        let file = File::create(root.join("holes")).unwrap();
        (0..1500_u64).for_each(|piece| file.write_all_at(&piece.to_le_bytes(), piece * 40_000).unwrap());
    }
}

/// What is said of each file behind the parts that its file system does not have.
fn cut(tree: Tree, behind: fn(&str) -> &str) -> Tree {
    tree.into_iter().map(|(path, (said, bytes))| (path, (behind(&said).to_owned(), bytes))).collect()
}

/// Compares what becket finds with what was seen, but for the parts that are cut.
fn compare(image: &Path, format: Format, expected: Tree, behind: fn(&str) -> &str, what: &str) {
    let blkid = |tag| {
        let said = tool(Command::new("blkid").args(["-p", "-o", "value", "-s", tag]).arg(image));
        Some(said.trim().to_owned()).filter(|said| !said.is_empty())
    };
    let (image, fs) = fs_in(image, format);
    let about = fs.about();
    // It was "Läbel"; exfat-fuse overwrites it where the first name in the root directory fills a cluster.
    let known = (Some(about.format), about.uuid.as_deref(), about.label.as_deref());
    assert_eq!(known, (blkid("TYPE").as_deref(), blkid("UUID").as_deref(), blkid("LABEL").as_deref()));
    let mut tree = Tree::new();
    found(&image, fs.as_ref(), fs.root(), &mut Vec::new(), &mut tree);
    same(&cut(tree, behind), &cut(expected, behind), what);
}

fn rounds() -> u64 {
    std::env::var("BECKET_WINDOWS_ROUNDS").ok().map_or(ROUNDS, |rounds| rounds.parse().unwrap())
}

/// Whether a test of these programs can run: they serve by FUSE.
fn can(name: &str, programs: &[&str]) -> bool {
    require_root(name) && require_plain_machine(name, programs)
}

fn node(fs: &dyn FileSystem, path: &str) -> u64 {
    path.split('/').fold(fs.root(), |dir, name| find(fs, dir, name.as_bytes()).unwrap().expect(name))
}

#[test]
fn trees_of_ntfs_are_what_ntfs_3g_shows() {
    if !can("windows::trees_of_ntfs_are_what_ntfs_3g_shows", &["mkntfs", "ntfs-3g"]) {
        return;
    }
    let dir = dir();
    let (point, mut compared, mut trees) = (dir.path().join("point"), 0, 0);
    for seed in 0..rounds() {
        for (cluster, sector, size) in
            [(4096, "512", 200), (512, "512", 120), (65536, "512", 400), (4096, "4096", 200)]
        {
            let image = file(dir.path(), "ntfs.img", size << 20);
            let mut mkfs = Command::new("/usr/sbin/mkntfs");
            mkfs.args(["-F", "-Q", "-q", "-L", "Läbel", "-s", sector, "-c", &cluster.to_string()]);
            tool(mkfs.arg(&image));
            let mut expected = Tree::new();
            {
                let served = Served::new("ntfs-3g", "compression", &image, &point);
                if cluster <= 4096 {
                    // Files that are made in it are compressed.
                    let value = 0x800_u32.to_be_bytes();
                    let none = XattrFlags::empty();
                    rustix::fs::setxattr(&served.0, "system.ntfs_attrib_be", &value, none).unwrap();
                }
                fill(&point, seed, true);
                tool(Command::new("mknod").arg(point.join("device")).args(["b", "259", "70000"]));
                tool(Command::new("mkfifo").arg(point.join("fifo")));
                seen(&point, &mut Vec::new(), &mut expected);
            }
            // ntfs-3g shows how long the value is that means a device.
            let device = &mut expected.get_mut(&b"/device"[..]).unwrap().0;
            *device = device.replace(" 24 Some((259, 70000))", " 0 Some((259, 70000))");
            compared += expected.len();
            trees += 1;
            let what = format!("clusters of {cluster}, sectors of {sector}, seed {seed}");
            let (opened, fs) = fs_in(&image, Format::Ntfs);
            let one = opened.compose(fs.lay_out(node(fs.as_ref(), "one")).unwrap()).unwrap();
            assert_eq!(
                one.encoded().len(),
                usize::from(cluster <= 4096),
                "what is meant to be compressed is"
            );
            compare(&image, Format::Ntfs, expected, |said| said.split_once(") ").unwrap().1, &what);
        }
    }
    assert!(compared > trees * 1500, "{compared} files of {trees} trees");
    eprintln!("{trees} trees, {compared} files compared, 0 differences");
}

#[test]
fn trees_of_exfat_are_what_exfat_fuse_shows() {
    if !can("windows::trees_of_exfat_are_what_exfat_fuse_shows", &["mkfs.exfat", "mount.exfat-fuse"]) {
        return;
    }
    let dir = dir();
    let (point, mut compared, mut trees) = (dir.path().join("point"), 0, 0);
    for seed in 0..rounds() {
        for cluster in ["512", "4K", "128K"] {
            let image = file(dir.path(), "exfat.img", if cluster == "128K" { 900 } else { 100 } << 20);
            tool(Command::new("/usr/sbin/mkfs.exfat").args(["-L", "Läbel", "-c", cluster]).arg(&image));
            let mut expected = Tree::new();
            {
                let device = match LoopDevice::attach(&image, &[]) {
                    Ok(device) => device,
                    Err(reason) => return skip("windows::trees_of_exfat_are_what_exfat_fuse_shows", &reason),
                };
                let _served = Served::new("mount.exfat-fuse", "rw", &device.0, &point);
                fill(&point, seed, false);
                seen(&point, &mut Vec::new(), &mut expected);
            }
            compared += expected.len();
            trees += 1;
            let what = format!("clusters of {cluster}, seed {seed}");
            compare(&image, Format::ExFat, expected, |said| said.splitn(3, '(').last().unwrap(), &what);
            let (_, fs) = fs_in(&image, Format::Auto);
            assert_eq!(fs.about().format, "exfat");
            assert_eq!(fs.writable(node(fs.as_ref(), "ONE")), Ok(()), "names differ but for their case");
        }
    }
    assert!(compared > trees * 1500, "{compared} files of {trees} trees");
    eprintln!("{trees} trees, {compared} files compared, 0 differences");
}

/// What Windows makes of files, and ntfs-3g shows as their bare values.
#[test]
fn links_of_windows_are_followed_and_what_is_elsewhere_is_refused() {
    let name = "windows::links_of_windows_are_followed_and_what_is_elsewhere_is_refused";
    if !can(name, &["mkntfs", "ntfs-3g"]) {
        return;
    }
    let dir = dir();
    let point = dir.path().join("point");
    let image = file(dir.path(), "ntfs.img", 16 << 20);
    tool(Command::new("/usr/sbin/mkntfs").args(["-F", "-Q", "-q"]).arg(&image));
    let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    // A tag, the length of the rest, four numbers that say where the two names are, perhaps flags, the names.
    let link = |tag: u32, target: &str| {
        let (kernel, shown) = (utf16(&format!(r"\??\{target}")), utf16(target));
        let mut rest = Vec::new();
        for number in [0, kernel.len(), kernel.len(), shown.len()] {
            rest.extend((number as u16).to_le_bytes());
        }
        if tag == 0xa000_000c {
            rest.extend(0_u32.to_le_bytes());
        }
        rest.extend(kernel.into_iter().chain(shown));
        [&tag.to_le_bytes()[..], &(rest.len() as u32).to_le_bytes(), &rest].concat()
    };
    let compact = [0x8000_0017_u32, 8, 1, 2].map(u32::to_le_bytes).concat();
    let wsl = [&[0x1d, 0, 0, 0xa0, 8, 0, 0, 0, 2, 0, 0, 0][..], b"a/ b"].concat();
    let values = [
        ("symlink", link(0xa000_000c, r"..\Users\ä")),
        ("junction", link(0xa000_0003, r"C:\Program Files")),
        ("wsl", wsl),
        ("compact", compact),
    ];
    {
        let _served = Served::new("ntfs-3g", "rw", &image, &point);
        for (name, value) in &values {
            match *name {
                "junction" => fs::create_dir(point.join(name)).unwrap(),
                _ => fs::write(point.join(name), b"").unwrap(),
            }
            let none = XattrFlags::empty();
            rustix::fs::setxattr(point.join(name), "system.ntfs_reparse_data", value, none).expect(name);
        }
    }
    let (_, fs) = fs_in(&image, Format::Ntfs);
    for (name, target) in [("symlink", "../Users/ä"), ("junction", "/Program Files"), ("wsl", "a/ b")] {
        let node = node(fs.as_ref(), name);
        assert_eq!(fs.stat(node).unwrap().kind, NodeKind::Symlink, "{name}");
        assert_eq!(fs.read_link(node).unwrap(), target.as_bytes(), "{name}");
    }
    let refused = fs.lay_out(node(fs.as_ref(), "compact")).unwrap_err().to_string();
    assert!(refused.contains("compacted"), "{refused}");
}
