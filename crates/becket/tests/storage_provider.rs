//! Volumes for systemd's tools: what a program gets that asks by `io.systemd.StorageProvider`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, IoSliceMut, Write as _},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    os::unix::{fs::FileExt as _, net::UnixStream},
    process::{Child, Stdio},
    time::Duration,
};

use becket_testkit::{Scratch, image, require_loop, require_plain_machine, require_root, wait_until};
use common::scratch;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};

/// `becket storage-provider`, ended with this.
struct Provider(Child);

impl Drop for Provider {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(place: &Scratch) -> Provider {
    let mut command = place.becket();
    let address = format!("unix:{}", place.path("volumes").display());
    command.args(["storage-provider", "--listen", &address]).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains(&format!("hands out volumes at {address}")), "{line}");
    Provider(child)
}

/// The replies to a call, and the descriptors that came along.
fn call(place: &Scratch, method: &str, parameters: &Value, more: bool) -> (Vec<Value>, Vec<File>) {
    let mut stream = UnixStream::connect(place.path("volumes")).unwrap();
    let call = json!({ "method": method, "parameters": parameters, "more": more });
    stream.write_all(format!("{call}\0").as_bytes()).unwrap();
    let (mut said, mut files) = (Vec::new(), Vec::new());
    loop {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let came = recvmsg(&stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::empty());
        let came = came.unwrap().bytes;
        assert!(came > 0, "it hung up after {:?}", String::from_utf8_lossy(&said));
        said.extend_from_slice(&bytes[..came]);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                files.extend(fds.map(|fd: OwnedFd| File::from(fd)));
            }
        }
        if said.last() == Some(&0) {
            let replies: Vec<Value> = said[..said.len() - 1]
                .split(|byte| *byte == 0)
                .map(|reply| serde_json::from_slice(reply).unwrap())
                .collect();
            if replies.last().unwrap()["continues"] != true {
                return (replies, files);
            }
        }
    }
}

fn acquire(place: &Scratch, parameters: Value) -> Result<(Value, File), Value> {
    let (mut replies, files) = call(place, "io.systemd.StorageProvider.Acquire", &parameters, false);
    let reply = replies.remove(0);
    match reply["error"].as_str() {
        Some(error) => {
            assert!(files.is_empty(), "{parameters}");
            let known = error.strip_prefix("io.systemd.StorageProvider.");
            Err(known.map_or(reply.clone(), |word| json!(word)))
        }
        None => {
            let [file] = <[File; 1]>::try_from(files).unwrap();
            assert_eq!(
                (&reply["parameters"]["fileDescriptorIndex"], &reply["parameters"]["type"]),
                (&json!(0), &json!("blk"))
            );
            Ok((reply["parameters"]["readOnly"].clone(), file))
        }
    }
}

#[test]
fn a_volume_is_an_image_for_as_long_as_it_is_open() {
    let name = "storage_provider::a_volume_is_an_image_for_as_long_as_it_is_open";
    if !require_root(name) || !require_plain_machine(name, &[]) || !require_loop(name) {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 1 << 20, 3);
    let bytes = fs::read(&image).unwrap();
    let path = image.to_str().unwrap();
    let _provider = start(&place);

    let (read_only, device) = acquire(&place, json!({ "name": path })).unwrap();
    assert_eq!(read_only, json!(false), "writable where that is possible");
    let mut found = vec![0; bytes.len()];
    device.read_exact_at(&mut found, 0).unwrap();
    assert!(found == bytes);
    device.write_all_at(&[7; 4096], 8192).unwrap();
    device.sync_all().unwrap();
    assert_eq!(place.devices().len(), 1);
    let (replies, _) = call(&place, "io.systemd.StorageProvider.ListVolumes", &json!({}), true);
    assert_eq!(replies.len(), 1);
    assert_eq!(replies[0]["parameters"]["sizeBytes"], json!(1 << 20), "{replies:?}");
    assert_eq!(acquire(&place, json!({ "name": path })).unwrap_err()["parameters"]["kind"], json!("in_use"));
    drop(device);
    assert!(wait_until(Duration::from_secs(20), || place.devices().is_empty()), "{:?}", place.devices());
    assert!(fs::read(&image).unwrap()[8192..12288] == [7; 4096]);

    let (read_only, device) = acquire(&place, json!({ "name": path, "readOnly": true })).unwrap();
    assert!(read_only == json!(true) && device.write_all_at(&[8; 512], 0).is_err());
    drop(device);
    assert!(wait_until(Duration::from_secs(20), || place.devices().is_empty()), "{:?}", place.devices());
}

#[test]
fn a_volume_is_a_device_that_stays() {
    let name = "storage_provider::a_volume_is_a_device_that_stays";
    if !require_root(name) || !require_plain_machine(name, &[]) || !require_loop(name) {
        return;
    }
    let place = scratch();
    for (file, read_only) in [("a", false), ("b", true)] {
        image::random(&place.path(file), 1 << 20, 3);
        let path = place.path(file);
        let words = ["attach", "--name", file, path.to_str().unwrap(), "--read-only"];
        place.ok(&words[..if read_only { 5 } else { 4 }]);
    }
    let _provider = start(&place);
    assert_eq!(acquire(&place, json!({ "name": "a", "readOnly": null })).unwrap().0, json!(false));
    assert_eq!(acquire(&place, json!({ "name": "b" })).unwrap().0, json!(true));
    assert_eq!(
        acquire(&place, json!({ "name": "b", "readOnly": false })).unwrap_err(),
        json!("ReadOnlyVolume")
    );
    let listed = |pattern: Value| -> Vec<Value> {
        let (replies, _) =
            call(&place, "io.systemd.StorageProvider.ListVolumes", &json!({ "matchName": pattern }), true);
        replies.iter().map(|reply| reply["parameters"]["name"].clone()).collect()
    };
    assert_eq!(listed(Value::Null), [json!("a"), json!("b")]);
    assert_eq!(listed(json!("[b-z]*")), [json!("b")]);
    assert_eq!(place.devices().len(), 2, "they stay");
    place.ok(["detach", "--all"]);
}

#[test]
fn what_is_not_to_be_had_is_refused_by_its_name() {
    let name = "storage_provider::what_is_not_to_be_had_is_refused_by_its_name";
    if !require_root(name) || !require_plain_machine(name, &[]) {
        return;
    }
    let place = scratch();
    fs::write(place.path("a.img"), vec![0; 1 << 20]).unwrap();
    fs::write(place.path("short"), "no image").unwrap();
    let path = |name: &str| place.path(name).to_str().unwrap().to_owned();
    let _provider = start(&place);
    for (parameters, error) in [
        (json!({ "name": path("none") }), "NoSuchVolume"),
        (json!({ "name": "no-device" }), "NoSuchVolume"),
        (json!({ "name": "relative/a.img" }), "NoSuchVolume"),
        (json!({ "name": path("a.img"), "createMode": "new" }), "CreateNotSupported"),
        (json!({ "name": path("a.img"), "template": "sparse-file" }), "NoSuchTemplate"),
        (json!({ "name": path("a.img"), "requestAs": "reg" }), "TypeNotSupported"),
        (json!({ "name": path("a.img"), "requestAs": "dir" }), "TypeNotSupported"),
    ] {
        assert_eq!(acquire(&place, parameters.clone()).unwrap_err(), json!(error), "{parameters}");
    }
    let failed = acquire(&place, json!({ "name": path("short") })).unwrap_err();
    assert_eq!(failed["error"], json!("org.becket.Becket1.Failed"));
    assert!(failed["parameters"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{failed}");
    for (method, more, error) in [
        ("io.systemd.StorageProvider.ListVolumes", false, "org.varlink.service.ExpectedMore"),
        ("io.systemd.StorageProvider.ListVolumes", true, "io.systemd.StorageProvider.NoSuchVolume"),
        ("io.systemd.StorageProvider.ListTemplates", true, "io.systemd.StorageProvider.NoSuchTemplate"),
        ("io.systemd.StorageProvider.Nothing", false, "org.varlink.service.MethodNotFound"),
        ("io.systemd.Other.Acquire", false, "org.varlink.service.InterfaceNotFound"),
        ("org.becket.Becket1.List", false, "org.varlink.service.InterfaceNotFound"),
    ] {
        let (replies, _) = call(&place, method, &json!({}), more);
        assert_eq!(replies[0]["error"], json!(error), "{method}");
    }
    let (replies, _) = call(&place, "io.systemd.StorageProvider.Acquire", &json!({ "name": 5 }), false);
    assert_eq!(replies[0]["error"], json!("org.varlink.service.InvalidParameter"));
    let (replies, _) = call(&place, "org.varlink.service.GetInfo", &json!({}), false);
    let interfaces = &replies[0]["parameters"]["interfaces"];
    assert_eq!(*interfaces, json!(["io.systemd.StorageProvider", "org.varlink.service"]));
    assert!(place.devices().is_empty());
    let tcp = place.becket().args(["storage-provider", "--listen", "tcp:127.0.0.1:0"]).output().unwrap();
    assert!(String::from_utf8_lossy(&tcp.stderr).contains("it needs a unix socket"));
}
