//! Files compressed as one piece are decoded once into the store, and then are images like any.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{
    Scratch, image, origin::Origin, require_fuse, require_loop, require_plain_machine, require_root, tool,
};
use common::{
    scratch, text,
    web::{ext4, ok, run},
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

const TOOLS: [&str; 5] = ["gzip", "xz", "zstd", "bzip2", "lz4"];

fn tools_are_there(name: &str) -> bool {
    require_plain_machine(name, &[&TOOLS[..], &["mke2fs"]].concat())
}

/// Compresses a file as one piece, as people do.
fn pack(place: &Scratch, file: &Path, program: &str) -> PathBuf {
    let suffix = match program {
        "gzip" => "gz",
        "zstd" => "zst",
        "bzip2" => "bz2",
        other => other,
    };
    let name = file.file_name().unwrap().to_str().unwrap();
    let packed = place.path(&format!("{name}.{suffix}"));
    let out = fs::File::create(&packed).unwrap();
    let mut command = Command::new(program);
    tool(command.args(["-1", "-q", "-c"]).arg(file).stdout(Stdio::from(out)));
    packed
}

#[test]
fn every_tool_s_streams_are_read_without_a_device() {
    let name = "streams::every_tool_s_streams_are_read_without_a_device";
    if !tools_are_there(name) {
        return;
    }
    let place = scratch();
    let plain = ext4(&place);
    let bytes = fs::read(&plain).unwrap();
    for program in TOOLS {
        let packed = pack(&place, &plain, program);
        let packed = packed.to_str().unwrap();
        assert_eq!(ok(&place, &["cat", &format!("{packed}/dir/file")]), "from afar", "{program}");
        assert!(ok(&place, &["ls", packed]).contains("big"), "{program}");
        let copy = place.path(&format!("{program}.copy"));
        ok(&place, &["copy", packed, copy.to_str().unwrap()]);
        assert!(fs::read(&copy).unwrap() == bytes, "{program}");
    }
    let list = run(&place, &["--json", "store", "list"]).json();
    assert_eq!(list["objects"].as_array().unwrap().len(), TOOLS.len(), "each is decoded once: {list:#}");
    for object in list["objects"].as_array().unwrap() {
        assert_eq!((object["size"].as_u64(), &object["stored"]), (Some(bytes.len() as u64), &object["size"]));
    }
    // It names what it is, and decodes nothing.
    let before = run(&place, &["--json", "store", "list", "--store", place.path("other").to_str().unwrap()]);
    let inspected = run(&place, &["inspect", "d.img.gz", "--store", place.path("other").to_str().unwrap()]);
    assert!(inspected.out.contains("gzip"), "{inspected:?}");
    assert_eq!(before.json()["objects"], serde_json::json!([]));
}

#[test]
fn fuse_a_plain_gz_is_attached_and_stays_in_the_store() {
    let name = "streams::fuse_a_plain_gz_is_attached_and_stays_in_the_store";
    if !require_root(name) || !require_fuse(name) || !require_loop(name) || !tools_are_there(name) {
        return;
    }
    let place = scratch();
    let plain = ext4(&place);
    let bytes = fs::read(&plain).unwrap();
    let packed = pack(&place, &plain, "gzip");
    for via in ["loop", "fuse"] {
        let ran = run(&place, &["attach", "--via", via, "--name", "z", "d.img.gz"]);
        assert!(ran.err.contains("warning: attached read-only: it is compressed by gzip"), "{ran:?}");
        assert!(fs::read(ran.out.trim()).unwrap() == bytes, "{via}");
        let info = place.devices().remove(0);
        assert_eq!(text(&info, "url"), packed.to_str().unwrap());
        assert_eq!(info["read_only"], true, "the store is never written to");
        assert_eq!(run(&place, &["store", "drop", "--all"]).code, 1, "a device has it");
        let why = run(&place, &["why", "z", "--json"]).json();
        assert!(!why.to_string().contains("prefetch"), "{why:#}");
        ok(&place, &["detach", "d.img.gz"]);
    }
    // Written to, through an overlay.
    let device = ok(&place, &["attach", "--via", "fuse", "--name", "w", "d.img.gz", "--cow", "o.qcow2"]);
    let point = place.dir("mnt");
    tool(Command::new("mount").arg(device.trim()).arg(&point));
    fs::write(point.join("new"), "written").unwrap();
    becket_testkit::umount(&point);
    ok(&place, &["detach", "w"]);
    ok(&place, &["store", "verify"]);

    // A flipped bit in the store is seen, and it is decoded again.
    let list = run(&place, &["--json", "store", "list"]).json();
    let stored = PathBuf::from(text(&list["objects"][0], "path"));
    let mut damaged = fs::read(&stored).unwrap();
    damaged[5 << 20] ^= 1;
    fs::write(&stored, damaged).unwrap();
    let device = ok(&place, &["attach", "--name", "z", "d.img.gz"]);
    assert!(fs::read(device.trim()).unwrap() == bytes);
    ok(&place, &["detach", "z"]);

    // Another file of that name is another image.
    image::random(&plain, 1 << 20, 99);
    pack(&place, &plain, "gzip");
    let device = ok(&place, &["attach", "--name", "z", "d.img.gz"]);
    assert!(fs::read(device.trim()).unwrap() == fs::read(&plain).unwrap());
    ok(&place, &["detach", "z"]);
    assert_eq!(run(&place, &["store", "drop", "--all"]).code, 0);

    // `--format raw` attaches what is stored.
    let device = ok(&place, &["attach", "--name", "raw", "--format", "raw", "-r", "d.img.gz"]);
    let stored = fs::read(&packed).unwrap();
    assert!(fs::read(device.trim()).unwrap().starts_with(&stored[..stored.len() / 512 * 512]));
    ok(&place, &["detach", "raw"]);
}

#[test]
fn a_stream_on_a_web_server_is_fetched_once_and_decoded_once() {
    let name = "streams::a_stream_on_a_web_server_is_fetched_once_and_decoded_once";
    if !tools_are_there(name) {
        return;
    }
    let place = scratch();
    let plain = ext4(&place);
    let packed = fs::read(pack(&place, &plain, "zstd")).unwrap();
    let origin = Origin::start(packed.clone());
    let url = origin.url("/d.img.zst");
    assert_eq!(ok(&place, &["cat", &format!("{url}#dir/file")]), "from afar");
    let sent = origin.sent();
    assert!(sent < packed.len() as u64 + (256 << 10), "{sent} bytes of {}", packed.len());
    assert_eq!(ok(&place, &["cat", &format!("{url}#dir/file")]), "from afar");
    assert!(origin.sent() < sent + (256 << 10), "{} bytes", origin.sent());
    let list = ok(&place, &["store", "list"]);
    assert!(list.lines().filter(|line| line.contains("d.img.zst")).count() >= 2, "{list}");
}

#[test]
fn a_stream_that_is_cut_short_or_damaged_leaves_nothing_behind() {
    let name = "streams::a_stream_that_is_cut_short_or_damaged_leaves_nothing_behind";
    if !tools_are_there(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("d.img"), 4 << 20, 5);
    for program in TOOLS {
        let packed = pack(&place, &place.path("d.img"), program);
        let whole = fs::read(&packed).unwrap();
        let word = packed.to_str().unwrap();
        fs::write(&packed, &whole[..whole.len() * 2 / 3]).unwrap();
        let ran = run(&place, &["copy", word, "out"]);
        assert_eq!(ran.code, 1, "{program}: {ran:?}");
        assert!(ran.err.contains("cut short") || ran.err.contains("damaged"), "{program}: {ran:?}");
        assert!(ran.err.contains("bytes"), "how far it went: {ran:?}");
        let mut other = whole.clone();
        other[whole.len() / 2] ^= 0x55;
        fs::write(&packed, other).unwrap();
        let ran = run(&place, &["copy", word, "out"]);
        assert!(ran.code == 1 && ran.err.contains("damaged"), "{program}: {ran:?}");
        assert!(ran.err.contains(&format!("{program} -t ")), "{program}: {ran:?}");
        fs::write(&packed, &whole).unwrap();
        ok(&place, &["copy", word, "out"]);
        fs::remove_file(place.path("out")).unwrap();
    }
    assert!(!place.path("out").exists());
}

/// Of a file that says how long what it yields becomes, the start is printed before the damage is met.
#[test]
fn cat_says_which_file_is_damaged_and_whether_something_was_printed_before() {
    let name = "streams::cat_says_which_file_is_damaged_and_whether_something_was_printed_before";
    if !tools_are_there(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("random"), 2 << 20, 5);
    let random = fs::read(place.path("random")).unwrap();
    for (len, program, in_blocks, check) in [
        (8 << 20, "gzip", false, "gzip -t d.img.gz checks it"),
        (40 << 20, "xz", false, "xz -t d.img.xz checks it"),
        (8 << 20, "xz", true, "what is compressed in d.img.xz is damaged"),
    ] {
        let mut plain = vec![0; len];
        plain[len / 2..][..random.len()].copy_from_slice(&random);
        fs::write(place.path("d.img"), plain).unwrap();
        let packed = pack(&place, &place.path("d.img"), program);
        if in_blocks {
            let words = ["-0", "--block-size=1MiB", "-k", "-f"];
            tool(Command::new(program).args(words).arg(place.path("d.img")));
        }
        let mut bytes = fs::read(&packed).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle..middle + 1000].fill(0x55);
        fs::write(&packed, bytes).unwrap();
        let word = packed.file_name().unwrap().to_str().unwrap();
        let got = common::web::command(&place, &["cat", word]).output().unwrap();
        let said = String::from_utf8_lossy(&got.stderr).into_owned();
        assert_eq!(got.status.code(), Some(1), "{word}: {said}");
        assert!(said.contains(&format!("cannot read {word}: ")) && said.contains(check), "{word}: {said}");
        let incomplete = said.contains("; what was printed of it is incomplete");
        assert_eq!(
            (incomplete, got.stdout.is_empty()),
            (program == "xz", program == "gzip"),
            "{word}: {said}"
        );
    }
}

/// Every file of the store that has bytes.
fn stored(place: &Scratch) -> u64 {
    let mut all = 0;
    let mut dirs = vec![place.path("store")];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type().unwrap().is_dir() {
                true => dirs.push(entry.path()),
                false => all += entry.metadata().unwrap().len(),
            }
        }
    }
    all
}

#[test]
fn a_bomb_ends_at_the_limit_and_takes_nothing_with_it() {
    let name = "streams::a_bomb_ends_at_the_limit_and_takes_nothing_with_it";
    if !tools_are_there(name) {
        return;
    }
    let place = scratch();
    // 1 GiB of a repeated letter, in some 5 MB or less.
    let bomb = place.path("bomb.img.zst");
    let script = "head -c 1073741824 /dev/zero | tr '\\0' x | zstd -q -1 >bomb.img.zst";
    let mut sh = Command::new("sh");
    place.prepare(&mut sh);
    assert_eq!(place.finish(sh.args(["-c", script])).code, 0);
    assert!(fs::metadata(&bomb).unwrap().len() < 5 << 20);
    let ran = run(&place, &["ls", "bomb.img.zst", "--store-limit", "100MiB"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("that the store may have") && ran.err.contains("--store-limit"), "{ran:?}");
    assert!(stored(&place) < 1 << 20, "{} bytes are left", stored(&place));
    // Zeroes take no room, however many.
    let script = "head -c 3221225472 /dev/zero | zstd -q -1 >zero.img.zst";
    let mut sh = Command::new("sh");
    place.prepare(&mut sh);
    assert_eq!(place.finish(sh.args(["-c", script])).code, 0);
    let ran = run(&place, &["map", "zero.img.zst", "--store-limit", "100MiB"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    // A small disk fills up to what is to be left free.
    if !require_root(name) {
        return;
    }
    let small = place.dir("small");
    tool(Command::new("mount").args(["-t", "tmpfs", "-o", "size=200m,mode=700", "small"]).arg(&small));
    let ran = run(&place, &["ls", "bomb.img.zst", "--store", small.to_str().unwrap()]);
    let left = run(&place, &["--json", "store", "list", "--store", small.to_str().unwrap()]);
    becket_testkit::umount(&small);
    assert!(ran.code == 1 && ran.err.contains("too little room"), "{ran:?}");
    assert_eq!(left.json()["objects"], serde_json::json!([]));
}

#[test]
fn two_processes_that_want_the_same_stream_decode_it_once() {
    let name = "streams::two_processes_that_want_the_same_stream_decode_it_once";
    if !tools_are_there(name) {
        return;
    }
    let place = scratch();
    let plain = ext4(&place);
    pack(&place, &plain, "xz");
    let mut children: Vec<_> = (0..4)
        .map(|_| {
            let mut command = common::web::command(&place, &["cat", "d.img.xz/dir/file"]);
            command.stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    let list = run(&place, &["--json", "store", "list"]).json();
    assert_eq!(list["objects"].as_array().unwrap().len(), 1, "{list:#}");
    // What a process left that was killed is swept up with the next stream.
    let layout = place.path("store/v1");
    fs::write(layout.join(".part-0123"), vec![7; 1 << 20]).unwrap();
    pack(&place, &plain, "gzip");
    ok(&place, &["ls", "d.img.gz"]);
    assert!(!layout.join(".part-0123").exists());
    ok(&place, &["store", "drop", "--all"]);
    let names = fs::read_dir(&layout).unwrap().map(|entry| entry.unwrap().file_name());
    let locks: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with(".lock-")).collect();
    assert!(locks.is_empty(), "{locks:?}");
}

/// The store has nothing of them before the first command, and all of them afterwards: both see the same.
#[test]
fn a_file_of_several_frames_or_members_is_read_as_a_whole_from_the_first_command_on() {
    let name = "streams::a_file_of_several_frames_or_members_is_read_as_a_whole_from_the_first_command_on";
    if !tools_are_there(name) {
        return;
    }
    let place = scratch();
    // A disk whose table of partitions speaks of all of it.
    let mut disk = vec![0; 80 << 20];
    disk[512..520].copy_from_slice(b"EFI PART");
    disk[544..552].copy_from_slice(&((160 << 10) - 1_u64).to_le_bytes());
    disk[40 << 20..][..6].copy_from_slice(b"middle");
    let packed = |bytes: &[u8], words: &[&str]| {
        fs::write(place.path("plain"), bytes).unwrap();
        let out = fs::File::create(place.path("packed")).unwrap();
        tool(Command::new(words[0]).args(&words[1..]).arg(place.path("plain")).stdout(Stdio::from(out)));
        fs::read(place.path("packed")).unwrap()
    };
    let (lz4, gzip) = (["lz4", "-1", "-q", "-c", "--content-size"], ["gzip", "-1", "-n", "-c"]);
    let halves = disk.split_at(40 << 20);
    let frames = [packed(halves.0, &lz4), packed(halves.1, &lz4)].concat();
    let members = packed(&disk, &gzip).repeat(2);
    for (file, stream, bytes) in [("d.img.lz4", frames, disk.clone()), ("d.img.gz", members, disk.repeat(2))]
    {
        fs::write(place.path(file), &stream).unwrap();
        let origin = Origin::start(stream);
        for source in [file.to_owned(), origin.url(&format!("/{file}"))] {
            for round in 0..2 {
                let got = common::web::command(&place, &["cat", &source]).output().unwrap();
                let said = String::from_utf8_lossy(&got.stderr).into_owned();
                assert!(got.status.success() && got.stdout == bytes, "{source}, round {round}: {said}");
            }
        }
    }
}

#[test]
fn what_is_decoded_is_called_by_the_name_of_its_file() {
    let name = "streams::what_is_decoded_is_called_by_the_name_of_its_file";
    if !tools_are_there(name) {
        return;
    }
    let place = scratch();
    let packed = pack(&place, &ext4(&place), "gzip");
    for _ in 0..2 {
        let map = ok(&place, &["map", "d.img.gz"]);
        assert!(map.contains("d.img.gz") && !map.contains("/store/") && !map.contains("file:"), "{map}");
        assert!(map.contains("gzip") && !map.contains("data"), "its bytes are not in the file: {map}");
        let map = run(&place, &["map", "--json", "d.img.gz"]).json();
        let kinds = map["extents"].as_array().unwrap().iter().map(|extent| text(extent, "kind"));
        assert!(
            kinds.clone().any(|kind| kind == "gzip") && !kinds.clone().any(|kind| kind == "data"),
            "{map:#}"
        );
        // The second time all of it is there.
        ok(&place, &["copy", "--force", "d.img.gz", "out"]);
    }
    // A file packed twice is not to be unpacked in the store.
    let twice = pack(&place, &packed, "xz");
    for verb in ["ls", "attach"] {
        let ran = run(&place, &[verb, twice.to_str().unwrap()]);
        assert!(ran.code == 1 && ran.err.contains("compressed once more, by gzip"), "{ran:?}");
        assert!(ran.err.contains("unpack it once") && !ran.err.contains("/store/"), "{ran:?}");
    }
    // No program checks a URL.
    let whole = fs::read(&packed).unwrap();
    let origin = Origin::start(whole[..whole.len() / 2].to_vec());
    let ran = run(&place, &["copy", &origin.url("/bad.gz"), "bad"]);
    assert!(ran.code == 1 && ran.err.contains("check the file: gzip -t FILE"), "{ran:?}");
}

#[test]
fn what_was_decoded_of_a_file_is_found_in_the_store_by_the_file_s_path() {
    let name = "streams::what_was_decoded_of_a_file_is_found_in_the_store_by_the_file_s_path";
    if !tools_are_there(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("d.img"), 4 << 20, 5);
    let packed = pack(&place, &place.path("d.img"), "gzip");
    std::os::unix::fs::symlink(&packed, place.path("link.gz")).unwrap();
    let refused = |words: &[&str], said: &str| {
        let ran = run(&place, words);
        assert!(
            ran.code != 0 && ran.err.contains(said) && !ran.err.contains("--record"),
            "{words:?}: {ran:?}"
        );
    };
    let decodes = "it is decoded into the store when all of it is first read: becket cat d.img.gz >/dev/null";
    refused(&["store", "prefetch", "d.img.gz"], decodes);
    refused(&["store", "prefetch", "d.img"], "it needs no store");
    refused(&["store", "prefetch", "none.gz"], "is not a URL of what becket fetches");
    refused(&["store", "list", "d.img.gz"], "the store has nothing of d.img.gz");
    ok(&place, &["copy", "d.img.gz", "out"]);
    let file = packed.to_str().unwrap();
    for word in ["d.img.gz", "./d.img.gz", "link.gz", file, &format!("file:{file}")] {
        let list = run(&place, &["--json", "store", "list", word]).json();
        assert_eq!(list["objects"].as_array().map(Vec::len), Some(1), "{word}: {list:#}");
    }
    refused(&["store", "trace", "d.img.gz"], "nothing was recorded of d.img.gz");
    // Also when the file is gone.
    fs::remove_file(&packed).unwrap();
    assert_eq!(run(&place, &["--json", "store", "drop", "d.img.gz"]).json()["dropped"][0]["size"], 4 << 20);
    assert_eq!(ok(&place, &["store", "list"]), "");
}

#[test]
fn fuse_an_overlay_of_a_compressed_file_lies_over_its_contents_wherever_they_are_stored() {
    let name =
        "streams::fuse_an_overlay_of_a_compressed_file_lies_over_its_contents_wherever_they_are_stored";
    if !require_root(name) || !require_fuse(name) || !tools_are_there(name) {
        return;
    }
    let place = scratch();
    let plain = ext4(&place);
    let packed = pack(&place, &plain, "gzip");
    let over = |more: &[&str]| {
        let words = [&["attach", "--via", "fuse", "d.img.gz", "--cow", "o.qcow2"], more].concat();
        let ran = run(&place, &words);
        if ran.code == 0 {
            ok(&place, &["detach", "--all"]);
        }
        ran
    };
    assert_eq!(over(&[]).code, 0);
    let head = fs::read(place.path("o.qcow2")).unwrap();
    assert!(head[..4096].windows(13).any(|part| part == b":./d.img.gz\0\0"), "it names the file");
    // Its times change; it is copied; it is decoded elsewhere.
    let bytes = fs::read(&packed).unwrap();
    fs::remove_file(&packed).unwrap();
    fs::write(&packed, &bytes).unwrap();
    assert_eq!(over(&[]).code, 0);
    assert_eq!(over(&["--store", place.path("other").to_str().unwrap()]).code, 0);
    // Other contents are another image.
    image::random(&plain, 48 << 20, 99);
    pack(&place, &plain, "gzip");
    let ran = over(&[]);
    assert!(
        ran.code == 1 && ran.err.contains("it lies over version ") && ran.err.contains("d.img.gz, and this")
    );
    assert!(!ran.err.contains("rebase"), "{ran:?}");
    fs::write(&packed, &bytes).unwrap();
    assert_eq!(over(&[]).code, 0);
}
