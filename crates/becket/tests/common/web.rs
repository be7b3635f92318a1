//! Images on web servers of the test's own.

use std::{fs, path::PathBuf, process::Command};

use becket_testkit::{Ran, Scratch, image, tool};

/// A becket whose store is in the test's own directory.
pub(crate) fn command(place: &Scratch, words: &[&str]) -> Command {
    let mut command = place.becket();
    command.env("BECKET_STORE", place.path("store")).env_remove("http_proxy").env_remove("HTTP_PROXY");
    command.env_remove("all_proxy").env_remove("ALL_PROXY").env("NETRC", place.path("netrc")).args(words);
    command
}

pub(crate) fn run(place: &Scratch, words: &[&str]) -> Ran {
    place.finish(&mut command(place, words))
}

#[track_caller]
pub(crate) fn ok(place: &Scratch, words: &[&str]) -> String {
    let ran = run(place, words);
    assert_eq!(ran.code, 0, "{words:?}: {ran:?}");
    ran.out
}

/// An ext4 with a file, and files that nobody reads.
pub(crate) fn ext4(place: &Scratch) -> PathBuf {
    let tree = place.dir("tree");
    fs::create_dir(tree.join("dir")).expect("a directory");
    fs::write(tree.join("dir/file"), "from afar").expect("a file");
    image::random(&tree.join("big"), 20 << 20, 3);
    let image = place.path("d.img");
    tool(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&image).arg("48M"));
    image
}
