//! How an export begins and ends: by a line of the machine's table, with a command, by force.
//! Never looks at what clients do with it: `export.rs` does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use becket_testkit::{
    Scratch, image, require_fuse, require_plain_machine, require_tools, scaled, wait_until,
};
use common::nbd::{self, Client};
use common::page::{Page, direct};
use common::{scratch, text};

const SIZE: u64 = 8 << 20;

/// A table with these lines, in which `@` is the scratch directory, as the option that names it.
fn table(place: &Scratch, lines: &str) -> String {
    let here = place.path("");
    let here = here.to_str().unwrap().trim_end_matches('/');
    fs::write(place.path("tab"), lines.replace('@', here)).unwrap();
    format!("--tab={here}/tab")
}

/// As for `attach good.img nosuch.img`.
#[test]
fn a_name_without_a_line_keeps_no_other_from_being_attached() {
    let place = scratch();
    image::random(&place.path("a.img"), SIZE, 7);
    let tab = table(
        &place,
        "a @/a.img nbd=unix:@/a.sock\n\
         typo @/a.img nbd=unix:@/t.sock,nonsense\n\
         b @/b.img nbd=unix:@/b.sock\n",
    );
    let names = ["nobody", "typo", "a", "b"];
    let ran = place.run([&["attach", &tab][..], &names].concat());
    assert_eq!(ran.code, 1, "{ran:?}");
    for part in ["no line is named nobody", "tab line 2: ", "nonsense", "tab line 3: "] {
        assert!(ran.err.contains(part), "{part}: {ran:?}");
    }
    assert!(ran.out.lines().count() == 1 && ran.out.contains("a.sock"), "{ran:?}");
    place.ok(["detach", "a"]);
    let ran = place.run([&["attach", "--json", &tab][..], &names].concat());
    let reported = ran.json();
    assert_eq!((ran.code, text(&reported["devices"][0], "name")), (1, "a"), "{reported:#}");
    let errors: Vec<_> =
        reported["errors"].as_array().unwrap().iter().map(|one| text(one, "image")).collect();
    assert!(errors[..2] == ["nobody", "typo"] && errors[2].ends_with("/b.img"), "{reported:#}");
    place.ok(["detach", "a"]);
    // All or none.
    assert_eq!(place.run(["attach", "--atomic", &tab, "a", "nobody"]).code, 1);
    let ran = place.run(["attach", "--dry-run", &tab, "nobody"]);
    assert!(ran.code == 1 && ran.err.contains("no line is named nobody"), "{ran:?}");
    assert!(place.devices().is_empty());
}

#[test]
fn a_line_of_the_table_is_an_export() {
    let place = scratch();
    for name in ["a.img", "b.img", "c.img"] {
        image::random(&place.path(name), SIZE, 7);
    }
    let tab = table(
        &place,
        "disk @/a.img nbd=unix:@/a.sock,ro,max-connections=3\n\
         vm @/b.img vhost-user=unix:@/b.sock,queues=2\n\
         open @/c.img nbd=tcp:0.0.0.0:0\n\
         taken @/c.img nbd=unix:@/a.sock\n",
    );
    let said = place.ok(["attach", &tab, "disk", "vm"]);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("nbd+unix:///disk?socket=/") && lines[1].ends_with("/b.sock"), "{said}");
    let devices = place.devices();
    let named: Vec<_> = devices.iter().map(|info| (text(info, "name"), text(info, "transport"))).collect();
    assert_eq!(named, [("disk", "nbd"), ("vm", "vhost_user")]);
    assert_eq!(devices[0]["export"]["max_connections"], 3);
    let mut client = Client::connect(&place.path("a.sock"), "disk").unwrap();
    assert_eq!(client.read(4096, 8192).unwrap(), fs::read(place.path("a.img")).unwrap()[4096..12288]);
    assert_ne!(client.call(common::nbd::WRITE, 0, 0, 512, &[1; 512]).unwrap(), 0, "the line says `ro`");
    drop(client);

    // A line cannot do what the command could not.
    for (name, why) in
        [("open", "tab line 3: cannot listen at"), ("taken", "is the address of line 1 already")]
    {
        let ran = place.run(["attach", &tab, name]);
        assert!(ran.code == 1 && ran.err.contains(why), "{ran:?}");
    }
    assert_eq!(place.devices().len(), 2);
    assert!(wait_until(Duration::from_secs(20), || place.run(["detach", "disk", "vm"]).code == 0));
    assert!(!place.path("a.sock").exists() && !place.path("b.sock").exists());
}

/// systemd reads what the generator writes, without a word.
#[test]
fn the_unit_of_an_export_is_sound() {
    if !require_plain_machine("the_unit_of_an_export_is_sound", &["systemd-analyze"]) {
        return;
    }
    let place = scratch();
    let becket = env!("CARGO_BIN_EXE_becket");
    let tab =
        table(&place, "vm /srv/vm.img vhost-user=unix:/run/vm.sock\nnet /srv/b nbd=tcp:10.0.0.1,insecure\n");
    let (units, made) = (place.dir("units"), place.dir("made"));
    let dist = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/becket-attach@.service");
    let unit = fs::read_to_string(dist).unwrap().replace("/usr/bin/becket", becket);
    fs::write(units.join("becket-attach@.service"), unit).unwrap();
    place.ok(["generator", &tab, made.to_str().unwrap()]);
    let verify = || {
        let mut command = Command::new("systemd-analyze");
        command.args(["verify", "--man=no", "becket-attach@vm.service", "becket-attach@net.service"]);
        command.env("SYSTEMD_UNIT_PATH", format!("{}:{}:", units.display(), made.display()));
        let done = command.output().unwrap();
        (done.status.success(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    let (good, said) = verify();
    assert!(good && !said.contains("becket"), "{said}");
    let drop_in = made.join("becket-attach@vm.service.d/50-beckettab.conf");
    let text = fs::read_to_string(&drop_in).unwrap();
    fs::write(&drop_in, text.replace("Description=", "Describes=")).unwrap();
    assert!(verify().1.contains("Describes"), "what is wrong would be seen");
}

/// An idle client, one in the middle of a write, and one that reads no answers.
#[test]
fn an_export_is_taken_from_its_clients_by_force() {
    let place = scratch();
    let (disk, socket) = (place.path("disk.img"), place.path("s.sock"));
    image::random(&disk, SIZE, 7);
    let address = format!("unix:{}", socket.display());
    let connect = || Client::connect(&socket, "disk.img").unwrap();
    for stuck in [false, true] {
        place.ok(["export", disk.to_str().unwrap(), "--nbd", &address]);
        let mut idle = connect();
        idle.write(0, b"written").unwrap();
        let mut others = Vec::new();
        if stuck {
            let mut half = connect();
            half.socket.write_all(&nbd::request(0, nbd::WRITE, 1, 0, 1 << 20)).unwrap();
            half.socket.write_all(&[1; 1000]).unwrap();
            let mut deaf = connect();
            deaf.socket.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
            while deaf.socket.write_all(&nbd::request(0, nbd::READ, 1, 0, 1 << 20)).is_ok() {}
            others.extend([half, deaf]);
        }
        let ran = place.run(["detach", "disk.img"]);
        assert!(ran.code != 0, "its clients keep it: {ran:?}");
        let began = Instant::now();
        place.ok(["detach", "--force", disk.to_str().unwrap()]);
        assert!(began.elapsed() < scaled(Duration::from_secs(9)), "{:?}", began.elapsed());
        assert!(place.devices().is_empty() && !socket.exists());
        assert!(idle.ended(), "its connection has ended");
        assert_eq!(&fs::read(&disk).unwrap()[..7], b"written");
    }
    // A device is not taken from its users by this.
    place.ok(["export", disk.to_str().unwrap(), "--nbd", &address]);
    let _idle = connect();
    place.ok(["detach", "--all", "--force"]);
    assert!(place.devices().is_empty());
}

#[test]
fn an_export_lives_as_long_as_a_command() {
    if !require_tools("an_export_lives_as_long_as_a_command", &["nbdcopy", "nbdinfo"]) {
        return;
    }
    let place = scratch();
    let (disk, copy, socket) = (place.path("disk.img"), place.path("copy.img"), place.path("s.sock"));
    image::random(&disk, SIZE, 7);
    let address = format!("unix:{}", socket.display());
    let export = |command: &[&str]| {
        place.run(["export", disk.to_str().unwrap(), "--nbd", &address, "--"].iter().chain(command))
    };
    let ran = export(&["nbdcopy", "{}", copy.to_str().unwrap()]);
    assert_eq!((ran.code, ran.out.as_str()), (0, ""), "{ran:?}");
    assert!(fs::read(&copy).unwrap() == fs::read(&disk).unwrap());
    let gone = || place.devices().is_empty() && !socket.exists();
    assert!(gone(), "it goes with its command");
    let ran = export(&["sh", "-c", "nbdinfo --size $BECKET_URI; test -z \"$BECKET_DEVICE\"; exit 7"]);
    assert_eq!((ran.code, ran.out.trim()), (7, SIZE.to_string().as_str()), "{ran:?}");
    assert!(gone());
    let ran = export(&["no-such-command"]);
    assert!(ran.code == 127 && gone(), "{ran:?}");
    let ran = place.run(["export", "a", "b", "--nbd", &address, "--", "true"]);
    assert!(ran.code == 2 && ran.err.contains("exactly one image can be exported"), "{ran:?}");
    assert!(ran.err.contains("without a command"), "{ran:?}");

    // What the command leaves running does not keep it.
    let hold =
        format!("exec 3<>/dev/null; nc -U {} >/dev/null 2>&1 </dev/zero & sleep 0.3", socket.display());
    assert_eq!(export(&["sh", "-c", &hold]).code, 0);
    assert!(gone());

    // A killed becket takes command and export along.
    let mut becket = place.becket();
    becket.args(["export", disk.to_str().unwrap(), "--nbd", &address, "--", "sleep", "600"]);
    let mut child = becket.spawn().unwrap();
    assert!(wait_until(Duration::from_secs(20), || place.devices().len() == 1));
    Client::connect(&socket, "disk.img").unwrap().read(0, 512).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(wait_until(Duration::from_secs(20), gone), "{:?}", place.devices());
}

/// A device over an export grows with it, and goes on as it was when that is not to be.
#[test]
fn fuse_a_device_follows_an_export_that_grows() {
    if !require_fuse("export_life::fuse_a_device_follows_an_export_that_grows") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    let length = |bytes: u64| {
        fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&image)
            .unwrap()
            .set_len(bytes)
            .unwrap();
    };
    length(1 << 20);
    let address = format!("unix:{}", place.path("s").display());
    let uri = place.ok(["export", image.to_str().unwrap(), "--nbd", &address, "--name", "below"]);
    let path = place.ok(["attach", "--via", "fuse", "--name", "above", uri.trim()]);
    let disk = direct(Path::new(path.trim()));
    let above = || place.devices().into_iter().find(|device| text(device, "name") == "above").unwrap();
    let kill_worker = || {
        let worker = above()["worker_pid"].as_i64().unwrap();
        let worker = rustix::process::Pid::from_raw(i32::try_from(worker).unwrap()).unwrap();
        rustix::process::kill_process(worker, rustix::process::Signal::KILL).unwrap();
        assert!(wait_until(Duration::from_secs(20), || above()["worker_pid"] != worker.as_raw_pid()));
    };
    let mut page = Box::new(Page([0; 4096]));
    for (generation, bytes) in [(1, 3 << 20), (2, 8 << 20)] {
        length(bytes);
        place.ok(["refresh", "below"]);
        // It hears of it when it connects anew, which the next worker does.
        kill_worker();
        disk.read_exact_at(&mut page.0, 0).unwrap();
        let follows = || above()["size"].as_u64() == Some(bytes) && above()["away"].is_null();
        assert!(wait_until(Duration::from_secs(20), follows), "{:?}", above());
        let page_of = |generation: u8| Page([generation; 4096]);
        disk.write_all_at(&page_of(generation).0, bytes - 4096).unwrap();
        disk.sync_all().unwrap();
        kill_worker();
        disk.read_exact_at(&mut page.0, bytes - 4096).unwrap();
        assert!(page.0 == page_of(generation).0);
    }
    // Or when it is asked to look.
    length(9 << 20);
    place.ok(["refresh", "below"]);
    let shown = place.ok(["refresh", "above"]);
    assert!(shown.trim_end().ends_with("  9M"), "{shown}");
    disk.read_exact_at(&mut page.0, (9 << 20) - 4096).unwrap();
    assert!(page.0 == [0; 4096]);
    // What it has written may be gone now: it waits until that is there again.
    length(1 << 20);
    place.ok(["refresh", "below"]);
    kill_worker();
    let says = || above()["away"].as_str().is_some_and(|why| why.contains("1048576 bytes, and had 9437184"));
    let asks = thread::spawn(move || disk.read_exact_at(&mut page.0, 0).map(|()| disk));
    assert!(wait_until(Duration::from_secs(20), says), "{:?}", above());
    let ran = place.run(["refresh", "above"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("cannot be asked how long that is: the export has 1048576 bytes"), "{ran:?}");
    length(9 << 20);
    place.ok(["refresh", "below"]);
    drop(asks.join().unwrap().unwrap());
    assert!(wait_until(Duration::from_secs(20), || above()["away"].is_null()), "{:?}", above());
    place.ok(["detach", "above"]);
    place.ok(["detach", "below"]);
}
