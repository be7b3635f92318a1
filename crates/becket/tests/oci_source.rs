//! Images in a registry of containers: Debian's docker-registry. Sends only to the loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    io::Read as _,
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use becket_testkit::{
    Ran, Scratch, image,
    origin::{Origin, Reply, Request},
    require_fuse, require_plain_machine, require_tools, tool, wait_until,
};
use common::fetched::{attach, block_of, open, random, read};
use common::one::only;
use common::{scratch, web};

/// `secret`, as htpasswd(1) writes it.
const HASH: &str = "$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a";

/// A process that ends with this.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn digest(path: &Path) -> String {
    let ran = Command::new("sha256sum").arg(path).output().unwrap();
    String::from_utf8(ran.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

/// Puts bytes where a registry has them; their digest.
fn blob(root: &Path, bytes: &[u8]) -> String {
    let file = root.join("new");
    fs::write(&file, bytes).unwrap();
    let digest = digest(&file);
    let dir = root.join("docker/registry/v2/blobs/sha256").join(&digest[..2]).join(&digest);
    fs::create_dir_all(&dir).unwrap();
    fs::rename(&file, dir.join("data")).unwrap();
    digest
}

fn link(root: &Path, path: &str, digest: &str) {
    let path = root.join("docker/registry/v2/repositories/images/disk").join(path);
    fs::create_dir_all(&path).unwrap();
    fs::write(path.join("link"), format!("sha256:{digest}")).unwrap();
}

/// Puts an image with these layers under a tag; the digest of its manifest.
fn push(root: &Path, tag: &str, layers: &[(&str, &[u8])]) -> String {
    const KIND: &str = "application/vnd.oci.image.manifest.v1+json";
    let described = |kind: &str, bytes: &[u8], title: &str| {
        let digest = blob(root, bytes);
        link(root, &format!("_layers/sha256/{digest}"), &digest);
        let size = bytes.len();
        format!(
            r#"{{"mediaType": "{kind}", "digest": "sha256:{digest}", "size": {size}, "annotations":
            {{"org.opencontainers.image.title": "{title}"}}}}"#
        )
    };
    let config = described("application/vnd.oci.empty.v1+json", b"{}", "config");
    let layers: Vec<String> =
        layers.iter().map(|(title, bytes)| described("application/x-raw", bytes, title)).collect();
    let layers = layers.join(",");
    let manifest =
        format!(r#"{{"schemaVersion": 2, "mediaType": "{KIND}", "config": {config}, "layers": [{layers}]}}"#);
    let digest = blob(root, manifest.as_bytes());
    link(root, &format!("_manifests/revisions/sha256/{digest}"), &digest);
    link(root, &format!("_manifests/tags/{tag}/current"), &digest);
    digest
}

fn run(place: &Scratch, words: &[&str]) -> Ran {
    let mut command = place.becket();
    for name in
        ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"]
    {
        command.env_remove(name);
    }
    command.env("BECKET_STORE", place.path("store")).env("DOCKER_CONFIG", place.path("")).args(words);
    place.finish(&mut command)
}

#[test]
fn a_layer_of_a_registry_is_read_and_compared_with_its_digest() {
    let name = "oci_source::a_layer_of_a_registry_is_read_and_compared_with_its_digest";
    if !require_plain_machine(name, &["docker-registry", "mke2fs", "sha256sum"]) {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree");
    fs::write(tree.join("file"), "from afar").unwrap();
    image::random(&tree.join("big"), 4 << 20, 3);
    let disk = place.path("disk.img");
    tool(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&disk).arg("16M"));
    let bytes = fs::read(&disk).unwrap();
    let root = place.dir("registry");
    let manifest = push(&root, "one", &[("disk.img", &bytes)]);
    push(&root, "two", &[("disk.img", &bytes), ("notes", b"read me")]);
    // Its bytes are others than its digest says.
    let damaged = [&bytes[..bytes.len() - 1], b"x"].concat();
    push(&root, "bad", &[("disk.img", &damaged)]);
    let digest = digest(&{
        fs::write(place.path("damaged"), &damaged).unwrap();
        place.path("damaged")
    });
    let file = root.join("docker/registry/v2/blobs/sha256").join(&digest[..2]).join(&digest).join("data");
    fs::write(file, &bytes).unwrap();
    fs::write(place.path("htpasswd"), format!("me:{HASH}\n")).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = format!(
        "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: \
         '127.0.0.1:{port}'}}\nauth: {{htpasswd: {{realm: r, path: {}}}}}\n",
        root.display(),
        place.path("htpasswd").display()
    );
    fs::write(place.path("registry.yml"), config).unwrap();
    let mut server = Command::new("docker-registry");
    server.arg("serve").arg(place.path("registry.yml"));
    server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _server = Ends(server.spawn().unwrap());
    let listens = || TcpStream::connect(("127.0.0.1", port)).is_ok();
    assert!(wait_until(Duration::from_secs(20), listens), "the registry does not listen");

    let url = format!("oci://127.0.0.1:{port}/images/disk:one");
    let refused = |url: &str, sentence: &str| {
        let ran = run(&place, &["copy", "--force", url, place.path("other").to_str().unwrap()]);
        assert!(ran.code != 0 && ran.err.contains(sentence), "{sentence}: {ran:?}");
        assert!(!ran.err.contains("secret") && !ran.err.contains("bWU6c2VjcmV0"), "{ran:?}");
    };
    refused(&url, "docker login");
    fs::write(place.path("config.json"), r#"{"auths": "#).unwrap();
    refused(&url, "config.json is not read");
    let auth = |port: u16| format!(r#"{{"auths": {{"127.0.0.1:{port}": {{"auth": "bWU6c2VjcmV0"}}}}}}"#);
    fs::write(place.path("config.json"), auth(port - 1)).unwrap();
    refused(&url, "does not allow it");
    fs::write(place.path("config.json"), auth(port)).unwrap();
    let cat = run(&place, &["cat", &format!("{url}#file")]);
    assert_eq!((cat.code, cat.out.as_str()), (0, "from afar"), "{cat:?}");
    let by_digest = format!("oci://127.0.0.1:{port}/images/disk@sha256:{manifest}");
    for url in [&url, &by_digest, &format!("oci://127.0.0.1:{port}/images/disk:two?layer=disk.img")] {
        let copied = place.path("copied");
        let copy = run(&place, &["copy", "--force", url, copied.to_str().unwrap()]);
        assert_eq!(copy.code, 0, "{url}: {copy:?}");
        assert!(fs::read(&copied).unwrap() == bytes, "{url}: the copy differs");
    }
    refused(&format!("oci://127.0.0.1:{port}/images/disk:two"), "disk.img, notes");
    refused(&format!("oci://127.0.0.1:{port}/images/disk:two?layer=x"), "no such layer");
    refused(&format!("oci://127.0.0.1:{port}/images/disk:none"), "has no images/disk:none");
    let bad = format!("oci://127.0.0.1:{port}/images/disk:bad");
    let ran = run(&place, &["store", "prefetch", &bad]);
    assert!(ran.code == 1 && ran.err.contains("not those of its digest"), "{ran:?}");
    let list = run(&place, &["--json", "store", "list"]).json();
    let objects = list["objects"].as_array().unwrap();
    let object = objects.iter().find(|object| object["url"] == bad.as_str()).unwrap();
    assert_eq!(object["stored"], 0, "what is not that of its digest does not count");
}

/// Neither the client nor the fetcher sees all of it.
#[test]
fn fuse_an_image_that_is_not_that_of_its_digest_does_not_count_once_all_of_it_is_there() {
    let name =
        "oci_source::fuse_an_image_that_is_not_that_of_its_digest_does_not_count_once_all_of_it_is_there";
    if !require_fuse(name) || !require_tools(name, &["sha256sum"]) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 16 << 20);
    let digest = digest(&place.path("random"));
    let mut damaged = bytes.clone();
    damaged[9 << 20] ^= 1;
    let origin = Origin::start(damaged);
    let serve = {
        let layer = format!(r#"{{"mediaType": "x", "digest": "sha256:{digest}", "size": {}}}"#, bytes.len());
        let manifest = format!(r#"{{"layers": [{layer}]}}"#).into_bytes();
        move |request: &Request, reply: Reply| match request.path.contains("manifests") {
            true => Reply { body: manifest.clone(), ..Reply::status(200) },
            false => reply,
        }
    };
    origin.trick(serve);
    let url = origin.url("/images/disk:one").replacen("http", "oci", 1);
    let disk = open(&attach(&place, &["--fill", &url]));
    let given = read(&disk, 0).unwrap();
    assert!(given.0 == block_of(&bytes, 0));
    let shown = || only(&place)["away"].as_str().is_some_and(|away| away.starts_with("source damaged: "));
    assert!(wait_until(Duration::from_secs(20), shown), "{:?}", only(&place));
    assert!(only(&place)["away"].as_str().unwrap().contains("not those of its digest"), "{:?}", only(&place));
    // The kernel may have asked for what is beside it.
    for block in [1500, 2304, 3000] {
        assert_eq!(read(&disk, block).map(drop).unwrap_err().raw_os_error(), Some(5), "block {block}");
    }
    drop(disk);
    place.ok(["detach", "--all"]);
    let list = web::run(&place, &["--json", "store", "list"]).json();
    assert_eq!(list["objects"][0]["stored"], 0, "{list:#}");
    // The registry was repaired. The next process compares it, once.
    origin.replace(bytes.clone(), "\"two\"");
    let disk = attach(&place, &["--fill", &url]);
    let data = Path::new(list["objects"][0]["path"].as_str().unwrap());
    let table = data.ancestors().nth(2).unwrap().join("table");
    let is_whole = || {
        let mut entry = [0; 8];
        fs::File::open(&table).unwrap().read_exact(&mut entry).unwrap();
        entry
    };
    let stored = || {
        let list = web::run(&place, &["--json", "store", "list"]).json();
        list["objects"][0]["stored"].as_u64() == Some(bytes.len() as u64)
    };
    assert!(wait_until(Duration::from_secs(20), stored));
    let before = is_whole();
    assert!(wait_until(Duration::from_secs(20), || is_whole() != before), "it was compared");
    assert!(fs::read(&disk).unwrap() == bytes);
    place.ok(["detach", "--all"]);
    web::ok(&place, &["store", "verify"]);
}
