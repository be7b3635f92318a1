//! Opening, and every bad input that a person can give it.
//! It never needs a device; what needs root says so when it cannot run.

use std::fs::{Permissions, read_link};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::{Mount, dir, file, open, open_read_only, run, skip, source_of};
use becket_image::{DirectIo, Error, ErrorKind, FileKind, Map, OpenOptions, Source};
use rustix::fs::OFlags;
use rustix::io::FdFlags;

const MIB: u64 = 1 << 20;

fn open_with(path: &Path, change: impl FnOnce(&mut OpenOptions)) -> Result<becket_image::Opened, Error> {
    let mut options = OpenOptions::default();
    change(&mut options);
    becket_image::open(path, &options)
}

/// The error, which must be one line and carry a next step.
fn error(result: Result<becket_image::Opened, Error>) -> (Error, String) {
    let error = result.unwrap_err();
    let text = error.to_string();
    assert!(!text.contains('\n') && !text.is_empty());
    assert!(error.hint().is_some_and(|hint| !hint.is_empty()), "{text}: no hint");
    (error, text)
}

#[test]
fn a_plain_file_is_one_range_with_its_facts() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    let opened = open(&path).unwrap();
    let metadata = path.metadata().unwrap();
    assert_eq!(opened.path, path.canonicalize().unwrap());
    assert_eq!(opened.map, Map::contiguous(0, 0, MIB));
    assert_eq!((opened.identity.dev, opened.identity.ino), (metadata.dev(), metadata.ino()));
    assert_eq!(opened.block_size, 512);
    assert!(!opened.read_only && opened.read_only_reason.is_none());
    assert_eq!(opened.warnings, [""; 0]);
    assert_eq!(opened.partitions, []);

    let [source @ Source::File(backing)] = opened.sources.as_slice() else { panic!("one source") };
    assert_eq!((source.len(), source.identity()), (MIB, Some(opened.identity)));
    assert!(source.is_writable() && source.reader().is_ok());
    let inode = |fd: &BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
    let inodes: Vec<_> = source.descriptors().iter().map(inode).collect();
    let own = 1 + usize::from(backing.direct.is_some());
    // Memory comes behind those that requests use, and two more of the file.
    let file = |count| vec![opened.identity.ino; count];
    assert_eq!([&inodes[..own], &inodes[own + 1..]], [&file(own)[..], &file(2)]);
    assert_ne!(inodes[own], opened.identity.ino);
    assert_eq!(backing.facts.kind, FileKind::Regular);
    assert_eq!(backing.facts.size, MIB);
    assert!(backing.facts.writable);
    assert!(backing.facts.physical_block_size.is_power_of_two() && backing.facts.physical_block_size >= 512);
    assert_eq!(backing.direct.is_some(), backing.facts.direct.is_some());
    assert!(!backing.facts.direct_reason.is_empty());
    assert_eq!(path.metadata().unwrap().len(), MIB, "the probes leave the size alone");
}

#[test]
fn descriptors_close_on_exec_and_block_as_usual() {
    let dir = dir();
    let opened = open(&file(dir.path(), "disk.img", MIB)).unwrap();
    let backing = source_of(&opened, 0);
    for fd in [Some(&backing.buffered), backing.direct.as_ref()].into_iter().flatten() {
        assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC));
        // io_uring gives EAGAIN for files that are marked so.
        assert!(!rustix::fs::fcntl_getfl(fd).unwrap().contains(OFlags::NONBLOCK));
    }
    assert!(!rustix::fs::fcntl_getfl(&backing.buffered).unwrap().contains(OFlags::DIRECT));
}

#[test]
fn serving_an_image_leaves_its_access_time_alone() {
    let dir = dir();
    let opened = open(&file(dir.path(), "disk.img", MIB)).unwrap();
    let backing = source_of(&opened, 0);
    for fd in std::iter::once(&backing.buffered).chain(&backing.direct) {
        assert!(rustix::fs::fcntl_getfl(fd).unwrap().contains(OFlags::NOATIME));
    }
}

#[test]
fn the_direct_descriptor_is_the_same_file_even_when_its_name_is_not() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    let opened = open(&path).unwrap();
    let Some(direct) = &source_of(&opened, 0).direct else {
        return skip("the_direct_descriptor_is_the_same_file", &source_of(&opened, 0).facts.direct_reason);
    };
    let buffered = rustix::fs::fstat(&source_of(&opened, 0).buffered).unwrap();
    let other = rustix::fs::fstat(direct).unwrap();
    assert_eq!((buffered.st_dev, buffered.st_ino), (other.st_dev, other.st_ino));
    assert!(rustix::fs::fcntl_getfl(direct).unwrap().contains(OFlags::DIRECT | OFlags::RDWR));
}

#[test]
fn a_link_is_resolved_to_the_file_that_it_means() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    let link = dir.path().join("link");
    symlink("disk.img", &link).unwrap();
    assert_eq!(open(&link).unwrap().path, path.canonicalize().unwrap());
}

#[test]
fn a_missing_path_names_the_deepest_directory_that_exists() {
    let dir = dir();
    std::fs::create_dir(dir.path().join("there")).unwrap();
    let (error, text) = error(open(&dir.path().join("there/not/disk.img")));
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let Error::NotFound { deepest, missing, .. } = &error else { panic!("{error:?}") };
    assert_eq!((deepest.as_path(), missing.as_str()), (dir.path().join("there").as_path(), "not"));
    assert!(text.contains("there has no entry \"not\""), "{text}");
    assert!(error.hint().unwrap().ends_with(&format!("ls {}", deepest.display())));

    // As it follows in a URL.
    let hint = open(Path::new("no-such-image#p1/etc")).unwrap_err().hint().unwrap();
    assert!(hint.ends_with("follows /: no-such-image/p1/etc"), "{hint}");

    for (path, deepest) in [("no-such-image", "."), ("/no-such-image", "/"), ("", ".")] {
        let found = open(Path::new(path)).unwrap_err();
        assert!(matches!(&found, Error::NotFound { deepest: d, .. } if d == Path::new(deepest)), "{found:?}");
    }
}

#[test]
fn a_file_in_the_middle_of_the_path_is_named() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    let (error, _) = error(open(&path.join("p1")));
    assert!(
        matches!(&error, Error::NoContainer { image, .. } if *image == path.display().to_string()),
        "{error:?}"
    );
}

#[test]
fn a_dangling_link_and_a_circle_of_links_are_named() {
    let dir = dir();
    let link = dir.path().join("dangling");
    symlink("nowhere", &link).unwrap();
    for path in [link.clone(), link.join("disk.img")] {
        let (error, text) = error(open(&path));
        let Error::DanglingLink { link: found, target, .. } = &error else { panic!("{error:?}") };
        assert_eq!((found, target.as_path()), (&link, Path::new("nowhere")), "{text}");
    }
    symlink("b", dir.path().join("a")).unwrap();
    symlink("a", dir.path().join("b")).unwrap();
    let (error, _) = error(open(&dir.path().join("a")));
    assert!(matches!(error, Error::LinkLoop { .. }), "{error:?}");
}

#[test]
fn what_is_no_image_is_refused_without_being_opened() {
    let dir = dir();
    let fifo = dir.path().join("fifo");
    run("mkfifo", &[fifo.to_str().unwrap()]);
    let socket = dir.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    for (path, what) in [
        (dir.path(), "a directory"),
        (&fifo, "a FIFO"),
        (&socket, "a socket"),
        (Path::new("/dev/null"), "a character device"),
    ] {
        for read_only in [false, true] {
            // On a thread: it must not wait for the other end of a FIFO, and this test must end if it does.
            let (sender, receiver) = std::sync::mpsc::channel();
            let path = path.to_owned();
            std::thread::spawn(move || {
                let result = open_with(&path, |options| options.read_only = read_only);
                drop(sender.send(Box::new(result)));
            });
            let (error, text) = error(*receiver.recv_timeout(Duration::from_secs(120)).expect("it waits"));
            assert_eq!(error.kind(), ErrorKind::NotAnImage);
            assert!(text.contains(what), "{text}");
        }
    }
}

#[test]
fn an_empty_file_is_refused() {
    let dir = dir();
    let (error, _) = error(open(&file(dir.path(), "empty", 0)));
    assert!(matches!(error, Error::Empty { .. }), "{error:?}");
}

#[test]
fn offset_and_limit_choose_the_range() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    let range = |offset, limit| {
        let opened = open_with(&path, |o| (o.offset, o.size_limit) = (offset, limit)).unwrap();
        assert_eq!(opened.warnings, [""; 0]);
        opened.map.single_range().unwrap()
    };
    assert_eq!(range(4096, None), (0, 4096, MIB - 4096));
    assert_eq!(range(4096, Some(8192)), (0, 4096, 8192));
    assert_eq!(range(4096, Some(u64::MAX)), (0, 4096, MIB - 4096));
    assert_eq!(range(MIB - 512, None), (0, MIB - 512, 512));
}

#[test]
fn an_offset_that_leaves_nothing_is_refused() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    for offset in [MIB, MIB + 1, MIB - 511, u64::MAX] {
        let (error, text) = error(open_with(&path, |options| options.offset = offset));
        assert!(matches!(error, Error::NothingLeft { size: MIB, .. }), "{error:?}");
        assert_eq!(error.kind(), ErrorKind::InvalidOption);
        assert!(text.contains(&offset.to_string()), "{text}");
    }
    for limit in [0, 511] {
        let (error, _) = error(open_with(&path, |options| options.size_limit = Some(limit)));
        assert!(matches!(error, Error::SizeLimit { .. }), "{error:?}");
    }
    let (error, _) = error(open(&file(dir.path(), "tiny", 100)));
    assert!(error.hint().unwrap().contains("at least one block"), "{error:?}");
}

#[test]
fn a_tail_that_fills_no_block_is_left_out_with_a_warning() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB + 700);
    let opened = open(&path).unwrap();
    assert_eq!(opened.map.len(), MIB + 512);
    assert!(opened.warnings[0].contains("last 188"), "{:?}", opened.warnings);
    drop(opened);
    let opened = open_with(&path, |options| options.block_size = Some(4096)).unwrap();
    assert_eq!((opened.map.len(), opened.block_size), (MIB, 4096));
    assert_eq!(opened.warnings.len(), 1);
}

#[test]
fn a_block_size_that_no_device_has_is_refused() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    for size in [0, 1, 256, 513, 1000, 1 << 30, u32::MAX] {
        let (error, text) = error(open_with(&path, |options| options.block_size = Some(size)));
        assert!(matches!(error, Error::BlockSize { .. }), "{error:?}");
        assert!(text.contains(&size.to_string()), "{text}");
    }
    for size in [512, 1024, 2048, 4096] {
        assert_eq!(open_with(&path, |options| options.block_size = Some(size)).unwrap().block_size, size);
    }
}

#[test]
fn the_gpt_inside_chooses_the_block_size() {
    let fixture = |name: &str| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let read = |name: &str, block_size| {
        open_with(&fixture(name), |o| (o.read_only, o.partitions, o.block_size) = (true, true, block_size))
            .unwrap()
    };
    let opened = read("gpt-4096.img", None);
    assert_eq!((opened.block_size, opened.partitions.len()), (4096, 2));
    assert_eq!(opened.warnings, [""; 0]);
    let opened = read("gpt-512.img", None);
    assert_eq!((opened.block_size, opened.partitions.len()), (512, 2));

    // Asked for otherwise: obeyed, and said. The partition of 3 sectors fits neither way of counting.
    let opened = read("gpt-4096.img", Some(512));
    assert_eq!((opened.block_size, opened.partitions.len()), (512, 2));
    assert!(opened.warnings[0].contains("--block-size 4096"), "{:?}", opened.warnings);
    assert_eq!(read("mbr-logical.img", None).partitions.len(), 5);
    let unread = open_read_only(&fixture("gpt-4096.img")).unwrap();
    assert_eq!(
        (unread.block_size, unread.partitions.len()),
        (4096, 0),
        "the table counts even when not asked for"
    );
}

#[test]
fn a_table_at_an_offset_counts_from_there_and_ends_with_the_limit() {
    let dir = dir();
    let table =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/mbr-logical.img")).unwrap();
    let path = dir.path().join("disk.img");
    let mut disk = std::fs::File::create(&path).unwrap();
    disk.write_all(&[0xaa; 1000]).unwrap();
    disk.write_all(&table).unwrap();
    let opened = open_with(&path, |o| {
        (o.offset, o.size_limit, o.partitions) = (1000, Some(24 * 512), true);
    })
    .unwrap();
    let numbers: Vec<_> = opened.partitions.iter().map(|p| (p.number, p.start / 512)).collect();
    assert_eq!(numbers, [(1, 1), (2, 8), (5, 10), (6, 20)]);
    assert!(opened.warnings.iter().any(|w| w.contains("leaves the image")), "{:?}", opened.warnings);
}

#[test]
fn direct_io_is_taken_left_or_insisted_on() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    let off = open_with(&path, |options| options.direct_io = DirectIo::Off).unwrap();
    let facts =
        |opened: becket_image::Opened| opened.sources.into_iter().next().map(|source| source.facts().clone());
    let off = facts(off);
    let auto = facts(open_with(&path, |_| {}).unwrap());
    assert_eq!(off, auto, "it may be switched on later, so it is asked for all the same");

    // An offset inside a sector: impossible everywhere.
    let auto = open_with(&path, |options| options.offset = 100).unwrap();
    assert!(source_of(&auto, 0).direct.is_none());
    assert!(
        source_of(&auto, 0).facts.direct_reason.contains("offset 100"),
        "{}",
        source_of(&auto, 0).facts.direct_reason
    );
    drop(auto);
    let (error, text) = error(open_with(&path, |o| (o.offset, o.direct_io) = (100, DirectIo::On)));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(text.contains("offset 100"), "{text}");
}

#[test]
fn the_alignment_that_is_promised_is_enough_for_a_direct_read() {
    let _turn = dir();
    for dir in ["/tmp", "/dev/shm", "/var/tmp"] {
        let Ok(dir) = tempfile::tempdir_in(dir) else { continue };
        let opened = open(&file(dir.path(), "disk.img", MIB)).unwrap();
        let (Some(fd), Some(alignment)) = (&source_of(&opened, 0).direct, source_of(&opened, 0).facts.direct)
        else {
            skip("the_alignment_that_is_promised", &source_of(&opened, 0).facts.direct_reason);
            continue;
        };
        let unit = alignment.offset as usize;
        let mut memory = vec![1_u8; unit + 8192];
        // At an address that is aligned as promised and no better.
        let from = memory.as_ptr().align_offset(4096);
        let from = if alignment.memory < 4096 { from + alignment.memory as usize } else { from };
        let buf = &mut memory[from..from + unit];
        assert_eq!(rustix::io::pread(fd, &mut *buf, alignment.offset.into()), Ok(unit), "{alignment:?}");
        assert!(buf.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_file_system_without_direct_io_is_used_without_it() {
    const NAME: &str = "a_file_system_without_direct_io";
    let dir = dir();
    // ramfs has none; tmpfs pretends from Linux 6.6 on.
    let _mount = match Mount::new(&["-t", "ramfs", "becket-test"], dir.path()) {
        Ok(mount) => mount,
        Err(reason) => return skip(NAME, &reason),
    };
    let path = file(dir.path(), "disk.img", MIB);
    let auto = open(&path).unwrap();
    assert!(source_of(&auto, 0).direct.is_none());
    assert!(
        source_of(&auto, 0).facts.direct_reason.contains("does not offer"),
        "{}",
        source_of(&auto, 0).facts.direct_reason
    );
    assert!(
        !source_of(&auto, 0).facts.discard && !source_of(&auto, 0).facts.write_zeroes,
        "nor has it holes"
    );
    drop(auto);
    let (error, text) = error(open_with(&path, |options| options.direct_io = DirectIo::On));
    assert!(matches!(error, Error::DirectIo { .. }) && text.contains("does not offer"), "{text}");
}

#[test]
fn discard_is_promised_only_where_it_works() {
    let dir = dir();
    let path = dir.path().join("disk.img");
    std::fs::write(&path, vec![7; 64 << 10]).unwrap();
    let opened = open(&path).unwrap();
    let facts = &source_of(&opened, 0).facts;
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    let granularity = u64::from(facts.discard_granularity);
    assert_eq!(std::fs::read(&path).unwrap(), vec![7; 64 << 10], "asking changes nothing");
    let worked =
        rustix::fs::fallocate(&source_of(&opened, 0).buffered, punch, 0, granularity.max(4096)).is_ok();
    assert_eq!((facts.discard, facts.write_zeroes), (worked, worked));
    assert!(!worked || granularity.is_power_of_two() && granularity >= 512);
    drop(opened);
    let read_only = open_read_only(&path).unwrap();
    assert!(!source_of(&read_only, 0).facts.discard && !source_of(&read_only, 0).facts.write_zeroes);
}

#[test]
fn opening_leaves_the_time_of_the_last_change_alone() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    let disk = std::fs::File::options().write(true).open(&path).unwrap();
    let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123);
    disk.set_modified(long_ago).unwrap();
    drop(open(&path).unwrap());
    assert_eq!(path.metadata().unwrap().modified().unwrap(), long_ago);
}

#[test]
fn asking_for_discard_keeps_what_is_allocated_behind_the_end() {
    const NAME: &str = "asking_for_discard_keeps_what_is_allocated_behind_the_end";
    let _turn = dir();
    // ext4 ignores holes behind the end, tmpfs punches them.
    for place in ["/tmp", "/dev/shm"] {
        let Ok(dir) = tempfile::tempdir_in(place) else { continue };
        let path = file(dir.path(), "disk.img", 8192);
        let disk = std::fs::File::options().write(true).open(&path).unwrap();
        if let Err(errno) = rustix::fs::fallocate(&disk, rustix::fs::FallocateFlags::KEEP_SIZE, 0, MIB) {
            skip(NAME, &format!("{place} cannot allocate behind the end: {errno}"));
            continue;
        }
        let before = path.metadata().unwrap().blocks();
        drop(open(&path).unwrap());
        assert_eq!(path.metadata().unwrap().blocks(), before, "{place}");
    }
}

#[test]
fn a_read_only_open_cannot_write() {
    let dir = dir();
    let opened = open_read_only(&file(dir.path(), "disk.img", MIB)).unwrap();
    assert!(opened.read_only && opened.read_only_reason.is_none() && !source_of(&opened, 0).facts.writable);
    let backing = source_of(&opened, 0);
    for fd in [Some(&backing.buffered), backing.direct.as_ref()].into_iter().flatten() {
        assert_eq!(rustix::io::write(fd, &[0; 512]), Err(rustix::io::Errno::BADF));
    }
}

#[test]
fn what_lies_on_a_read_only_file_system_is_opened_for_reading() {
    const NAME: &str = "what_lies_on_a_read_only_file_system";
    let dir = dir();
    let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
    std::fs::create_dir(&from).unwrap();
    std::fs::create_dir(&to).unwrap();
    file(&from, "disk.img", MIB);
    let _mount = match Mount::new(&["-o", "bind,ro", from.to_str().unwrap()], &to) {
        Ok(mount) => mount,
        Err(reason) => return skip(NAME, &reason),
    };
    let opened = open(&to.join("disk.img")).unwrap();
    assert!(opened.read_only && !source_of(&opened, 0).facts.writable);
    assert_eq!(opened.read_only_reason.as_deref(), Some("it lies on a read-only file system"));
}

#[test]
fn what_is_immutable_is_opened_for_reading() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    let chattr = |flag: &str| Command::new("chattr").arg(flag).arg(&path).status().is_ok_and(|s| s.success());
    if !chattr("+i") {
        return skip("what_is_immutable", "chattr +i does not work here");
    }
    let opened = open(&path);
    assert!(chattr("-i"));
    let opened = opened.unwrap();
    assert!(opened.read_only);
    assert!(opened.read_only_reason.unwrap().contains("immutable"));
}

/// Runs `body` on a thread of its own as user "nobody", or says why not.
fn as_nobody(test: &str, body: impl FnOnce() + Send + 'static) {
    if !rustix::process::geteuid().is_root() {
        // Modes count for this user anyway.
        return body();
    }
    let nobody = rustix::process::Uid::from_raw(65534);
    let become_and_run = move || match rustix::thread::set_thread_res_uid(nobody, nobody, nobody) {
        Ok(()) => {
            body();
            None
        }
        Err(error) => Some(format!("cannot become another user: {error}")),
    };
    if let Some(reason) = std::thread::spawn(become_and_run).join().unwrap() {
        skip(test, &reason);
    }
}

#[test]
fn without_permission_it_is_read_or_refused() {
    let dir = dir();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let modes = [("readable", 0o444), ("secret", 0o000)];
    let [readable, secret] = modes.map(|(name, mode)| {
        let path = file(dir.path(), name, MIB);
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    });
    let closed = dir.path().join("closed");
    std::fs::create_dir(&closed).unwrap();
    file(&closed, "disk.img", MIB);
    std::fs::set_permissions(&closed, Permissions::from_mode(0o000)).unwrap();
    as_nobody("without_permission_it_is_read_or_refused", move || {
        let opened = open(&readable).unwrap();
        assert!(opened.read_only);
        assert_eq!(opened.read_only_reason.as_deref(), Some("this user may not write to it"));
        for path in [secret, closed.join("disk.img")] {
            let (error, text) = error(open(&path));
            assert_eq!(error.kind(), ErrorKind::Permission);
            assert!(text.contains("Permission denied"), "{text}");
            assert!(error.hint().unwrap().contains("ls -l"), "{error:?}");
        }
    });
}

#[test]
fn a_program_that_runs_is_read() {
    let dir = dir();
    let program = dir.path().join("sleep");
    std::fs::copy("/bin/sleep", &program).unwrap();
    let mut running = Command::new(&program).arg("60").spawn().unwrap();
    let opened = open(&program);
    running.kill().unwrap();
    running.wait().unwrap();
    assert!(opened.unwrap().read_only_reason.unwrap().contains("executed"));
}

#[test]
fn an_unlinked_file_keeps_working() {
    let dir = dir();
    let path = file(dir.path(), "disk.img", MIB);
    let held = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let by_descriptor = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    assert!(read_link(&by_descriptor).is_ok());
    let opened = open(&by_descriptor).unwrap();
    assert_eq!(opened.map.len(), MIB);
    assert_eq!(rustix::fs::fstat(source_of(&opened, 0).buffered.as_fd()).unwrap().st_nlink, 0);
}

#[test]
fn nothing_stays_cached_of_what_is_read_directly() {
    const NAME: &str = "nothing_stays_cached_of_what_is_read_directly";
    let dir = dir();
    let image = file(dir.path(), "cached.img", 4 * MIB);
    let bytes = std::fs::read(&image).unwrap();
    std::fs::write(&image, bytes).unwrap();
    std::fs::File::open(&image).unwrap().sync_all().unwrap();
    let pages = || {
        let arguments = ["--noheadings", "--output", "PAGES"];
        let said = Command::new("fincore").args(arguments).arg(&image).output().ok()?;
        String::from_utf8_lossy(&said.stdout).trim().parse::<u64>().ok()
    };
    let Some(before) = pages() else { return skip(NAME, "fincore is not installed") };
    let opened = open_with(&image, |options| options.partitions = true).unwrap();
    if source_of(&opened, 0).direct.is_none() {
        return skip(NAME, &source_of(&opened, 0).facts.direct_reason);
    }
    assert!(before > 0, "the image was in the page cache");
    assert_eq!(pages(), Some(0));
}
