//! Real devices: they come, are used, are kept, and go, whichever process dies meanwhile.
//! None is left attached, also by a test that fails.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use becket_device::DeviceState;
use becket_testkit as testkit;
use serde_json::Value;

use crate::place::{Place, Running};

pub(crate) fn a_device_comes_and_goes(place: &Place) {
    if !place.has_loop() {
        return;
    }
    let image = place.image("image", 1 << 20);
    let image = image.to_str().unwrap();
    let info = place.run(&["attach", image, "name=one"]).unwrap();
    assert_eq!(
        (&info["transport"], &info["size"], &info["state"]),
        (&"loop".into(), &(1 << 20).into(), &"live".into())
    );
    let node = info["device"].as_str().unwrap();
    assert_eq!(fs::read_link(place.path("links/one")).unwrap(), Path::new(node));
    assert_eq!(place.run(&["list"]).unwrap(), Value::Array(vec![info.clone()]));

    // The same image, and another one under the same name.
    let error = place.run(&["attach", image]).unwrap_err();
    assert!(error.starts_with("InUse") && error.contains("as one"), "{error}");
    let other = place.image("other", 4096);
    let error = place.run(&["attach", other.to_str().unwrap(), "name=one"]).unwrap_err();
    assert!(error.starts_with("NameInUse") && error.contains(image), "{error}");

    File::options().write(true).open(image).unwrap().set_len(2 << 20).unwrap();
    assert_eq!(place.run(&["refresh", "one"]).unwrap()["size"], 2 << 20);
    assert_eq!(place.run(&["list"]).unwrap()[0]["size"], 2 << 20);

    // By each of its names.
    let link = place.path("links/one");
    let mut node = node.to_owned();
    for name in ["one", "the node", link.to_str().unwrap(), image] {
        let target = if name == "the node" { node.as_str() } else { name };
        assert_eq!(place.run(&["detach", target]).unwrap()["name"], "one", "{target}");
        assert!(!link.is_symlink());
        assert_eq!(place.records(), 0);
        let error = place.run(&["detach", target]).unwrap_err();
        assert!(error.starts_with("NotFound"), "{error}");
        // Others may have taken its number meanwhile.
        let again = place.run(&["attach", image, "name=one"]).unwrap();
        node = again["device"].as_str().unwrap().to_owned();
    }
    // Detached behind our back: the record falls.
    let node = place.run(&["list"]).unwrap()[0]["device"].as_str().unwrap().to_owned();
    testkit::tool(Command::new("losetup").args(["--detach", &node]));
    assert_eq!(place.run(&["list"]).unwrap(), Value::Array(vec![]));
    assert_eq!(place.records(), 0);
    assert!(!link.is_symlink());
}

pub(crate) fn a_device_in_use_stays(place: &Place) {
    if !(place.has_loop() && testkit::require_tools(place.name, &["mkfs.ext4"])) {
        return;
    }
    let image = place.image("image", 8 << 20);
    testkit::tool(Command::new("mkfs.ext4").arg("-q").arg(&image));
    let info = place.run(&["attach", image.to_str().unwrap(), "name=one"]).unwrap();
    let node = info["device"].as_str().unwrap();
    let dir = place.path("mnt");
    fs::create_dir(&dir).unwrap();
    testkit::tool(Command::new("mount").arg(node).arg(&dir));
    let refused = place.run(&["detach", "one"]);
    let lazy = place.run(&["detach", "one", "lazy"]);
    let still = place.run(&["list"]);
    testkit::umount(&dir);
    let refused = refused.unwrap_err();
    assert!(refused.starts_with("Busy") && refused.contains(dir.to_str().unwrap()), "{refused}");
    let detaching = serde_json::to_value(DeviceState::Detaching).unwrap();
    assert_eq!(lazy.unwrap()["state"], detaching);
    assert_eq!(still.unwrap()[0]["state"], detaching);
    assert_eq!(place.run(&["list"]).unwrap(), Value::Array(vec![]));

    // A descriptor is a use as well.
    let info = place.run(&["attach", image.to_str().unwrap(), "name=one"]).unwrap();
    let open = File::open(info["device"].as_str().unwrap()).unwrap();
    let refused = place.run(&["detach", "one"]).unwrap_err();
    assert!(refused.contains(&format!("pid {}", std::process::id())), "{refused}");
    drop(open);
    place.run(&["detach", "one"]).unwrap();
}

pub(crate) fn a_killed_keepers_device_goes(place: &Place) {
    if place.has_loop() {
        keeper_dies(place, "loop");
    }
}

pub(crate) fn a_served_device_goes_with_its_keeper(place: &Place) {
    if place.has_ublk() {
        keeper_dies(place, "ublk");
    }
}

fn keeper_dies(place: &Place, via: &str) {
    let image = place.image("image", 1 << 20);
    let start = || {
        let mut child = place
            .command(&["lease", image.to_str().unwrap(), via])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let info: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        (Running(child), info, lines)
    };
    let (mut keeper, info, _) = start();
    assert_eq!(place.run(&["list"]).unwrap()[0]["name"], info["name"]);
    keeper.0.kill().unwrap();
    keeper.0.wait().unwrap();
    let gone = || place.run(&["list"]).unwrap() == Value::Array(vec![]);
    assert!(testkit::wait_until(Duration::from_secs(1), gone), "within a second");
    assert_eq!(place.records(), 0);

    // Let go in peace, it goes as well.
    let (mut keeper, _, mut lines) = start();
    keeper.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    let left = lines.next().unwrap().unwrap();
    assert!(via == "ublk" || left == "0", "a loop device is gone when its lease is");
    assert_eq!(keeper.ends(Duration::from_secs(5)), Some(0));
    assert!(testkit::wait_until(Duration::from_secs(1), gone));
    assert_eq!(place.records(), 0);
}

pub(crate) fn a_failed_attach_leaves_nothing(place: &Place) {
    if !place.has_loop() {
        return;
    }
    let image = place.image("image", 1 << 20);
    let image = image.to_str().unwrap();
    let error = place.run(&["attach", image, "name=one", "partitions=on"]).unwrap_err();
    assert!(error.starts_with("InvalidOption"), "{error}");
    assert!(place.run(&["attach", image, "name=a/b"]).unwrap_err().starts_with("InvalidOption"));
    assert!(place.run(&["attach", image, "name=one", "offset=2097152"]).is_err());
    assert!(place.run(&["attach", image, "name=one", "via=dm"]).unwrap_err().starts_with("Unsupported"));
    assert_eq!(place.records(), 0);
    // The name is free, and the image's locks are.
    place.run(&["attach", image, "name=one"]).unwrap();
    place.run(&["detach", "one"]).unwrap();
}
