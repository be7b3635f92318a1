//! The store of images on web servers when the power goes: what it says to have must be there. Its file
//! system is on a device whose writes are logged.
//! Sends only to the loopback address.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use becket_testkit::{Scratch, image, origin::Origin, tool};

use super::{Logged, MIB, begin_of, common::below::Below, copy_of, log};

const SIZE: u64 = 64 * MIB;
/// Length of each image.
const LEN: u64 = 8 * MIB;
const IMAGES: u64 = 2;
/// How long a fetcher rests until it syncs what it has brought, and some more.
const REST: Duration = Duration::from_secs(4);

/// Images on a web server, and the log of a store that got them.
pub(crate) struct Recorded {
    log: PathBuf,
    images: Vec<(Origin, Vec<u8>)>,
}

fn store_below(point: &Path) -> String {
    point.join("store").display().to_string()
}

/// Syncs the tables of the store, and nothing else, again and again: the kernel may write any page early, and
/// these least of all may say more than there is. Returns how often.
fn hurry(point: &Path, stop: &AtomicBool) -> u64 {
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        for object in fs::read_dir(point.join("store/v1")).into_iter().flatten().flatten() {
            if let Ok(table) = File::open(object.path().join("table")) {
                table.sync_data().unwrap();
                count += 1;
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    count
}

impl Recorded {
    /// Brings images into a store: one for a device whose reader rests from time to time, one as a whole.
    pub(crate) fn new(place: &Scratch) -> Recorded {
        let logged = Logged::new(place, SIZE);
        let (device, point) = (logged.mapped.device(), place.dir("mnt"));
        tool(Command::new("mkfs.ext4").args(["-q", "-F", "-E", "lazy_itable_init=0"]).arg(&device));
        // Only a sync makes bytes last before the file system says that they are there.
        tool(Command::new("mount").args(["-o", "data=writeback"]).arg(&device).arg(&point));
        logged.mark("begin");
        let image = |number| {
            let path = place.path("random");
            image::random(&path, LEN, number);
            let bytes = fs::read(path).unwrap();
            (Origin::start(bytes.clone()), bytes)
        };
        let images: Vec<_> = (1..=IMAGES).map(image).collect();
        let (store, url) = (store_below(&point), images[0].0.url("/1.img"));
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let hurries = scope.spawn(|| hurry(&point, &stop));
            let attached = place.ok(["attach", "--via", "ublk", "--store", &store, &url]);
            let disk = File::open(attached.trim()).unwrap();
            let mut bytes = vec![0; 256 << 10];
            for part in 0..LEN / bytes.len() as u64 {
                // Now here, now there.
                let at = part * 13 % (LEN / bytes.len() as u64) * bytes.len() as u64;
                disk.read_exact_at(&mut bytes, at).unwrap();
                if part % 8 == 7 {
                    thread::sleep(REST);
                }
            }
            drop(disk);
            place.ok(["detach", "--all"]);
            place.ok(["store", "prefetch", "--store", &store, &images[1].0.url("/2.img")]);
            stop.store(true, Ordering::Relaxed);
            assert!(hurries.join().unwrap() > 10, "the tables were synced early");
        });
        becket_testkit::umount(&point);
        Recorded { log: logged.log.clone(), images }
    }

    /// Looks at the store at so many places of the log; the numbers of it all, in words.
    pub(crate) fn replay(&self, place: &Scratch, points: usize) -> String {
        let (file, entries) = log::entries(&self.log);
        let disk = place.path("disk");
        image::sparse(&disk, SIZE);
        let disk_file = File::options().write(true).open(&disk).unwrap();
        let begin = begin_of(&entries);
        let (cuts, chosen) = log::cuts(&entries, begin, points);
        let mut most = 0;
        for (index, entry) in entries.iter().enumerate() {
            entry.replay(&file, &disk_file);
            if chosen.contains(&index) {
                let (good, damaged) = self.found(place, &copy_of(place, &disk), true);
                assert_eq!(damaged, 0, "entry {index} of {}, {good} bytes are good", entries.len());
                most = most.max(good);
            }
        }
        assert_eq!(most, IMAGES * LEN, "what was synced is there in the end");
        // The check itself: a disk that has lost a part of it is found out.
        image::sparse(&disk, SIZE);
        for (index, entry) in entries.iter().enumerate() {
            if index < begin || index % 4 != 0 || !entry.has_bytes() || entry.len < 32 << 10 {
                entry.replay(&file, &disk_file);
            }
        }
        let (good, damaged) = self.found(place, &copy_of(place, &disk), false);
        assert!(damaged > 0, "a lost quarter is not found: {good} bytes are good");
        format!(
            "a store: {} writes logged, {} places where the power could have gone, {} looked at: \
             nothing was there that the power had taken",
            entries.iter().filter(|entry| entry.has_bytes()).count(),
            cuts,
            chosen.len()
        )
    }

    /// How many bytes of the store are good and how many are not, after a power cut has left this disk. What
    /// is read through the store afterwards must be right, and what it had is fetched `once` only.
    fn found(&self, place: &Scratch, disk: &Path, once: bool) -> (u64, u64) {
        let (device, point) = (Below::new(disk, &[]), place.dir("mnt"));
        tool(Command::new("mount").arg(device.path()).arg(&point));
        let store = store_below(&point);
        let (mut good, mut damaged) = (0, 0);
        // A cut may come before there is a store.
        if Path::new(&store).exists() {
            let said = rebooted(place, &["--json", "store", "verify", "--store", &store]);
            let said: serde_json::Value = serde_json::from_slice(&said).unwrap();
            let sum = |key: &str| {
                let objects = said["verified"].as_array().unwrap().iter();
                objects.map(|object| object[key].as_u64().unwrap()).sum::<u64>()
            };
            (good, damaged) = (sum("good"), sum("damaged"));
        }
        let before: u64 = self.images.iter().map(|(origin, _)| origin.sent()).sum();
        for (number, (origin, bytes)) in (1..).zip(&self.images) {
            let url = origin.url(&format!("/{number}.img"));
            assert!(rebooted(place, &["cat", "--store", &store, &url]) == *bytes, "image {number}");
        }
        let sent = self.images.iter().map(|(origin, _)| origin.sent()).sum::<u64>() - before;
        let first = IMAGES * (64 << 10);
        assert!(!once || sent <= IMAGES * LEN - good + first, "{sent} bytes though {good} were there");
        becket_testkit::umount(&point);
        (good, damaged)
    }
}

/// What a command prints after the machine was started anew, as far as the command can tell.
fn rebooted(place: &Scratch, words: &[&str]) -> Vec<u8> {
    let boot = place.path("boot_id");
    fs::write(&boot, "01234567-89ab-cdef-0123-456789abcdef\n").unwrap();
    let script = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
    let becket = place.becket();
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script]).arg(&boot).arg(becket.get_program());
    place.prepare(&mut command);
    let ran = command.args(words).output().unwrap();
    let may_find_damage = words.contains(&"verify");
    let code = ran.status.code();
    assert!(code == Some(0) || (may_find_damage && code == Some(1)), "{words:?}: {ran:?}");
    ran.stdout
}
