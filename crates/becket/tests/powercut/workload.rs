//! A program that relies on fsync beside one that does not, and what the first may rely on after each
//! promise.
//! It never counts on anything that no fsync has promised.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write as _,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use becket_testkit::image::random_bytes;

/// Names that are written again and again.
const NAMES: u64 = 12;

/// What promise `number` is about: a name, and which content it has from then on.
fn promise(number: u64) -> (String, Vec<u8>) {
    let len = 1 + number * 7919 % 90_000;
    (format!("{}", number * 5 % NAMES), random_bytes(usize::try_from(len).unwrap(), number))
}

/// Makes each promise in turn: a file is written, synced and put in its name's place; `promised` hears of it.
pub(crate) fn keep_promises(dir: &Path, count: u64, mut promised: impl FnMut(u64)) {
    let own = dir.join("promises");
    fs::create_dir(&own).unwrap();
    File::open(dir).unwrap().sync_all().unwrap();
    for number in 0..count {
        let (name, content) = promise(number);
        let (new, place) = (own.join("new"), own.join(name));
        let mut file = File::create(&new).unwrap();
        file.write_all(&content).unwrap();
        file.sync_all().unwrap();
        fs::rename(&new, &place).unwrap();
        File::open(&own).unwrap().sync_all().unwrap();
        promised(number);
    }
}

/// What is missing of the first `kept` promises, of which more may have been made.
pub(crate) fn broken(dir: &Path, kept: u64, made: u64) -> Option<String> {
    let mut names: BTreeMap<String, u64> = BTreeMap::new();
    for number in 0..kept {
        names.insert(promise(number).0, number);
    }
    names.into_iter().find_map(|(name, number)| {
        let there = match fs::read(dir.join("promises").join(&name)) {
            Ok(there) => there,
            Err(error) => return Some(format!("{name}, of promise {number}: {error}")),
        };
        let mut later = (number..made).filter(|later| promise(*later).0 == name);
        let found = later.any(|later| promise(later).1 == there);
        (!found).then(|| format!("{name} holds {} bytes that are not those of promise {number}", there.len()))
    })
}

/// Makes, fills, cuts, renames and removes files without a sync, until stopped; how often.
pub(crate) fn make_noise(dir: &Path, stop: &AtomicBool) -> u64 {
    let own = dir.join("noise");
    fs::create_dir(&own).unwrap();
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let mut done = 0;
    while !stop.load(Ordering::Relaxed) {
        let path = own.join(format!("{}", next(24)));
        let other = own.join(format!("{}", next(24)));
        // What is not there cannot be renamed or removed: that is not a failure here.
        match next(8) {
            0 => drop(fs::remove_file(&path)),
            1 => drop(fs::rename(&path, &other)),
            2 => drop(fs::hard_link(&path, &other)),
            3 => drop(File::options().write(true).open(&path).map(|file| file.set_len(next(200_000)))),
            _ => {
                let file = File::options().create(true).write(true).truncate(false).open(&path).unwrap();
                let bytes = random_bytes(usize::try_from(next(60_000)).unwrap(), done);
                file.write_all_at(&bytes, next(150_000)).unwrap();
            }
        }
        done += 1;
    }
    done
}
