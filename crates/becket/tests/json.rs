//! What becket prints with `--json` is what `docs/becket.schema.json` says, field by field.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{fs, path::Path, process::Command};

use becket_testkit::{Scratch, image, require_loop, require_plain_machine, require_root, tool};
use common::scratch;
use serde_json::{Value, json};

fn schema() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/becket.schema.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Allows no field that the schema does not name: a program may meet new fields, but none may be undescribed.
fn close(value: &mut Value) {
    if let Some(object) = value.as_object_mut() {
        if object.contains_key("properties") && object.contains_key("type") {
            object.entry("additionalProperties").or_insert(json!(false));
        }
        object.values_mut().for_each(close);
    } else if let Some(array) = value.as_array_mut() {
        array.iter_mut().for_each(close);
    }
}

/// Whether the validator of Debian's python3-jsonschema takes a text for that definition; with what it says.
fn is_a(place: &Scratch, definition: &str, text: &str) -> (bool, String) {
    let mut schema = schema();
    assert!(schema["$defs"][definition].is_object(), "{definition} is not in the schema");
    close(&mut schema["$defs"]);
    schema["$ref"] = json!(format!("#/$defs/{definition}"));
    let [rules, printed] = ["rules.json", "printed.json"].map(|name| place.path(name));
    fs::write(&rules, schema.to_string()).unwrap();
    fs::write(&printed, text).unwrap();
    let script = "import json, sys, jsonschema\n\
        schema, value = (json.load(open(name)) for name in sys.argv[1:])\n\
        errors = list(jsonschema.Draft202012Validator(schema).iter_errors(value))\n\
        print('\\n'.join(str(error)[:1500] for error in errors)); sys.exit(bool(errors))";
    let ran = Command::new("/usr/bin/python3").args(["-c", script]).arg(rules).arg(printed).output().unwrap();
    assert!(ran.status.code().is_some_and(|code| code < 2), "{ran:?}");
    (
        ran.status.success(),
        String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr),
    )
}

#[test]
fn all_output_is_as_described() {
    let name = "json::all_output_is_as_described";
    if !require_root(name)
        || !require_plain_machine(name, &["sfdisk", "mke2fs", "mksquashfs", "xz"])
        || !require_loop(name)
    {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 64 << 20);
    tool(Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(place.path("fs.img")).arg("4M"));
    image::sparse(&place.path("x.img"), 1 << 20);
    tool(Command::new("sh").arg("-c").arg("gzip -c fs.img >packed.gz").current_dir(place.path("")));
    image::random(&place.dir("tree").join("inner.img"), 1 << 20, 1);
    let tree = place.path("tree");
    tool(
        Command::new("mksquashfs").arg(&tree).arg(place.path("s.squashfs")).args(["-quiet", "-no-progress"]),
    );
    place.dir("mnt");

    let checks: &[(&str, &[&str])] = &[
        ("failed", &["inspect", "nothing.img"]),
        ("foreseen", &["attach", "--dry-run", "fs.img", "--cow", "new.qcow2"]),
        ("foreseen", &["attach", "--dry-run", "disk.img", "nothing.img"]),
        ("devices", &["attach", "--name", "disk", "disk.img"]),
        ("devices", &["attach", "disk.img", "nothing.img", "/dev/null"]),
        ("devices", &["attach", "--via", "fuse", "--name", "x", "x.img"]),
        ("devices", &["attach", "--via", "fuse", "--name", "cow", "fs.img", "--cow", "o.qcow2"]),
        ("devices", &["attach", "--via", "fuse", "--name", "inner", "s.squashfs/inner.img"]),
        ("devices", &["export", "x.img", "--shared", "-r", "--name", "out", "--nbd", "unix:out.sock"]),
        ("list", &["list"]),
        ("list", &["list", "nothing"]),
        ("stat", &["stat", "x", "disk", "inner", "none"]),
        ("watch", &["stat", "--watch", "50ms", "--count", "1", "x", "disk"]),
        ("why", &["why", "x", "disk", "inner", "cow", "none"]),
        ("leaving", &["detach", "--dry-run", "x", "none"]),
        ("top", &["top", "--once", "--interval", "50ms"]),
        ("failed", &["top"]),
        ("metrics", &["metrics"]),
        ("store_list", &["store", "list", "--store", "st"]),
        ("store_verify", &["store", "verify", "--store", "st"]),
        ("store_drop", &["store", "drop", "--all", "--store", "st"]),
        ("failed", &["store", "verify", "--store", "st", "http://127.0.0.1:1/x"]),
        ("failed", &["inspect", "--origin-timeout", "100ms", "http://127.0.0.1:1/x"]),
        ("failed", &["inspect", "s3://bad"]),
        ("failed", &["store", "list", "--store", "/proc/nothing"]),
        ("store_prefetch", &["store", "prefetch", "--store", "st", "packed.gz"]),
        ("store_list", &["store", "list", "--store", "st"]),
        ("store_verify", &["store", "verify", "--store", "st"]),
        ("store_drop", &["store", "drop", "--all", "--store", "st"]),
        ("devices", &["set", "x", "--read-only", "off"]),
        ("store_prefetch", &["store", "prefetch", "--store", "st", "disk.img"]),
        ("devices", &["set", "x", "--read-only", "on"]),
        ("event", &["events", "--no-follow", "cow"]),
        ("devices", &["refresh", "x"]),
        ("doctor", &["doctor"]),
        ("inspect", &["inspect", "disk.img"]),
        ("inspect", &["inspect", "s.squashfs"]),
        ("inspect", &["inspect", "o.qcow2", "--format", "qcow2"]),
        ("ls", &["ls", "disk.img"]),
        ("ls", &["ls", "s.squashfs"]),
        ("ls", &["ls", "-lR", "s.squashfs"]),
        ("cp", &["cp", "-r", "s.squashfs", "out"]),
        ("cp", &["cp", "s.squashfs/inner.img", "out", "out"]),
        ("copy", &["copy", "s.squashfs/inner.img", "inner.qcow2"]),
        ("failed", &["copy", "x.img", "inner.qcow2"]),
        ("failed", &["cat", "nothing.img"]),
        ("failed", &["cat", "s.squashfs/none", "nothing.img"]),
        ("map", &["map", "disk.img/p1"]),
        ("map", &["map", "--blocks", "s.squashfs/inner.img"]),
        ("devices", &["detach", "out"]),
        ("devices", &["detach", "x", "disk", "cow", "inner", "none"]),
        ("mount", &["mount", "fs.img", "mnt"]),
        ("devices", &["detach", "fs.img"]),
        ("umount", &["umount", "mnt"]),
        ("failed", &["umount", "mnt"]),
    ];
    for (definition, words) in checks {
        let ran = place.finish(place.becket().arg("--json").args(*words));
        let (good, why) = is_a(&place, definition, &ran.out);
        assert!(good, "{words:?} is no {definition}: {why}\n{ran:?}");
    }
    assert!(place.devices().is_empty());
}

#[test]
fn what_is_not_described_is_seen() {
    let name = "json::what_is_not_described_is_seen";
    if !require_plain_machine(name, &[]) {
        return;
    }
    let place = scratch();
    let error = json!({"error": {"kind": "io", "message": "m", "hint": null}});
    assert!(is_a(&place, "failed", &error.to_string()).0);
    for (field, value) in [("kind", json!("new")), ("hint", json!(1)), ("more", json!("undescribed"))] {
        let mut other = error.clone();
        other["error"][field] = value;
        assert!(!is_a(&place, "failed", &other.to_string()).0, "{other}");
    }
    assert!(!is_a(&place, "list", "{}").0, "a field is missing");
}
