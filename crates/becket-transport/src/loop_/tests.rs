//! The loop transport on the kernel's own devices, as root. Every test leaves nothing attached.

use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use becket_image::{DirectIo, Format, OpenOptions, Source, Tail};
use becket_testkit as testkit;
use becket_uapi::lock;

use super::device::{name, open_exclusive, path};
use super::range::Range;
use super::*;
use crate::{ErrorKind, node, sysfs};

const MIB: u64 = 1 << 20;
const PATIENCE: Option<Duration> = Some(Duration::from_secs(10));

fn open_options() -> OpenOptions {
    OpenOptions {
        tail: Tail::Cut,
        read_only: false,
        unwritable: None,
        direct_io: DirectIo::Auto,
        offset: 0,
        size_limit: None,
        block_size: None,
        shared: false,
        partitions: false,
        backing_dirs: Vec::new(),
        backing_urls: Vec::new(),
        cow: None,
        below: None,
        no_limits: false,
        drop_bitmaps: false,
        format: Format::Auto,
        fillers: becket_image::Fillers::default(),
        rehearsal: false,
        patience: None,
    }
}

/// Whether the driver is there and this is root, nodes or not; when not, the test is skipped.
fn ready(name: &str) -> bool {
    let there = Path::new("/sys/class/misc/loop-control").exists() || Path::new("/dev/loop-control").exists();
    if !there {
        testkit::skip(name, "needs the kernel's loop driver");
    }
    there && testkit::require_root(name)
}

/// A scratch image and what is attached of it; detached at the end, also of a test that fails.
struct Case {
    directory: tempfile::TempDir,
    devices: Vec<LoopDevice>,
}

impl Case {
    /// With `image` of so many bytes, random ones.
    fn new(bytes: u64) -> Case {
        let directory = tempfile::tempdir().unwrap();
        testkit::image::random(&directory.path().join("image"), bytes, bytes);
        Case { directory, devices: Vec::new() }
    }

    fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    fn open(&self, options: &OpenOptions) -> Opened {
        becket_image::open(&self.image(), options).unwrap()
    }

    /// Attaches; the image's descriptors are closed again, as a command's are when it ends.
    fn attach(&mut self, open: &OpenOptions, options: &LoopOptions) -> &LoopDevice {
        let device = attach(&self.open(open), options).unwrap();
        self.devices.push(device);
        self.devices.last().unwrap()
    }

    fn status(&self) -> LoopStatus {
        status(self.devices[0].number).unwrap().unwrap()
    }

    /// Detaches the only device and returns what became of it.
    fn detach(&mut self) -> Cleared {
        let LoopDevice { number, diskseq, fd, .. } = self.devices.pop().unwrap();
        drop(fd);
        detach_again(number, diskseq)
    }
}

/// Detaches a device that may be gone already: then its number may be another test's by now.
fn detach_again(number: u32, diskseq: u64) -> Cleared {
    match detach(number, Some(diskseq), PATIENCE) {
        Err(Error::OtherDevice { found, .. }) if found > diskseq => Cleared::Gone,
        other => other.unwrap(),
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        for LoopDevice { number, diskseq, fd, .. } in self.devices.drain(..) {
            drop(fd);
            let _ = detach(number, Some(diskseq), PATIENCE);
        }
    }
}

/// The device's bytes, past its page cache.
fn read_device(path: &Path) -> Vec<u8> {
    let mut device = fs::File::open(path).unwrap();
    becket_uapi::block::flush_buffers(device.as_fd()).unwrap();
    let mut bytes = Vec::new();
    device.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_whole_image_is_attached_and_goes() {
    if !ready("loop_whole") {
        return;
    }
    let mut case = Case::new(8 * MIB);
    let image = fs::metadata(case.image()).unwrap();
    let device = case.attach(&open_options(), &LoopOptions::default());
    let (number, path, diskseq, direct) =
        (device.number, device.path.clone(), device.diskseq, device.direct_io);
    assert_eq!(read_device(&path), fs::read(case.image()).unwrap());

    let status = case.status();
    assert_eq!((status.size, status.offset, status.size_limit), (8 * MIB, 0, 0));
    assert_eq!((status.block_size, status.read_only, status.autoclear), (512, false, false));
    assert_eq!((status.dev, status.ino), (image.dev(), image.ino()));
    assert_eq!(status.backing, case.image());
    assert_eq!((status.diskseq, status.direct_io), (Some(diskseq), direct));
    assert!(numbers().contains(&number));

    assert_eq!(case.detach(), Cleared::Gone);
    // Another test may have the number by now.
    let now = super::status(number).unwrap();
    assert!(now.is_none_or(|other| other.diskseq != Some(diskseq)));
}

#[test]
fn an_offset_and_a_limit_hide_what_is_outside() {
    if !ready("loop_offset") {
        return;
    }
    let mut case = Case::new(4 * MIB);
    let before = fs::read(case.image()).unwrap();
    let open = OpenOptions { offset: 1536, size_limit: Some(MIB), ..open_options() };
    let path = case.attach(&open, &LoopOptions::default()).path.clone();
    assert_eq!(read_device(&path), before[1536..][..MIB as usize]);
    assert_eq!((case.status().offset, case.status().size_limit), (1536, MIB));

    let mut device = fs::File::options().write(true).open(&path).unwrap();
    device.write_all(&vec![0xa5; MIB as usize]).unwrap();
    assert!(device.write_all(&[0; 512]).is_err(), "there is an end");
    device.sync_all().unwrap();
    drop(device);
    assert_eq!(case.detach(), Cleared::Gone);
    let after = fs::read(case.image()).unwrap();
    assert!(after[..1536] == before[..1536], "bytes before the offset changed");
    assert!(after[1536..][..MIB as usize].iter().all(|&byte| byte == 0xa5));
    assert!(after[1536 + MIB as usize..] == before[1536 + MIB as usize..], "bytes after the limit changed");
}

#[test]
fn an_image_that_grew_is_taken_over_unless_its_length_was_chosen() {
    if !ready("loop_refresh") {
        return;
    }
    for (fixed_size, expected) in [(false, 3 * MIB), (true, 2 * MIB)] {
        let mut case = Case::new(2 * MIB);
        let options = LoopOptions { fixed_size, ..LoopOptions::default() };
        let number = case.attach(&open_options(), &options).number;
        fs::File::options().write(true).open(case.image()).unwrap().set_len(3 * MIB).unwrap();
        assert_eq!(refresh(number).unwrap(), expected, "fixed_size: {fixed_size}");
        assert_eq!(case.status().size, expected);
    }
}

#[test]
fn a_tail_that_fills_no_block_is_not_offered() {
    if !ready("loop_tail") {
        return;
    }
    let mut case = Case::new(MIB + 1536);
    let open = OpenOptions { block_size: Some(4096), ..open_options() };
    case.attach(&open, &LoopOptions::default());
    let status = case.status();
    assert_eq!((status.size, status.block_size, status.size_limit), (MIB, 4096, MIB));
}

#[test]
fn a_read_only_device_refuses_writes() {
    if !ready("loop_read_only") {
        return;
    }
    let mut case = Case::new(MIB);
    let before = fs::read(case.image()).unwrap();
    let open = OpenOptions { read_only: true, ..open_options() };
    let path = case.attach(&open, &LoopOptions::default()).path.clone();
    assert!(case.status().read_only);
    let mut device = fs::File::options().write(true).open(&path).unwrap();
    let written = device.write_all(&[1; 512]).and_then(|()| device.sync_all());
    assert_eq!(written.map_err(|error| error.raw_os_error()), Err(Some(libc::EPERM)));
    drop(device);
    case.detach();
    assert!(fs::read(case.image()).unwrap() == before);
}

#[test]
fn direct_io_is_what_the_driver_says_it_is() {
    if !ready("loop_direct_io") {
        return;
    }
    let mut case = Case::new(8 * MIB);
    let opened = case.open(&open_options());
    let Source::File(file) = &opened.sources[0] else { panic!() };
    let possible = file.facts.direct;
    drop(opened);

    let off = LoopOptions { direct_io: DirectIo::Off, ..LoopOptions::default() };
    assert!(!case.attach(&OpenOptions { direct_io: DirectIo::Off, ..open_options() }, &off).direct_io);
    assert!(!case.status().direct_io);
    case.detach();

    let device = case.attach(&open_options(), &LoopOptions::default());
    let (direct, warnings) = (device.direct_io, device.warnings.clone());
    assert_eq!(case.status().direct_io, direct);
    match possible {
        Some(align) if align.offset <= 512 && align.memory <= 512 => assert!(direct, "{warnings:?}"),
        Some(_) => assert!(!direct && warnings.len() == 1, "a silent fallback"),
        None => assert!(!direct && warnings.is_empty(), "nothing was asked for"),
    }
    // Whatever was decided, requests of one block must work, also past the device's own cache.
    let mut device = fs::File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(&case.devices[0].path)
        .unwrap();
    let mut room = vec![0u8; 2048];
    let start = room.as_ptr().align_offset(512);
    device.seek(SeekFrom::Start(512)).unwrap();
    device.read_exact(&mut room[start..][..512]).unwrap();
    assert!(room[start..][..512] == fs::read(case.image()).unwrap()[512..1024]);
    device.write_all(&room[start..][..512]).unwrap();
}

/// What the facts would allow and the driver cannot do.
#[test]
fn direct_io_that_would_fail_is_not_asked_for() {
    let case = Case::new(MIB);
    let mut opened = case.open(&open_options());
    let align = |memory, offset| Some(becket_image::Alignment { memory, offset });
    for (direct, at, asks) in [
        (align(4, 512), 0, true),
        (align(512, 512), 1024, true),
        (align(4, 4096), 0, false),
        (align(4, 512), 1000, false),
        (align(4096, 512), 0, false),
        (None, 0, false),
    ] {
        let Source::File(file) = &mut opened.sources[0] else { panic!() };
        file.facts.direct = direct;
        let Source::File(file) = &opened.sources[0] else { panic!() };
        let range = Range { file, offset: at, len: 4096 };
        let auto = direct::wish(&opened, &range, DirectIo::Auto).unwrap();
        assert_eq!(auto == direct::Wish::Ask, asks, "{direct:?} at {at}");
        assert_eq!(direct::wish(&opened, &range, DirectIo::On).is_ok(), asks, "{direct:?} at {at}");
        assert_eq!(direct::wish(&opened, &range, DirectIo::Off).unwrap(), direct::Wish::Without);
    }
}

/// An offset that no direct I/O can have: some drivers drop the flag in silence, others fail requests later.
#[test]
fn direct_io_that_was_demanded_is_done_or_refused() {
    if !ready("loop_direct_io_refused") {
        return;
    }
    let mut case = Case::new(8 * MIB);
    let at = OpenOptions { offset: 100, ..open_options() };
    let auto = attach(&case.open(&at), &LoopOptions::default()).unwrap();
    let (direct, warned) = (auto.direct_io, auto.warnings.len());
    case.devices.push(auto);
    assert!(!direct);
    assert!(warned <= 1);
    case.detach();

    let demanded = LoopOptions { direct_io: DirectIo::On, ..LoopOptions::default() };
    let error = attach(&case.open(&at), &demanded).unwrap_err();
    assert!(matches!(error, Error::NoDirectIo { .. }), "{error}");
    assert!(error.hint().is_some());
    let image = case.image();
    // One that cannot be asked is not becket's, over a file system that is gone.
    let left = |number| matches!(super::status(number), Ok(Some(status)) if status.backing == image);
    assert!(!numbers().into_iter().any(left), "the refused device is still attached");
}

#[test]
fn an_autoclear_device_goes_with_its_last_descriptor() {
    if !ready("loop_autoclear") {
        return;
    }
    let mut case = Case::new(MIB);
    let options = LoopOptions { autoclear: true, ..LoopOptions::default() };
    let (number, diskseq) = {
        let device = case.attach(&open_options(), &options);
        (device.number, device.diskseq)
    };
    assert!(case.status().autoclear);
    drop(case.devices.pop());
    let gone = testkit::wait_until(Duration::from_secs(5), || {
        node::diskseq(&name(number)) != Some(diskseq) || !numbers().contains(&number)
    });
    assert!(gone, "{} is still there", name(number));
    assert_eq!(detach_again(number, diskseq), Cleared::Gone);
}

#[test]
fn a_device_in_use_goes_when_it_is_closed() {
    if !ready("loop_in_use") {
        return;
    }
    let mut case = Case::new(MIB);
    let device = case.attach(&open_options(), &LoopOptions::default());
    let (number, diskseq) = (device.number, device.diskseq);
    assert_eq!(detach(number, Some(diskseq), Some(Duration::from_millis(50))).unwrap(), Cleared::WhenUnused);
    assert_eq!(read_device(&path(number)).len() as u64, MIB, "its users keep it");
    assert_eq!(case.detach(), Cleared::Gone);
}

/// Whatever its use is, a device that is only to go when it is unused is left as it was.
#[test]
fn a_device_in_use_is_left_alone_when_that_is_asked_for() {
    if !ready("loop_unused") {
        return;
    }
    for autoclear in [false, true] {
        let mut case = Case::new(MIB);
        let options = LoopOptions { autoclear, ..LoopOptions::default() };
        let device = case.attach(&open_options(), &options);
        let (number, diskseq) = (device.number, device.diskseq);
        // By a descriptor, the one of `device`.
        assert!(!detach_unused(number, Some(diskseq)).unwrap());
        assert_eq!(case.status().autoclear, autoclear, "a wish to go must not stay behind, nor be lost");
        // Exclusively, as a mount does.
        let exclusive = open_exclusive(number).unwrap();
        assert!(!detach_unused(number, Some(diskseq)).unwrap());
        drop(exclusive);
        let status = case.status();
        assert_eq!((status.autoclear, status.diskseq), (autoclear, Some(diskseq)));
        // The other's number, held or not, is not ours to wait for.
        let error = detach_unused(number, Some(diskseq - 1)).unwrap_err();
        assert!(matches!(error, Error::OtherDevice { .. }), "{error}");

        let LoopDevice { fd, .. } = case.devices.pop().unwrap();
        drop(fd);
        let gone = detach_unused(number, Some(diskseq));
        // Gone before we asked, and the number another test's by now.
        let taken = matches!(gone, Err(Error::OtherDevice { found, .. }) if autoclear && found > diskseq);
        assert!(taken || gone.unwrap());
        assert_ne!(super::status(number).unwrap().and_then(|status| status.diskseq), Some(diskseq));
    }
}

/// A use of a partition is a use of the disk.
#[test]
fn an_open_partition_is_a_use() {
    if !ready("loop_unused_partition") || !testkit::require_tools("loop_unused_partition", &["sfdisk"]) {
        return;
    }
    let mut case = Case::new(8 * MIB);
    testkit::image::gpt(&case.image(), 8 * MIB);
    let open = OpenOptions { partitions: true, ..open_options() };
    let device = case.attach(&open, &LoopOptions { partitions: true, ..LoopOptions::default() });
    let (number, diskseq, partition) = (device.number, device.diskseq, device.partitions[0].clone());
    let LoopDevice { fd, .. } = case.devices.pop().unwrap();
    drop(fd);
    for flags in [0, libc::O_EXCL] {
        let user = fs::File::options().read(true).custom_flags(flags).open(&partition).unwrap();
        assert!(!detach_unused(number, Some(diskseq)).unwrap());
        assert!(!super::status(number).unwrap().unwrap().autoclear);
        drop(user);
    }
    assert!(detach_unused(number, Some(diskseq)).unwrap());
}

#[test]
fn the_locks_live_as_long_as_the_device() {
    if !ready("loop_locks") {
        return;
    }
    let mut case = Case::new(MIB);
    case.attach(&open_options(), &LoopOptions::default());
    let probe = fs::File::options().read(true).write(true).open(case.image()).unwrap();
    let locked = || lock::ofd_test(probe.as_fd(), lock::LockKind::Exclusive, 0, 0).unwrap();
    assert!(locked(), "the command's descriptors are closed, the driver's must hold the locks");
    assert!(becket_image::open(&case.image(), &open_options()).is_err());
    assert_eq!(case.detach(), Cleared::Gone);
    assert!(testkit::wait_until(Duration::from_secs(5), || !locked()));
}

#[test]
fn another_devices_number_is_never_cleared() {
    if !ready("loop_diskseq") {
        return;
    }
    let mut case = Case::new(MIB);
    let device = case.attach(&open_options(), &LoopOptions::default());
    let (number, diskseq) = (device.number, device.diskseq);
    let error = detach(number, Some(diskseq + 1000), PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert!(super::status(number).unwrap().is_some());
}

#[test]
fn many_at_once_each_get_their_own() {
    if !ready("loop_storm") {
        return;
    }
    let mut case = Case::new(MIB);
    let images: Vec<_> = (0..16u64)
        .map(|index| {
            let path = case.directory.path().join(format!("image{index}"));
            testkit::image::random(&path, MIB, 1000 + index);
            path
        })
        .collect();
    let barrier = std::sync::Barrier::new(images.len());
    let attached: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = images
            .iter()
            .map(|image| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let opened = becket_image::open(image, &open_options()).unwrap();
                    barrier.wait();
                    attach(&opened, &LoopOptions::default())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (devices, errors): (Vec<_>, Vec<_>) = attached.into_iter().partition(Result::is_ok);
    case.devices.extend(devices.into_iter().flatten());
    assert!(errors.is_empty(), "{errors:?}");
    let mut taken: Vec<_> = case.devices.iter().map(|device| device.number).collect();
    taken.sort_unstable();
    taken.dedup();
    assert_eq!(taken.len(), 16, "two threads were given one device");
    for (device, image) in case.devices.iter().zip(&images) {
        assert!(
            read_device(&device.path) == fs::read(image).unwrap(),
            "{} has another's bytes",
            device.number
        );
    }
}

/// A container's `/dev`: no loop-control, no devices, no partitions, and nothing that would make them.
#[test]
fn an_empty_dev_is_enough() {
    if !ready("loop_empty_dev") || !testkit::require_tools("loop_empty_dev", &["unshare", "sfdisk"]) {
        return;
    }
    let script = "mount -t tmpfs tmpfs /dev && mknod /dev/null c 1 3 && umask 077 && exec \"$0\" \"$@\"";
    let run = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "loop_::tests::inside_an_empty_dev", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "an_empty_dev_is_enough runs it, in a mount namespace of its own"]
fn inside_an_empty_dev() {
    assert!(!Path::new("/dev/loop-control").exists(), "this would meddle with the machine's /dev");
    assert!(LoopTransport.probe().works && examine().works);
    assert!(!Path::new("/dev/loop-control").exists() && !Path::new("/dev/loop0").exists());
    let mut case = Case::new(MIB);
    testkit::image::gpt(&case.image(), 16 * MIB);
    let open = OpenOptions { partitions: true, ..open_options() };
    let options = LoopOptions { partitions: true, ..LoopOptions::default() };
    let device = case.attach(&open, &options);
    assert_eq!(device.partitions.len(), 2);
    for node in device.partitions.iter().chain([&device.path]) {
        let made = fs::metadata(node).unwrap();
        assert!(made.file_type().is_block_device());
        assert_eq!(made.mode() & 0o777, 0o660, "whatever the umask");
        assert!(fs::File::open(node).is_ok());
    }
    assert_eq!(case.detach(), Cleared::Gone);
}

#[test]
fn partitions_are_there_when_attach_returns() {
    if !ready("loop_partitions") || !testkit::require_tools("loop_partitions", &["sfdisk"]) {
        return;
    }
    let mut case = Case::new(MIB);
    testkit::image::gpt(&case.image(), 16 * MIB);
    let mut file = fs::File::options().write(true).open(case.image()).unwrap();
    for (index, (start, _)) in testkit::image::GPT_PARTITIONS.into_iter().enumerate() {
        file.seek(SeekFrom::Start(start * 512)).unwrap();
        file.write_all(format!("partition {index}").as_bytes()).unwrap();
    }
    drop(file);
    let open = OpenOptions { partitions: true, ..open_options() };
    let options = LoopOptions { partitions: true, ..LoopOptions::default() };
    let device = case.attach(&open, &options);
    let (number, nodes) = (device.number, device.partitions.clone());
    assert_eq!(nodes, [format!("/dev/loop{number}p1"), format!("/dev/loop{number}p2")].map(PathBuf::from));
    for (index, node) in nodes.iter().enumerate() {
        let bytes = read_device(node);
        assert_eq!(bytes.len() as u64, testkit::image::GPT_PARTITIONS[index].1 * 512);
        assert!(bytes.starts_with(format!("partition {index}").as_bytes()));
    }
    let known = node::partitions(&name(number));
    assert_eq!(known.iter().map(|known| known.start / 512).collect::<Vec<_>>(), [2048, 10240]);

    // What the kernel does not know is added by hand, and its node is made.
    let disk = fs::File::open(path(number)).unwrap();
    becket_uapi::block::partition_del(disk.as_fd(), 2).unwrap();
    let _ = fs::remove_file(&nodes[1]);
    let promised = case.open(&OpenOptions { shared: true, ..open }).partitions;
    assert_eq!(
        node::await_partitions(&name(number), &promised, Duration::from_secs(5)).unwrap().paths,
        nodes
    );
    assert!(read_device(&nodes[1]).starts_with(b"partition 1"));

    // One that cannot be is an error with a name, not a wait without end.
    let mut wrong = promised.clone();
    wrong[0].start += MIB;
    let error = node::await_partitions(&name(number), &wrong, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, Error::PartitionElsewhere { number: 1, .. }), "{error}");
    drop(disk);
    assert_eq!(case.detach(), Cleared::Gone);
}

#[test]
fn what_is_not_there_says_so_and_is_not_made() {
    if !ready("loop_not_there") {
        return;
    }
    // No number is this high.
    let number = 1_040_000;
    assert_eq!(super::status(number).unwrap(), None);
    assert_eq!(detach(number, Some(1), None).unwrap(), Cleared::Gone);
    for error in [refresh(number).unwrap_err(), detach(number, None, None).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    assert!(!path(number).exists() && !sysfs::directory(&name(number)).exists(), "asking made it");
}

#[test]
fn the_probe_works_where_attaching_does() {
    if !ready("loop_probe") {
        return;
    }
    let probe = LoopTransport.probe();
    assert!(probe.works, "{probe:?}");
}
