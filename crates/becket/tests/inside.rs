//! `ls`, `cat` and `cp`: what they show, keep and refuse, also of images that were made to do harm.
//! Never attaches anything.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _, symlink},
        process::CommandExt as _,
    },
    path::Path,
    process::{Command, Stdio},
};

use becket_testkit::{Scratch, image, require_plain_machine, require_root, tool};
use common::scratch;
use serde_json::json;

/// An ext4 without checksums, so that its directories can be changed by hand.
fn ext4(place: &Scratch, name: &str, tree: &Path) {
    let mut mkfs = Command::new("mke2fs");
    mkfs.args(["-q", "-t", "ext4", "-O", "^metadata_csum,^dir_index", "-d"]).arg(tree);
    tool(mkfs.arg(place.path(name)).arg("8M"));
}

/// Writes another name of the same length over one in a directory of the image.
fn rename(place: &Scratch, name: &str, from: &[u8], to: &[u8]) {
    let path = place.path(name);
    let mut bytes = fs::read(&path).unwrap();
    let places: Vec<_> = (0..bytes.len() - from.len()).filter(|at| bytes[*at..].starts_with(from)).collect();
    assert!(!places.is_empty(), "{from:?} is not in the image");
    places.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to));
    fs::write(path, bytes).unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn no_image_writes_outside_of_the_directory() {
    let name = "inside::no_image_writes_outside_of_the_directory";
    if !require_plain_machine(name, &["mke2fs", "debugfs"]) {
        return;
    }
    let place = scratch();
    let (tree, outside) = (place.dir("tree"), place.dir("outside"));
    fs::write(outside.join("kept"), "kept").unwrap();
    // Two entries of one name each, in both orders: a link to elsewhere, and what would be written through
    // it.
    for name in ["aa1", "bb2", "cc1", "dd2"] {
        symlink(&outside, tree.join(name)).unwrap();
    }
    for name in ["aa2", "bb1"] {
        fs::create_dir(tree.join(name)).unwrap();
        fs::write(tree.join(name).join("evil"), "evil").unwrap();
    }
    for name in ["cc2", "dd1"] {
        fs::write(tree.join(name), "evil").unwrap();
    }
    fs::write(tree.join("q+q"), "slash").unwrap();
    fs::write(tree.join("n+n"), "nul").unwrap();
    fs::write(tree.join("good"), "good").unwrap();
    ext4(&place, "evil.img", &tree);
    for (from, to) in [("aa2", "aa1"), ("bb2", "bb1"), ("cc2", "cc1"), ("dd2", "dd1")] {
        rename(&place, "evil.img", from.as_bytes(), to.as_bytes());
    }
    rename(&place, "evil.img", b"q+q", b"q/q");
    rename(&place, "evil.img", b"n+n", b"n\0n");
    for (out, more) in [("out", &[][..]), ("forced", &["--force"][..])] {
        let ran = place.run(["cp", "-r"].iter().chain(more).chain(&["evil.img", out]));
        assert_eq!(ran.code, 1, "{ran:?}");
        assert_eq!(names(&outside), ["kept"], "{ran:?}");
        assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "kept");
        let got = names(&place.path(out));
        assert_eq!(got, ["aa1", "bb1", "cc1", "dd1", "good", "lost+found"], "{ran:?}");
        assert_eq!(ran.err.matches("its name is none that a file can have").count(), 2, "{ran:?}");
    }
    let ran = place.run(["cp", "-r", "--tar", "evil.tar", "evil.img"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let listed = tool(Command::new("tar").args(["-tf"]).arg(place.path("evil.tar")));
    assert!(
        listed.contains("evil.img/good") && !listed.contains("q/q") && !listed.contains(".."),
        "{listed}"
    );
    // The name of an existing link is no way out, either.
    fs::create_dir(place.path("linked")).unwrap();
    symlink(&outside, place.path("linked/evil.img")).unwrap();
    let ran = place.run(["cp", "-r", "evil.img", "linked"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_eq!(names(&outside), ["kept"], "{ran:?}");
}

#[test]
fn a_directory_in_itself_ends() {
    let name = "inside::a_directory_in_itself_ends";
    if !require_plain_machine(name, &["mke2fs", "debugfs"]) {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree");
    fs::create_dir(tree.join("d")).unwrap();
    fs::write(tree.join("d/grain"), "grain").unwrap();
    ext4(&place, "loop.img", &tree);
    for link in ["ln <2> d/root", "ln d d/self"] {
        tool(Command::new("debugfs").args(["-w", "-R", link]).arg(place.path("loop.img")));
    }
    let ran = place.run(["cp", "-r", "loop.img", "out"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_eq!(ran.err.matches("the directory has two places").count(), 2, "{ran:?}");
    assert_eq!(fs::read_to_string(place.path("out/d/grain")).unwrap(), "grain");
    let listed = place.ok(["ls", "-R", "loop.img"]);
    assert_eq!(listed.matches("grain").count(), 1, "{listed}");
}

#[test]
fn what_exists_stays_unless_it_is_to_be_replaced() {
    let name = "inside::what_exists_stays_unless_it_is_to_be_replaced";
    if !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree");
    fs::write(tree.join("a"), "new").unwrap();
    fs::write(tree.join("b"), "new").unwrap();
    ext4(&place, "fs.img", &tree);
    let out = place.dir("out");
    fs::write(place.path("elsewhere"), "old").unwrap();
    fs::write(out.join("a"), "old").unwrap();
    symlink(place.path("elsewhere"), out.join("b")).unwrap();
    let ran = place.run(["cp", "fs.img/a", "fs.img/b", "out"]);
    assert_eq!((ran.code, ran.err.matches("it exists").count()), (1, 2), "{ran:?}");
    assert_eq!(fs::read_to_string(out.join("a")).unwrap(), "old");
    place.ok(["cp", "--force", "fs.img/[ab]", "out"]);
    assert_eq!(fs::read_to_string(out.join("a")).unwrap(), "new");
    assert_eq!(fs::read_to_string(out.join("b")).unwrap(), "new");
    assert!(!fs::symlink_metadata(out.join("b")).unwrap().is_symlink(), "the link itself was replaced");
    assert_eq!(fs::read_to_string(place.path("elsewhere")).unwrap(), "old");
    place.ok(["cp", "fs.img/a", "renamed"]);
    assert_eq!(fs::read_to_string(place.path("renamed")).unwrap(), "new");
    assert_eq!(place.run(["cp", "fs.img/a", "fs.img/b", "renamed"]).code, 1);
    assert_eq!(place.run(["cp", "fs.img", "out/fs"]).code, 0, "an image is a file like others");
    assert!(fs::read(place.path("out/fs")).unwrap() == fs::read(place.path("fs.img")).unwrap());
    assert_eq!(place.run(["cp", "fs.img/lost+found", "out"]).code, 1, "a directory takes -r");
    assert_eq!(place.run(["cp", "fs.img/a"]).code, 2);
}

#[test]
fn a_user_gets_files_and_no_privileges() {
    let name = "inside::a_user_gets_files_and_no_privileges";
    if !require_root(name) || !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree");
    fs::write(tree.join("tool"), "tool").unwrap();
    std::os::unix::fs::chown(tree.join("tool"), Some(12), Some(13)).unwrap();
    fs::set_permissions(tree.join("tool"), fs::Permissions::from_mode(0o6777)).unwrap();
    tool(Command::new("mknod").arg(tree.join("null")).args(["c", "1", "3"]));
    fs::create_dir(tree.join("shut")).unwrap();
    fs::write(tree.join("shut/in"), "in").unwrap();
    fs::set_permissions(tree.join("shut"), fs::Permissions::from_mode(0o500)).unwrap();
    ext4(&place, "fs.img", &tree);
    for dir in [place.path("."), place.path("fs.img")] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let home = place.dir("home");
    std::os::unix::fs::chown(&home, Some(4242), Some(4242)).unwrap();
    for (out, option, mode) in [("plain", "-r", 0o755), ("preserved", "-rp", 0o777)] {
        let mut command = place.becket();
        command.uid(4242).gid(4242).current_dir(&home).args(["cp", option]);
        let ran = place.finish(command.arg(place.path("fs.img")).arg(out));
        assert_eq!((ran.code, ran.err.lines().count()), (0, 1), "{ran:?}");
        assert!(ran.err.contains("1 devices and sockets were left out"), "{ran:?}");
        let meta = fs::metadata(home.join(out).join("tool")).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid()), (mode, 4242));
        assert_eq!(fs::read_to_string(home.join(out).join("shut/in")).unwrap(), "in");
        assert_eq!(fs::metadata(home.join(out).join("shut")).unwrap().mode() & 0o777, 0o500);
    }
    // Root, too, must ask for privileges.
    place.ok(["cp", "fs.img/tool", "tool"]);
    let meta = fs::metadata(place.path("tool")).unwrap();
    assert_eq!((meta.mode() & 0o7000, meta.uid()), (0, 0));
}

#[test]
fn lists_are_long_deep_and_matched() {
    let name = "inside::lists_are_long_deep_and_matched";
    if !require_root(name) || !require_plain_machine(name, &["mksquashfs", "sfdisk", "mke2fs"]) {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree/etc");
    for file in ["a.conf", "b.conf", ".c.conf", "d"] {
        fs::write(tree.join(file), file).unwrap();
        fs::set_permissions(tree.join(file), fs::Permissions::from_mode(0o640)).unwrap();
    }
    symlink("a.conf", tree.join("link")).unwrap();
    fs::create_dir(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/deep"), "deep").unwrap();
    tool(
        Command::new("touch")
            .args(["-h", "-d", "2001-02-03 04:05:06Z"])
            .arg(tree.join("link"))
            .arg(tree.join("a.conf")),
    );
    let mut mksquashfs = Command::new("mksquashfs");
    mksquashfs.arg(place.path("tree")).arg(place.path("s.img")).args(["-quiet", "-no-progress", "-all-root"]);
    tool(&mut mksquashfs);
    assert_eq!(
        place.ok(["ls", "s.img/etc"]),
        "file  7  .c.conf\nfile  6  a.conf\nfile  6  b.conf\nfile  1  d\nlink  6  link -> a.conf\ndir   -  sub\n"
    );
    let long = place.ok(["ls", "-la", "s.img/etc/[al]*"]);
    assert_eq!(
        long,
        "-rw-r-----  1  0  0  6  2001-02-03 04:05:06  s.img/etc/a.conf\n\
         lrwxrwxrwx  1  0  0  6  2001-02-03 04:05:06  s.img/etc/link -> a.conf\n"
    );
    let one = place.ok(["ls", "-l", "s.img/etc/a.conf"]);
    assert_eq!(one, "-rw-r-----  1  0  0  6  2001-02-03 04:05:06  s.img/etc/a.conf\n");
    let deep = place.ok(["ls", "-R", "s.img"]);
    assert!(deep.starts_with("s.img:\ndir  -  etc\n\ns.img/etc:\n"), "{deep}");
    assert!(deep.ends_with("\n\ns.img/etc/sub:\nfile  4  deep\n"), "{deep}");
    let listed = place.json(["ls", "-lR", "s.img/etc/sub"]);
    assert_eq!(listed["entries"][0]["mode"], json!("-rw-r--r--"), "{listed}");
    assert_eq!(place.ok(["cat", "s.img/etc/*.conf", "s.img/*/sub/d??p"]), "a.confb.confdeep");
    assert_eq!(place.ok(["cat", "s.img/etc/link"]), "a.conf", "a link is followed inside the image");
    for (pattern, why) in [
        ("s.img/etc/*.cfg", "no name matches"),
        ("s.img/*/*/zz", "no name matches"),
        ("s.img/nothing/*", "has no"),
    ] {
        let ran = place.run(["cat", pattern]);
        assert!(ran.code == 1 && ran.err.contains(why), "{pattern}: {ran:?}");
    }
    let ran = place.run(["cp", "s.img/etc/d", "nodir/x"]);
    assert!(ran.err.contains("hint: make it first: mkdir -p nodir"), "{ran:?}");
    let ran = place.run(["cat", "s.img/etc", "s.img/etc/d"]);
    assert_eq!((ran.code, ran.out.as_str()), (1, "d"), "{ran:?}");

    // Partitions are matched, too, and files are as they are stored.
    fs::copy(place.path("s.img"), place.path("tree/s.img")).unwrap();
    image::partitioned(&place.path("disk.img"), &place.path("tree"));
    assert_eq!(place.ok(["cat", "disk.img/p*/etc/d"]), "d");
    assert_eq!(place.ok(["cat", "disk.img/p1/s.img/etc/d"]), "d");
    place.ok(["cp", "disk.img/p1/s.img", "back.img"]);
    assert!(fs::read(place.path("back.img")).unwrap() == fs::read(place.path("s.img")).unwrap());
    let copied = place.json(["cp", "-r", "disk.img/p1/etc", "disk.img/p1/s.img/etc/sub", "."]);
    assert_eq!(copied["copied"]["files"], json!(6), "{copied}");
    assert_eq!(fs::read_to_string(place.path("sub/deep")).unwrap(), "deep");
}

#[test]
fn a_partition_is_named_by_its_label_or_uuid() {
    if !require_plain_machine("inside::a_partition_is_named_by_its_label_or_uuid", &["mke2fs", "sfdisk"]) {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree");
    fs::write(tree.join("file"), "content").unwrap();
    image::partitioned(&place.path("disk.img"), &tree);
    let report = place.run(["--json", "inspect", "disk.img"]).json();
    let part = &report["image"]["children"][0];
    for name in ["partition_uuid", "uuid"] {
        let uuid = part[name].as_str().unwrap();
        let path = format!("disk.img/by-uuid/{uuid}");
        let [named, numbered] = [path.as_str(), "disk.img/p1"].map(|path| place.run(["ls", path]));
        assert_eq!((named.code, &named.out), (0, &numbered.out), "{named:?}");
        assert!(named.out.contains("file"), "{named:?}");
        assert_eq!(place.run(["cp", &path, &format!("{name}.img")]).code, 0);
        let len = fs::metadata(place.path(&format!("{name}.img"))).unwrap().len();
        assert_eq!(len, part["size"].as_u64().unwrap());
    }
    let missing = place.run(["cat", "disk.img/by-label/none"]);
    assert!(missing.code == 1 && missing.err.contains("by-label/none"), "{missing:?}");
}

#[test]
fn inspect_names_an_encrypted_qcow2_that_nothing_else_opens() {
    let name = "inside::inspect_names_an_encrypted_qcow2_that_nothing_else_opens";
    if !require_plain_machine(name, &["qemu-img"]) {
        return;
    }
    let place = scratch();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "--object", "secret,id=s,data=x", "-o"]);
    create.arg("encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10");
    tool(create.arg(place.path("secret.qcow2")).arg("64K"));
    assert_eq!(place.run(["ls", "secret.qcow2"]).code, 1);
    let ran = place.run(["--json", "inspect", "secret.qcow2"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let report = &ran.json()["image"];
    assert_eq!(report["format"], "qcow2", "{report}");
    assert!(report["problems"][0].as_str().unwrap().contains("an encrypted qcow2"), "{report}");
}

#[test]
fn a_reader_may_stop_early() {
    let place = scratch();
    image::sparse(&place.path("x.img"), 1 << 40);
    let mut cat = place.becket();
    let mut cat = cat.args(["cat", "x.img"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut some = [1; 100];
    cat.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let ended = cat.wait_with_output().unwrap();
    assert_eq!(some, [0; 100]);
    assert!(ended.status.code() == Some(1) && ended.stderr.is_empty(), "it is not complete: {ended:?}");
    std::io::stdout().flush().unwrap();
}

/// A file system with so many small files, `a0` and so on.
fn small_files(place: &Scratch, name: &str, count: usize) {
    let tree = place.dir("tree");
    (0..count).for_each(|number| fs::write(tree.join(format!("a{number}")), "new").unwrap());
    ext4(place, name, &tree);
}

#[test]
fn a_source_is_not_replaced_by_its_copy() {
    let name = "inside::a_source_is_not_replaced_by_its_copy";
    if !require_plain_machine(name, &["mke2fs", "qemu-img"]) {
        return;
    }
    let place = scratch();
    small_files(&place, "fs.img", 1);
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "fs.img", "top.qcow2"]);
    tool(create.current_dir(place.path("")));
    fs::hard_link(place.path("fs.img"), place.dir("out").join("fs.img")).unwrap();
    let before = fs::metadata(place.path("fs.img")).unwrap();
    for words in [
        &["cp", "-f", "fs.img", "."][..],
        &["cp", "-f", "fs.img", "out"],
        &["cp", "-f", "fs.img/a0", "fs.img"],
        &["cp", "-f", "top.qcow2/a0", "fs.img"],
        &["cp", "-f", "--tar", "fs.img", "fs.img/a0"],
        &["cp", "-f", "--tar", "fs.img", "top.qcow2/a0"],
    ] {
        let ran = place.run(words);
        assert_eq!(ran.code, 1, "{words:?}: {ran:?}");
        assert!(ran.err.contains("it is copied from"), "{words:?}: {ran:?}");
        let after = fs::metadata(place.path("fs.img")).unwrap();
        assert_eq!((before.ino(), before.nlink()), (after.ino(), after.nlink()), "{words:?}");
    }
    let left: Vec<_> = names(&place.path(".")).into_iter().filter(|name| !name.starts_with('.')).collect();
    assert_eq!(left, ["fs.img", "out", "top.qcow2", "tree"]);
    assert_eq!(names(&place.path("out")), ["fs.img"]);
}

#[test]
fn only_files_and_links_are_replaced() {
    let name = "inside::only_files_and_links_are_replaced";
    if !require_root(name) || !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    small_files(&place, "fs.img", 1);
    let nodes = place.dir("nodes");
    tool(Command::new("mknod").arg(nodes.join("null")).args(["c", "1", "3"]));
    tool(Command::new("mknod").arg(nodes.join("block")).args(["b", "7", "4000"]));
    tool(Command::new("mkfifo").arg(nodes.join("fifo")));
    drop(std::os::unix::net::UnixListener::bind(nodes.join("socket")).unwrap());
    fs::create_dir(nodes.join("dir")).unwrap();
    symlink("null", nodes.join("link")).unwrap();
    let inodes = || {
        let inode = |name: &String| (name.clone(), fs::symlink_metadata(nodes.join(name)).unwrap().ino());
        names(&nodes).iter().map(inode).collect::<Vec<_>>()
    };
    let before = inodes();
    for node in ["null", "block", "fifo", "socket"] {
        let ran = place.run(["cp", "-f", "fs.img/a0", &format!("nodes/{node}")]);
        assert!(ran.code == 1 && ran.err.contains("it is not a file"), "{node}: {ran:?}");
    }
    for node in ["block", "socket", "dir"] {
        let ran = place.run(["cp", "-f", "--tar", &format!("nodes/{node}"), "fs.img/a0"]);
        assert!(ran.code == 1 && ran.err.contains("it is not a file"), "{node}: {ran:?}");
    }
    for node in ["null", "link"] {
        place.ok(["cp", "-f", "--tar", &format!("nodes/{node}"), "fs.img/a0"]);
    }
    assert_eq!(inodes(), before);
    let reader =
        Command::new("tar").arg("-tf").arg(nodes.join("fifo")).stdout(Stdio::piped()).spawn().unwrap();
    place.ok(["cp", "-f", "--tar", "nodes/fifo", "fs.img/a0"]);
    let read = reader.wait_with_output().unwrap();
    assert_eq!((read.status.success(), read.stdout.as_slice()), (true, &b"a0\n"[..]));
    assert_eq!(inodes(), before);
}

#[test]
fn a_file_is_replaced_by_a_whole_one_only() {
    let name = "inside::a_file_is_replaced_by_a_whole_one_only";
    if !require_plain_machine(name, &["xz", "mke2fs"]) {
        return;
    }
    let place = scratch();
    fs::write(place.path("x"), image::random_bytes(3 << 20, 1)).unwrap();
    tool(Command::new("xz").args(["-0", "--block-size=1MiB"]).arg(place.path("x")));
    let mut packed = fs::read(place.path("x.xz")).unwrap();
    let middle = packed.len() / 2;
    packed[middle..middle + 100].fill(0x55);
    fs::write(place.path("x.xz"), packed).unwrap();
    let out = place.dir("out");
    fs::write(out.join("kept"), "old").unwrap();
    let ran = place.run(["cp", "-f", "x.xz", "out/kept"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_eq!(fs::read_to_string(out.join("kept")).unwrap(), "old");
    assert_eq!(names(&out), ["kept"]);
    // All kinds of entries replace, a second name of a file also itself.
    let tree = place.dir("tree");
    fs::write(tree.join("a"), "new").unwrap();
    fs::hard_link(tree.join("a"), tree.join("b")).unwrap();
    symlink("a", tree.join("link")).unwrap();
    tool(Command::new("mkfifo").arg(tree.join("fifo")));
    ext4(&place, "fs.img", &tree);
    for name in ["a", "link", "fifo"] {
        fs::write(out.join(name), "old").unwrap();
    }
    fs::hard_link(out.join("a"), out.join("b")).unwrap();
    place.ok(["cp", "-rf", "fs.img/.", "out"]);
    assert_eq!(names(&out), ["a", "b", "fifo", "kept", "link", "lost+found"]);
    assert_eq!(fs::read_to_string(out.join("link")).unwrap(), "new");
    let inode = |name: &str| fs::symlink_metadata(out.join(name)).unwrap().ino();
    assert_eq!(inode("a"), inode("b"));
}

#[test]
fn many_files_of_one_directory_are_replaced() {
    let name = "inside::many_files_of_one_directory_are_replaced";
    if !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    small_files(&place, "many.img", 700);
    place.ok(["cp", "-r", "many.img/.", "out"]);
    let files = || names(&place.path("out")).into_iter().filter(|name| name != "lost+found");
    for name in files() {
        fs::write(place.path("out").join(name), "old").unwrap();
    }
    let refused = place.run(["cp", "-r", "many.img/.", "out"]);
    assert!(refused.code == 1 && refused.err.matches("it exists").count() == 700, "{refused:?}");
    place.ok(["cp", "-r", "--force", "many.img/.", "out"]);
    assert_eq!(files().count(), 700, "nothing hidden is left");
    assert!(files().all(|name| fs::read(place.path("out").join(name)).is_ok_and(|now| now == b"new")));
}

#[test]
fn a_tree_is_copied_with_few_open_files() {
    let name = "inside::a_tree_is_copied_with_few_open_files";
    if !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let tree = place.path("tree");
    for number in 0..300 {
        let dir = tree.join(format!("d{number}"));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("file"), number.to_string()).unwrap();
    }
    ext4(&place, "wide.img", &tree);
    let mut few = Command::new("prlimit");
    few.arg("--nofile=64").arg(place.becket().get_program());
    tool(few.args(["cp", "-r", "wide.img/.", "out"]).current_dir(place.path("")));
    for number in 0..300 {
        let copied = fs::read(place.path("out").join(format!("d{number}/file"))).unwrap();
        assert_eq!(copied, number.to_string().into_bytes());
    }
}

#[test]
fn a_full_file_system_keeps_no_file_that_is_not_whole() {
    let name = "inside::a_full_file_system_keeps_no_file_that_is_not_whole";
    if !require_plain_machine(name, &["mke2fs"]) || !require_root(name) {
        return;
    }
    let place = scratch();
    let tree = place.path("tree");
    fs::create_dir(&tree).unwrap();
    for number in 0..400_usize {
        fs::write(tree.join(number.to_string()), vec![7; 300 * (number % 90)]).unwrap();
    }
    ext4(&place, "a.img", &tree);
    fs::create_dir(place.path("small")).unwrap();
    tool(Command::new("mount").args(["-t", "tmpfs", "-o", "size=2M", "none"]).arg(place.path("small")));
    let full = place.run(["cp", "-r", "a.img/.", "small"]);
    assert!(full.code == 1 && full.err.contains("no space left"), "{full:?}");
    let mut whole = 0;
    for name in names(&place.path("small")).iter().filter(|name| *name != "lost+found") {
        let copied = fs::read(place.path("small").join(name)).unwrap();
        assert!(copied == fs::read(tree.join(name)).unwrap(), "{name}: {} bytes", copied.len());
        whole += 1;
    }
    tool(Command::new("umount").arg(place.path("small")));
    assert!((20..400).contains(&whole), "{whole} files");
}

#[test]
fn an_attribute_that_does_not_fit_stops_no_other_file() {
    let name = "inside::an_attribute_that_does_not_fit_stops_no_other_file";
    if !require_plain_machine(name, &["mke2fs", "debugfs"]) {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree");
    (0..3).for_each(|number| fs::write(tree.join(format!("a{number}")), "new").unwrap());
    let mut mkfs = Command::new("mke2fs");
    mkfs.args(["-q", "-t", "ext4", "-b", "4096", "-O", "ea_inode", "-d"]).arg(&tree);
    tool(mkfs.arg(place.path("fs.img")).arg("8M"));
    fs::write(place.path("value"), [1; 4096]).unwrap();
    let set = format!("ea_set -f {} a1 user.big", place.path("value").display());
    tool(Command::new("debugfs").args(["-w", "-R", &set]).arg(place.path("fs.img")));
    let ran = place.run(["cp", "-r", "fs.img", "out"]);
    // Many file systems of hosts have no room for it.
    let whole = ran.code == 0 && ran.err.is_empty();
    assert!(whole || ran.code == 1 && ran.err.contains("its attributes cannot be set"), "{ran:?}");
    let copied = names(&place.path("out"));
    assert!(["a0", "a2"].iter().all(|name| copied.iter().any(|copied| copied == name)), "{copied:?}");
    assert_eq!(copied.iter().any(|name| name == "a1"), whole, "{copied:?}");
}

#[test]
fn pieces_of_sparse_files_are_whole_blocks_in_archives() {
    let name = "inside::pieces_of_sparse_files_are_whole_blocks_in_archives";
    if !require_plain_machine(name, &["qemu-img", "qemu-io", "tar"]) {
        return;
    }
    let place = scratch();
    fs::write(place.path("base"), image::random_bytes(1000, 1)).unwrap();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base", "top.qcow2", "1000448"]);
    tool(create.current_dir(place.path("")));
    for write in ["write -P 7 128k 3k", "write -P 8 983040 1k"] {
        tool(Command::new("qemu-io").args(["-c", write]).arg(place.path("top.qcow2")));
    }
    place.ok(["cp", "--tar", "out.tar", "top.qcow2"]);
    tool(
        Command::new("tar")
            .args(["-xf", "out.tar"])
            .arg("-C")
            .arg(place.dir("out"))
            .current_dir(place.path("")),
    );
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-O", "raw", "top.qcow2", "raw"]);
    tool(convert.current_dir(place.path("")));
    let (out, raw) = (fs::read(place.path("out/top.qcow2")).unwrap(), fs::read(place.path("raw")).unwrap());
    assert!(out == raw[..out.len()], "{} and {} bytes", out.len(), raw.len());
}
