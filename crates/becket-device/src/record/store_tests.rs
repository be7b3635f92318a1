use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Barrier;

use becket_image::Identity;
use becket_transport::Kind;

use super::*;
use crate::contract::{DeviceInfo, ErrorKind, Spec};

pub(crate) fn store() -> (tempfile::TempDir, Store) {
    let temp = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(temp.path().join("run"), temp.path().join("links")).unwrap();
    (temp, Store::open(runtime).unwrap())
}

pub(crate) fn device(name: &str, number: u32) -> Device {
    let info = DeviceInfo {
        spec: Spec {
            image: "/images/a b.img".into(),
            offset: 512,
            size_limit: Some(1 << 20),
            block_size: 512,
            reason: "because".to_owned(),
            ..Spec::default()
        },
        size: 1 << 20,
        direct_io: true,
        direct_io_reason: "the backing can".to_owned(),
        physical_block_size: 4096,
        diskseq: Some(7),
        warnings: vec!["cut".to_owned()],
        ..DeviceInfo::bare(name.to_owned(), format!("/dev/loop{number}").into(), Kind::Loop, number)
    };
    Device::bare(info, Identity { dev: 1, ino: 2 }, 0)
}

const IMAGE: &str = "/images/other.img";

#[test]
fn names_are_safe_as_file_names() {
    for name in ["a", "0", "loop3", "A.b_c-d", &"x".repeat(63)] {
        check_name(name).unwrap();
    }
    for name in ["", ".", "..", ".a", "-a", "_a", "a/b", "../x", "a b", "a\n", "ä", "a\0", &"x".repeat(64)] {
        let error = check_name(name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{name:?}");
        assert!(error.hint().is_some());
    }
}

#[test]
fn a_record_comes_back_as_it_was_written() {
    let (_temp, store) = store();
    let device = device("one", 3);
    store.claim("one", Path::new(IMAGE), |_| true).unwrap().fill(&device).unwrap();
    assert_eq!(store.device("one").unwrap(), Some(device.clone()));
    assert_eq!(store.entries().unwrap(), [("one".to_owned(), Entry::Device(Box::new(device)))]);
    let mode = fs::metadata(store.path("one")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_name_is_taken_once_and_free_again_when_nothing_came_of_it() {
    let (_temp, store) = store();
    let claim = store.claim("one", Path::new(IMAGE), |_| true).unwrap();
    let error = store.claim("one", Path::new("/x"), |_| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NameInUse);
    assert!(error.to_string().contains(IMAGE), "{error}");
    drop(claim);
    store.claim("one", Path::new("/x"), |_| true).unwrap();
    assert_eq!(store.entries().unwrap(), []);
}

#[test]
fn a_name_in_use_names_the_image_and_the_device() {
    let (_temp, store) = store();
    store.claim("one", Path::new(IMAGE), |_| true).unwrap().fill(&device("one", 3)).unwrap();
    let error = store.claim("one", Path::new("/x"), |_| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NameInUse);
    let text = error.to_string();
    assert!(text.contains("/images/a b.img") && text.contains("/dev/loop3"), "{text}");
    // The kernel knows nothing of that device any more: the name is free.
    store.claim("one", Path::new("/x"), |_| false).unwrap();
}

#[test]
fn a_dead_claimant_holds_nothing() {
    let (_temp, store) = store();
    let dead = ProcessId { pid: std::process::id(), start: 1 };
    store.prepare("one", Entry::Claim { image: IMAGE.into(), claimant: dead }).unwrap().publish().unwrap();
    store.claim("one", Path::new("/x"), |_| true).unwrap();
}

#[test]
fn a_lock_is_let_go_and_its_file_used_again_unless_that_is_gone() {
    let (_temp, store) = store();
    let inode = |store: &Store| {
        let locked = store.lock("one").unwrap();
        rustix::fs::fstat(locked.file.as_ref().unwrap()).unwrap().st_ino
    };
    // Others open the file themselves, as other processes do.
    let other = Store { locks: Arc::default(), ..store.clone() };
    let path = store.runtime.records().join(".lock");
    let is_free = || {
        let place = hash("one") >> 1;
        !becket_uapi::lock::ofd_test(
            lock_file(&path).unwrap().as_fd(),
            becket_uapi::lock::LockKind::Exclusive,
            place,
            1,
        )
        .unwrap()
    };
    let first = inode(&store);
    assert_eq!((lock(&*store.locks).len(), is_free()), (1, true));
    let held = store.lock("one").unwrap();
    assert_eq!((lock(&*store.locks).len(), is_free()), (0, false));
    drop(held);
    assert!(is_free());
    assert_eq!((inode(&other), inode(&store)), (first, first));

    fs::remove_file(&path).unwrap();
    let held = other.lock("two").unwrap();
    assert_eq!(
        rustix::fs::fstat(held.file.as_ref().unwrap()).unwrap().st_ino,
        fs::metadata(&path).unwrap().ino()
    );
    assert_eq!(inode(&store), fs::metadata(&path).unwrap().ino(), "both must meet at the same file");
}

#[test]
fn a_record_is_amended_where_it_was_written_or_replaced_and_no_other_is() {
    let (_temp, store) = store();
    let path = store.path("one");
    let file = || fs::metadata(&path).unwrap().ino();
    let first = device("one", 3);
    let written = store.enter(&first, |_| true).unwrap();
    let place = file();
    let mut second = first.clone();
    second.info.recoveries = 7;
    assert!(store.amend(&first, &written, &second).unwrap());
    assert_eq!((store.device("one").unwrap().as_ref(), file()), (Some(&second), place));
    // It is not what it was any more, and becomes one record again.
    assert!(store.amend(&second, &written, &first).unwrap());
    assert_eq!(store.device("one").unwrap(), Some(first.clone()));
    assert_ne!(file(), place);
    // Another use of the name stays.
    let mut other = first.clone();
    other.info.number = 4;
    assert!(store.update(&first, &other).unwrap());
    assert!(!store.amend(&first, &written, &second).unwrap());
    assert_eq!(store.device("one").unwrap(), Some(other.clone()));
    // A record that was taken away is not written by its old descriptor.
    assert!(store.remove(&other).unwrap());
    assert!(!store.amend(&first, &written, &second).unwrap());
    assert_eq!(store.device("one").unwrap(), None);
}

#[test]
fn two_records_that_fill_more_than_a_page_are_two_files() {
    let (_temp, store) = store();
    let mut first = device("one", 3);
    first.info.warnings = vec!["w".repeat(2000)];
    let written = store.enter(&first, |_| true).unwrap();
    let mut second = first.clone();
    second.info.recoveries = 7;
    assert!(store.amend(&first, &written, &second).unwrap());
    assert_eq!(store.device("one").unwrap(), Some(second));
    assert!(fs::metadata(store.path("one")).unwrap().len() < AMENDED);
}

#[test]
fn of_two_records_in_a_file_the_last_whole_one_counts() {
    let (_temp, store) = store();
    let first = device("one", 3);
    let written = store.enter(&first, |_| true).unwrap();
    let mut second = first.clone();
    second.info.recoveries = 7;
    assert!(store.amend(&first, &written, &second).unwrap());
    let path = store.path("one");
    let text = fs::read(&path).unwrap();
    let start = usize::try_from(written.len).unwrap();
    for len in start..text.len() {
        fs::write(&path, &text[..len]).unwrap();
        // Its last byte only ends the line.
        let last = if len == text.len() - 1 { &second } else { &first };
        assert_eq!(store.device("one").unwrap().as_ref(), Some(last), "{len} of {}", text.len());
    }
    fs::write(&path, [&text[..start], b"{}"].concat()).unwrap();
    assert_eq!(store.device("one").unwrap(), None);
    store.sweep();
    assert!(path.with_extension("json.corrupt").exists());
}

#[test]
fn of_many_claimants_one_wins() {
    let (_temp, store) = store();
    for round in 0..20 {
        let name = format!("n{round}");
        let barrier = Barrier::new(8);
        let won: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        let claim = store.claim(&name, Path::new(IMAGE), |_| true);
                        barrier.wait();
                        usize::from(claim.is_ok())
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(won, 1);
    }
}

#[test]
fn what_the_dead_left_half_written_goes_and_what_is_being_written_stays() {
    let (_temp, store) = store();
    let good = device("good", 1);
    store.claim("good", Path::new(IMAGE), |_| true).unwrap().fill(&good).unwrap();
    // A number that no process has, one of a process that lives, and another file.
    let names =
        [format!(".good.{}.0.new", u32::MAX), format!(".other.{}.3.new", std::process::id()), ".lock".into()];
    let paths = names.map(|name| store.runtime.records().join(name));
    paths.iter().for_each(|path| drop(File::create(path).unwrap()));
    let marks =
        || store.left().iter().map(|left| left.note.as_ref().map(|note| note.mark)).collect::<Vec<_>>();
    assert_eq!(marks(), [None]);
    store.left().iter().for_each(left::Left::forget);
    assert_eq!(paths.each_ref().map(|path| path.exists()), [false, true, true]);

    let note = store.note(77, IMAGE.into()).unwrap();
    assert_eq!(marks(), []);
    // Its number is another process's by now.
    let text = fs::read_to_string(&note.path).unwrap();
    let own = ProcessId::own();
    fs::write(&note.path, text.replace(&own.start.to_string(), &(own.start + 1).to_string())).unwrap();
    assert_eq!(marks(), [Some(77)]);
    drop(note);
    assert_eq!(marks(), []);
    assert_eq!(store.entries().unwrap().len(), 1);
}

#[test]
fn nonsense_is_left_alone_by_readers_and_frees_the_name() {
    let (_temp, store) = store();
    let good = device("good", 1);
    store.claim("good", Path::new(IMAGE), |_| true).unwrap().fill(&good).unwrap();
    let text = fs::read_to_string(store.path("good")).unwrap();
    let cases = [
        ("torn", text[..text.len() / 2].to_owned()),
        // What a power cut leaves of a record that was not written back.
        ("empty", String::new()),
        ("zeroes", "\0".repeat(8192)),
        ("garbage", "\u{1}\u{2}".to_owned()),
        // A record under another name than its own must not make that name mean its device.
        ("other", text.clone()),
    ];
    let write = || cases.iter().for_each(|(name, content)| fs::write(store.path(name), content).unwrap());
    write();
    assert_eq!(store.entries().unwrap(), [("good".to_owned(), Entry::Device(Box::new(good)))]);
    let aside = |name: &str| {
        let why = if matches!(name, "empty" | "zeroes") { "foreign" } else { "corrupt" };
        store.runtime.records().join(format!("{name}.json.{why}"))
    };
    for (name, content) in &cases {
        assert_eq!(&fs::read_to_string(store.path(name)).unwrap(), content, "a look changes nothing");
        store.claim(name, Path::new(IMAGE), |_| true).unwrap();
        assert_eq!(&fs::read_to_string(aside(name)).unwrap(), content);
        fs::remove_file(aside(name)).unwrap();
    }
    // The supervisor makes order when it begins.
    write();
    store.sweep();
    for (name, content) in &cases {
        assert_eq!(&fs::read_to_string(aside(name)).unwrap(), content);
        assert!(!store.path(name).exists());
    }
    assert_eq!(store.entries().unwrap().len(), 1);
}

/// Whatever is done here, a record of a later becket stays as it is, and its name and device are taken.
#[test]
fn a_record_of_a_later_version_is_shown_and_left_alone() {
    let (_temp, store) = store();
    let mut known = device("one", 3);
    known.mark = 77;
    store.claim("one", Path::new(IMAGE), |_| true).unwrap().fill(&known).unwrap();
    let text = fs::read_to_string(store.path("one")).unwrap();
    let boot = &store.boot_id;
    let later = [
        ("versioned", text.replace("\"version\":1", "\"version\":2"), Some(77)),
        ("needing", text.replacen("\"name\"", "\"needs\":[\"mirror\"],\"name\"", 1), Some(77)),
        (
            "unlike",
            format!("{{\"version\":9,\"boot_id\":\"{boot}\",\"name\":\"unlike\",\"entry\":[]}}"),
            None,
        ),
        ("kind", text.replace("\"transport\":\"loop\"", "\"transport\":\"vhost\""), Some(77)),
    ];
    for (name, content, mark) in &later {
        let content = content.replace("\"one\"", &format!("\"{name}\""));
        fs::write(store.path(name), &content).unwrap();
        let Some(Entry::Unknown(unknown)) = store.read(name).unwrap() else { panic!("{name}") };
        assert_eq!((unknown.mark, unknown.info.name.as_str()), (*mark, *name));
        assert_eq!(unknown.info.state, crate::contract::DeviceState::UnknownVersion);
        assert!(unknown.error().to_string().contains("unknown version"));
        assert_eq!(store.device(name).unwrap(), None);
        let taken = store.claim(name, Path::new("/x"), |_| false).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::NameInUse);
        let same = Device {
            info: crate::contract::DeviceInfo { name: (*name).to_owned(), ..known.info.clone() },
            ..known.clone()
        };
        assert!(store.enter(&same, |_| false).is_err());
        assert!(!store.update(&same, &same).unwrap() && !store.remove(&same).unwrap());
        store.sweep();
        assert_eq!(fs::read_to_string(store.path(name)).unwrap(), content);
    }
    // What is new and may be ignored is not an obstacle.
    let more = text.replace("\"entry\":{", "\"mood\":\"fine\",\"entry\":{\"mood\":\"fine\",");
    fs::write(store.path("one"), more).unwrap();
    assert_eq!(store.device("one").unwrap(), Some(known));
}

#[test]
fn a_record_of_another_boot_means_nothing() {
    let (_temp, store) = store();
    store.claim("one", Path::new(IMAGE), |_| true).unwrap().fill(&device("one", 3)).unwrap();
    let later = Store { boot_id: "another".to_owned(), ..store.clone() };
    assert_eq!(later.device("one").unwrap(), None);
    assert_eq!(later.entries().unwrap(), []);
    assert!(store.path("one").exists(), "a look changes nothing");
    later.claim("one", Path::new(IMAGE), |_| true).unwrap();
}

#[test]
fn another_use_of_the_name_is_left_alone() {
    let (_temp, store) = store();
    let old = device("one", 3);
    let mut new = device("one", 3);
    new.info.diskseq = Some(8);
    store.claim("one", Path::new(IMAGE), |_| true).unwrap().fill(&new).unwrap();
    assert!(!store.remove(&old).unwrap());
    assert!(!store.update(&old, &old).unwrap());
    assert_eq!(store.device("one").unwrap(), Some(new.clone()));
    assert!(store.remove(&new).unwrap());
    assert_eq!(store.device("one").unwrap(), None);
}

#[test]
fn what_is_no_record_is_not_looked_at() {
    let (_temp, store) = store();
    for file in [".lock", ".one.7.new", "one.json.corrupt", "notes", "..json"] {
        fs::write(store.runtime.records().join(file), "x").unwrap();
    }
    assert_eq!(store.entries().unwrap(), []);
    assert_eq!(fs::read(store.runtime.records().join("notes")).unwrap(), b"x");
}

#[test]
fn recording_one_device_waits_for_no_other() {
    let (_temp, store) = store();
    let busy = store.lock("one").unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // All that is done about another device, while the first one's record is locked.
            let (two, mut later) = (device("two", 2), device("two", 2));
            later.info.size = 4096;
            store.claim("two", Path::new(IMAGE), |_| true).unwrap().fill(&two).unwrap();
            assert!(store.update(&two, &later).unwrap());
            assert!(store.remove(&later).unwrap());
            store.enter(&two, |_| true).unwrap();
            sender.send("two").unwrap();
            drop(store.claim("one", Path::new(IMAGE), |_| true).unwrap());
            sender.send("one").unwrap();
        });
        let patience = std::time::Duration::from_secs(60);
        assert_eq!(receiver.recv_timeout(patience), Ok("two"));
        let none = receiver.recv_timeout(std::time::Duration::from_millis(50));
        assert!(none.is_err(), "the same name is waited for");
        drop(busy);
        assert_eq!(receiver.recv_timeout(patience), Ok("one"));
    });
}

#[test]
fn a_device_that_is_there_takes_a_name_that_is_free() {
    let (_temp, store) = store();
    let one = device("one", 3);
    store.enter(&one, |_| true).unwrap();
    assert_eq!(store.device("one").unwrap(), Some(one.clone()));
    let error = store.enter(&device("one", 4), |_| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NameInUse);
    assert_eq!(store.device("one").unwrap(), Some(one));
    let names: Vec<_> =
        fs::read_dir(store.runtime.records()).unwrap().map(|item| item.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "the record and the locks, and nothing half written: {names:?}");
    // The device that had it is gone.
    store.enter(&device("one", 4), |_| false).unwrap();
    assert_eq!(store.device("one").unwrap(), Some(device("one", 4)));
}

#[test]
fn names_have_places_of_their_own() {
    let names: Vec<String> = (0..100_000).map(|number| format!("ublkb{number}")).collect();
    let places: std::collections::HashSet<u64> = names.iter().map(|name| hash(name) >> 1).collect();
    assert_eq!(places.len(), names.len());
}

/// An older becket ignores the format, and its records have none.
#[test]
fn the_format_is_optional_in_a_record() {
    let plain = device("one", 1);
    let with = Device { format: Some("raw".to_owned()), ..plain.clone() };
    let [plain_text, text] = [&plain, &with].map(|device| serde_json::to_value(device).unwrap());
    assert_eq!((&text["format"], text.get("needs")), (&"raw".into(), None));
    assert!(plain_text.get("format").is_none());
    assert_eq!(serde_json::from_value::<Device>(text).unwrap(), with);
    assert_eq!(serde_json::from_value::<Device>(plain_text).unwrap(), plain);
}
