//! Devices that are changed while they live: the first one under its load, and one without other users.
//! It looks at what it has changed, and never takes becket's word for it.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt as _,
    path::Path,
    time::Duration,
};

use becket_testkit::image;

use super::{Soak, TAIL};
use crate::common::load::{BLOCK, Random, SIZE};
use crate::course::RAW;

const NAME: &str = "changed";
const LEN: usize = 4 << 20;

pub(super) fn change(soak: &Soak<'_>) {
    let images = ["one.img", "other.img"].map(|name| soak.place.path(name));
    let mut contents = [1, 2].map(|more| image::random_bytes(LEN, soak.seed + more));
    for (path, content) in images.iter().zip(&contents) {
        fs::write(path, content).unwrap();
    }
    let mut shown = 0;
    soak.attach(&["--via", soak.via, images[0].to_str().unwrap()], NAME);
    let device = soak.place.links().join(NAME);
    let mut random = Random::new(soak.seed + 3000);
    let changes = if soak.via == "loop" { 3 } else { 4 };
    soak.again_and_again(Duration::from_millis(50), || match random.below(changes) {
        0 => {
            let word = ["off", "auto"][random.below(2)];
            soak.ok(&["set", "--direct-io", word, RAW]);
            soak.count("changes of direct I/O under load");
        }
        1 => {
            let limit =
                SIZE as u64 + TAIL / 2 + random.below(TAIL as usize / 2 / BLOCK + 1) as u64 * BLOCK as u64;
            soak.ok(&["set", "--force", "--size-limit", &limit.to_string(), RAW]);
            let raw = fs::canonicalize(soak.place.links().join(RAW)).unwrap();
            assert_eq!(sectors(&raw) * 512, limit, "the kernel's own length");
            soak.count("changes of length under load");
        }
        2 => {
            soak.ok(&["set", "--read-only", "on", NAME]);
            let before = fs::read(&device).unwrap();
            soak.seen.compare(&before, &contents[shown], 0);
            let at = random.below(LEN / BLOCK) * BLOCK;
            write(&device, at, 0xff).expect_err("it is read-only");
            soak.ok(&["set", "--read-only", "off", NAME]);
            write(&device, at, 0x5a).unwrap();
            contents[shown][at..at + BLOCK].fill(0x5a);
            soak.seen.compare(&fs::read(&device).unwrap(), &contents[shown], 0);
            soak.count("frozen, thawed");
        }
        _ => {
            shown = 1 - shown;
            let path = images[shown].to_str().unwrap();
            let there = |_: &_| soak.device(NAME).is_some_and(|info| info["image"] == path);
            soak.call(&["set", "--image", path, NAME], there);
            soak.seen.compare(&fs::read(&device).unwrap(), &contents[shown], 0);
            soak.count("changes of the image");
        }
    });
    soak.detach(NAME);
    for (path, content) in images.iter().zip(&contents) {
        soak.seen.compare(&fs::read(path).unwrap(), content, 0);
    }
}

fn write(device: &Path, at: usize, byte: u8) -> std::io::Result<()> {
    let file = OpenOptions::new().write(true).open(device)?;
    file.write_all_at(&[byte; BLOCK], at as u64)?;
    file.sync_all()
}

fn sectors(device: &Path) -> u64 {
    let name = device.file_name().unwrap().to_str().unwrap();
    fs::read_to_string(format!("/sys/class/block/{name}/size")).unwrap().trim().parse().unwrap()
}
