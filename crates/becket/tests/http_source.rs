//! Images on web servers: read, copied and attached by their URLs, by servers that are honest and by others.
//! Sends only to the loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use becket_testkit::{
    Scratch, image,
    origin::{Origin, Reply},
    proxy::Proxy,
    require_plain_machine, require_root, tool, wait_until,
};
use common::scratch;
use common::web::{command, ext4, ok, run};

#[test]
fn an_image_on_a_web_server_is_read_without_a_device() {
    let name = "http_source::an_image_on_a_web_server_is_read_without_a_device";
    if !require_plain_machine(name, &["mke2fs", "mksquashfs", "genisoimage", "qemu-img", "xz"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let origin = Origin::start(fs::read(&image).unwrap());
    let url = origin.url("/d.img");
    assert_eq!(ok(&place, &["cat", &format!("{url}#dir/file")]), "from afar");
    let sent = origin.sent();
    assert!(sent < 2 << 20, "{sent} bytes were sent of 48 MiB");
    assert!(ok(&place, &["ls", &url]).contains("big"));
    assert_eq!(ok(&place, &["cat", &format!("{url}#/dir/f*e")]), "from afar");
    assert!(origin.sent() - sent <= 3 * (64 << 10), "the store has the rest");
    assert!(ok(&place, &["inspect", &url]).contains(&url), "the URL is shown, and no path of the store");
    assert!(ok(&place, &["map", &url]).contains("data"));
    ok(&place, &["cp", "-r", &format!("{url}#dir"), place.path("out").to_str().unwrap()]);
    assert_eq!(fs::read_to_string(place.path("out/file")).unwrap(), "from afar");
    let copied = place.path("copied");
    ok(&place, &["copy", &url, copied.to_str().unwrap()]);
    assert!(fs::read(&copied).unwrap() == fs::read(&image).unwrap(), "the copy differs");
    let sent = origin.sent();
    let listed = place.ok(["store", "list"]);
    for extra in [&["--no-store"][..], &["--no-store", "--sparse"], &["--no-store", "--to", "qcow2"]] {
        let copied = place.path("unstored");
        ok(&place, &[&["copy", "--force"], extra, &[&url, copied.to_str().unwrap()]].concat());
        if extra.contains(&"qcow2") {
            tool(Command::new("qemu-img").arg("compare").args([&image, &copied]));
        } else {
            assert!(fs::read(&copied).unwrap() == fs::read(&image).unwrap(), "{extra:?}");
        }
    }
    assert!(origin.sent() - sent >= 3 * fs::metadata(&image).unwrap().len(), "the store was not used");
    assert_eq!(place.ok(["store", "list"]), listed);
    // In an ISO, in a SquashFS; a qcow2; compressed.
    let tree = place.path("tree");
    let iso = place.dir("iso");
    fs::create_dir(iso.join("LiveOS")).unwrap();
    let inner = iso.join("LiveOS/squashfs.img");
    tool(Command::new("mksquashfs").arg(&tree).arg(&inner).args(["-quiet", "-no-progress"]));
    tool(Command::new("genisoimage").args(["-quiet", "-R", "-o"]).arg(place.path("live.iso")).arg(&iso));
    tool(Command::new("qemu-img").args(["convert", "-O", "qcow2"]).arg(&image).arg(place.path("d.qcow2")));
    tool(Command::new("xz").args(["-k", "-0", "--block-size=1MiB"]).arg(&image));
    for (file, inside) in
        [("live.iso", "LiveOS/squashfs.img/dir/file"), ("d.qcow2", "dir/file"), ("d.img.xz", "dir/file")]
    {
        let origin = Origin::start(fs::read(place.path(file)).unwrap());
        let url = origin.url(&format!("/{file}"));
        assert_eq!(ok(&place, &["cat", &format!("{url}#{inside}")]), "from afar", "{file}");
        assert!(origin.sent() < 4 << 20, "{file}: {} bytes were sent", origin.sent());
    }
}

#[test]
fn a_refusal_says_what_the_server_did() {
    let name = "http_source::a_refusal_says_what_the_server_did";
    if !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let origin = Origin::start(fs::read(ext4(&place)).unwrap());
    let url = origin.url("/d.img?signature=secret");
    let refused = |words: &[&str], sentence: &str| {
        let ran = run(&place, words);
        assert!(ran.code != 0 && ran.err.contains(sentence), "{sentence}: {ran:?}");
        assert!(!ran.err.contains("secret"), "{ran:?}");
    };
    origin.trick(|_, reply| reply.without("ETag"));
    refused(&["ls", &url], "neither an ETag nor a date");
    origin.trick(|_, _| Reply::status(404));
    refused(&["ls", &url], "no such object");
    origin.trick(|_, _| Reply::status(200));
    refused(&["ls", &url], "it is empty");
    refused(&["set", "0", "--image", &url], "a device cannot go over to a URL");
    refused(&["ls", "http://127.0.0.1:99999/x"], "port is not a number");
    origin.trick(|_, _| Reply::status(404));
    refused(&["ls", &origin.url("/d.img/p1")], "a path inside the image follows #");
    refused(&["ls", "http://me:secret@127.0.0.1/x"], "password");
    origin.trick(|_, _| Reply::status(503));
    refused(&["ls", "--origin-timeout", "1", &url], "status 503");
    // Replaced between two requests of one command.
    origin.trick(|request, reply| if request.number % 2 == 1 { Reply::status(412) } else { reply });
    let _ = run(&place, &["store", "drop", "--all"]);
    origin.trick(|request, reply| match request.header("if-match") {
        Some(_) => Reply::status(412),
        None => reply,
    });
    refused(&["cat", &format!("{url}#big")], "source changed");
    drop(origin);
    refused(&["ls", "--origin-timeout", "1", &url], "no answer");
    refused(&["ls", "--origin-timeout", "4", &url], "it is tried again");
}

#[test]
fn a_server_that_is_silent_or_drips_is_given_up_by_the_users_time() {
    let name = "http_source::a_server_that_is_silent_or_drips_is_given_up_by_the_users_time";
    if !require_plain_machine(name, &[]) {
        return;
    }
    let place = scratch();
    let origin = Origin::start(vec![7; 8 << 20]);
    let url = origin.url("/d.img");
    let target = place.path("copy");
    let given_up = |words: &[&str], sentence: &str| {
        let began = Instant::now();
        let ran = run(&place, words);
        assert!(ran.code != 0 && ran.err.contains(sentence), "{words:?}: {ran:?}");
        assert!(began.elapsed() < Duration::from_secs(8), "{words:?}: {:?}", began.elapsed());
    };
    for begins in [0, 2] {
        let _ = run(&place, &["store", "drop", "--all"]);
        // From the first answer on, or while the image is copied.
        let until = origin.log().len() + begins;
        origin.trick(move |request, reply| match usize::try_from(request.number).unwrap() >= until {
            true => Reply { late: Some(Duration::from_secs(30)), ..reply },
            false => reply,
        });
        given_up(&["copy", "--force", "--origin-timeout", "2s", &url, target.to_str().unwrap()], "no answer");
    }
    given_up(&["inspect", "--origin-timeout", "2s", &url], "no answer");
    origin.trick(|_, reply| Reply { drip: Some(Duration::from_millis(200)), ..reply });
    let _ = run(&place, &["store", "drop", "--all"]);
    given_up(&["inspect", "--origin-timeout", "2s", &url], "a few bytes at a time");
}

#[test]
fn a_password_goes_to_the_named_host_only() {
    let name = "http_source::a_password_goes_to_the_named_host_only";
    if !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let bytes = fs::read(ext4(&place)).unwrap();
    fs::write(place.path("netrc"), "machine 127.0.0.1 login me password secret\n").unwrap();
    let (origin, other) = (Origin::start(bytes.clone()), Origin::start(bytes));
    origin.trick(|request, reply| match request.header("authorization") {
        Some("Basic bWU6c2VjcmV0") => reply,
        _ => Reply::status(401),
    });
    assert!(ok(&place, &["ls", &origin.url("/d.img")]).contains("big"));
    // Another port is another server.
    let to = other.url("/x.img");
    origin.trick(move |_, _| Reply::status(302).with("Location", &to));
    assert!(ok(&place, &["ls", &origin.url("/e.img")]).contains("big"));
    assert!(!other.log().is_empty() && other.log().iter().all(|one| one.header("authorization").is_none()));
}

/// What is killed at any moment has fetched what it has fetched.
#[test]
fn no_byte_is_fetched_twice_though_the_command_is_killed() {
    let name = "http_source::no_byte_is_fetched_twice_though_the_command_is_killed";
    if !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let size = fs::metadata(&image).unwrap().len();
    let origin = Origin::start(fs::read(&image).unwrap());
    origin.latency(Duration::from_millis(20));
    let url = origin.url("/d.img");
    let stored = || {
        let list = run(&place, &["--json", "store", "list"]).json();
        list["objects"][0]["stored"].as_u64().unwrap_or(0)
    };
    let (mut kills, mut there) = (0, 0);
    while kills < 12 && there < size / 2 {
        let mut child = command(&place, &["store", "prefetch", &url]).stdout(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(40 + 10 * kills));
        if child.try_wait().unwrap().is_some() {
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        let now = stored();
        assert!(now >= there, "{now} bytes are stored, and {there} were before kill {kills}");
        there = now;
    }
    assert!(kills > 0, "it was over before it could be killed");
    // Only what was in flight when it was killed is asked for again.
    let sent = origin.sent();
    ok(&place, &["store", "prefetch", &url]);
    let more = origin.sent() - sent;
    assert!(more <= size - there + (64 << 10), "{more} bytes of {size}, and {there} were there");
    ok(&place, &["store", "verify", &url]);
    let before = origin.sent();
    let copied = place.path("copied");
    ok(&place, &["copy", &url, copied.to_str().unwrap()]);
    assert_eq!(origin.sent() - before, 1, "only the answer that shows the version");
    assert!(fs::read(&copied).unwrap() == fs::read(&image).unwrap());
}

#[test]
fn fuse_what_the_store_has_needs_no_server() {
    let name = "http_source::fuse_what_the_store_has_needs_no_server";
    if !require_root(name) || !require_plain_machine(name, &["mke2fs", "sfdisk", "qemu-img"]) {
        return;
    }
    let place = scratch();
    let inner = fs::read(ext4(&place)).unwrap();
    let disk = place.path("disk.img");
    image::gpt(&disk, 64 << 20);
    let start = 1 << 20;
    let mut bytes = fs::read(&disk).unwrap();
    bytes[start..start + inner.len()].copy_from_slice(&inner);
    let origin = Origin::start(bytes.clone());
    let url = origin.url("/disk.img");
    let attach = |words: &[&str]| {
        let out = ok(&place, &[&["attach", "--via", "fuse"], words].concat());
        PathBuf::from(out.trim_end())
    };
    let part = attach(&[&format!("{url}#p1")]);
    let sent = origin.sent();
    assert!(sent < bytes.len() as u64 / 2, "only the partition is fetched, and not {sent}");
    let socket = format!("unix:{}", place.path("s.sock").display());
    let exported = ok(&place, &["export", "-r", &url, "--nbd", &socket]);
    assert!(exported.starts_with("nbd+unix:///disk.img?socket="), "{exported}");
    let copied = place.path("exported.img");
    let from = exported.trim_end();
    place.ok(["copy", from, copied.to_str().unwrap()]);
    assert!(fs::read(&copied).unwrap() == bytes, "what is exported differs");
    place.ok(["detach", from]);
    let over = attach(&[&url, "--cow", place.path("over.qcow2").to_str().unwrap()]);
    ok(&place, &["store", "prefetch", &url]);
    drop(origin);
    let shown = fs::read(&part).unwrap();
    assert!(shown.len() >= 1 << 20 && bytes[start..].starts_with(&shown), "the partition differs");
    assert!(fs::read(&over).unwrap() == bytes, "the disk differs");
    let list = ok(&place, &["store", "list"]);
    assert!(list.contains("yes"), "{list}");
    assert_eq!(run(&place, &["store", "drop", "--all"]).code, 1, "it is in use");
    let list = place.ok(["list"]);
    assert!(list.contains(&format!("{url}#p1")) && list.contains(&format!("{url} (--cow")), "{list}");
    place.ok(["detach", &url, &format!("{url}#p1")]);
    assert!(place.devices().is_empty(), "both go by the URL that they were attached by");
    assert_eq!(run(&place, &["store", "drop", "--all"]).code, 0);
    assert_eq!(ok(&place, &["store", "list"]), "");
}

/// A process that ends with this.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// nginx over TLS at `localhost`, with a certificate of an authority of its own.
struct Tls {
    _server: Ends,
    port: u16,
    url: String,
    authority: PathBuf,
}

fn openssl(place: &Scratch, words: &str) {
    tool(Command::new("openssl").current_dir(place.path("")).args(words.split_whitespace()));
}

/// Serves the files of the test's directory.
fn tls(place: &Scratch) -> Tls {
    let dir = place.path("").to_str().unwrap().trim_end_matches('/').to_owned();
    openssl(place, "req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=test -keyout ca.key -out ca.pem");
    openssl(place, "req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout s.key -out s.csr");
    fs::write(place.path("ext"), "subjectAltName=DNS:localhost\n").unwrap();
    openssl(place, "x509 -req -in s.csr -CA ca.pem -CAkey ca.key -days 30 -extfile ext -out s.pem");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary: String = paths.iter().map(|name| format!("{name}_temp_path {dir}/{name};\n")).collect();
    let conf = format!(
        "daemon off; master_process off; pid {dir}/pid; error_log {dir}/err; user root;\nevents {{}}\nhttp {{ \
         access_log off;\n{temporary} server {{ listen 127.0.0.1:{port} ssl; root {dir}; \
         ssl_certificate {dir}/s.pem; ssl_certificate_key {dir}/s.key; location /closed/ {{ alias {dir}/; \
         if ($http_authorization != \"Bearer t0ken\") {{ return 401; }} }} }} }}\n"
    );
    fs::write(place.path("conf"), conf).unwrap();
    let mut nginx = Command::new("nginx");
    nginx.arg("-c").arg(place.path("conf")).arg("-p").arg(place.path("")).stderr(Stdio::null());
    let server = Ends(nginx.spawn().unwrap());
    let listens = || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
    assert!(wait_until(Duration::from_secs(10), listens), "nginx does not listen");
    let url = format!("https://localhost:{port}/d.img");
    Tls { _server: server, port, url, authority: place.path("ca.pem") }
}

/// Only `$SSL_CERT_FILE` trusts the authority.
#[test]
fn a_foreign_server_with_tls_is_trusted_by_its_certificate_only() {
    let name = "http_source::a_foreign_server_with_tls_is_trusted_by_its_certificate_only";
    if !require_plain_machine(name, &["mke2fs", "nginx", "openssl"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let Tls { _server, url, authority, .. } = tls(&place);
    let with = |authority: &Path, words: &[&str]| {
        place.finish(command(&place, words).env("SSL_CERT_FILE", authority))
    };
    let read = with(&authority, &["cat", &format!("{url}#dir/file")]);
    assert_eq!((read.code, read.out.as_str()), (0, "from afar"), "{read:?}");
    let copied = place.path("copied");
    let copy = with(&authority, &["copy", &url, copied.to_str().unwrap()]);
    assert_eq!(copy.code, 0, "{copy:?}");
    assert!(fs::read(&copied).unwrap() == fs::read(&image).unwrap());
    // Another authority; and a name that the certificate does not have.
    openssl(&place, "req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=other -keyout o.key -out o.pem");
    let other = with(&place.path("o.pem"), &["ls", &url]);
    assert!(other.code == 1 && other.err.contains("TLS"), "{other:?}");
    assert!(other.err.contains("$SSL_CERT_FILE"), "{other:?}");
    let numeric = with(&authority, &["ls", &url.replace("localhost", "127.0.0.1")]);
    assert!(numeric.code == 1 && numeric.err.contains("TLS"), "{numeric:?}");
}

#[test]
fn a_token_goes_over_tls_only() {
    let name = "http_source::a_token_goes_over_tls_only";
    if !require_plain_machine(name, &["mke2fs", "nginx", "openssl"]) {
        return;
    }
    let place = scratch();
    let origin = Origin::start(fs::read(ext4(&place)).unwrap());
    let Tls { _server, url, authority, .. } = tls(&place);
    let url = url.replace("/d.img", "/closed/d.img");
    let read = |token: &str| {
        let netrc =
            format!("machine localhost login Bearer password {token}\ndefault login Bearer password x\n");
        fs::write(place.path("netrc"), netrc).unwrap();
        place.finish(command(&place, &["ls", &url]).env("SSL_CERT_FILE", &authority))
    };
    let wrong = read("other");
    assert!(wrong.code == 1 && wrong.err.contains("401") && wrong.err.contains("login Bearer"), "{wrong:?}");
    let right = read("t0ken");
    assert!(right.code == 0 && right.out.contains("big"), "{right:?}");
    ok(&place, &["ls", &origin.url("/d.img")]);
    assert!(origin.log().iter().all(|one| one.header("authorization").is_none()));
}

/// Its fetcher resolves the name, and has the certificates and passwords of the command, which are nowhere on
/// its paths.
#[test]
fn fuse_a_device_is_fetched_over_tls() {
    let name = "http_source::fuse_a_device_is_fetched_over_tls";
    if !require_root(name) || !require_plain_machine(name, &["mke2fs", "nginx", "openssl"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let Tls { _server, url, authority, .. } = tls(&place);
    let words = ["attach", "--via", "fuse", "--origin-timeout", "60s", &url];
    let attached = place.finish(command(&place, &words).env("SSL_CERT_FILE", authority));
    assert_eq!(attached.code, 0, "{attached:?}");
    assert!(fs::read(attached.out.trim()).unwrap() == fs::read(&image).unwrap());
    place.ok(["detach", "--all"]);
}

/// Names resolve behind the proxy only, and it tunnels to nothing but the port of https, as such proxies do.
#[test]
fn a_proxy_is_the_way_to_servers_of_other_networks() {
    let name = "http_source::a_proxy_is_the_way_to_servers_of_other_networks";
    if !require_plain_machine(name, &["mke2fs", "nginx", "openssl"]) {
        return;
    }
    let place = scratch();
    let origin = Origin::start(fs::read(ext4(&place)).unwrap());
    let Tls { _server, port, authority, .. } = tls(&place);
    // "me:secret"
    let proxy = Proxy::start(origin.port(), port, Some("Basic bWU6c2VjcmV0"));
    let through = |who: &str, words: &[&str]| {
        let way = format!("http://{who}{}", proxy.address());
        let mut becket = command(&place, words);
        becket.env("http_proxy", &way).env("https_proxy", &way).env("SSL_CERT_FILE", &authority);
        becket.env_remove("no_proxy").env_remove("NO_PROXY");
        place.finish(&mut becket)
    };
    for url in ["http://images.test/d.img", "https://localhost/d.img"] {
        let read = through("me:secret@", &["cat", &format!("{url}#dir/file")]);
        assert_eq!((read.code, read.out.as_str()), (0, "from afar"), "{url}: {read:?}");
    }
    let log = proxy.log();
    assert!(log.iter().any(|line| line.starts_with("GET http://images.test/d.img ")), "{log:?}");
    assert!(log.iter().any(|line| line.starts_with("CONNECT localhost:443 ")), "{log:?}");
    let stranger = through("", &["ls", "http://images.test/d.img"]);
    assert!(stranger.code == 1 && stranger.err.contains("the proxy asks for a password"), "{stranger:?}");
    let wrong = through("me:wrong@", &["ls", "https://localhost/other.img"]);
    assert!(wrong.code == 1 && !wrong.err.contains("wrong@") && wrong.err.contains("proxy"), "{wrong:?}");
    assert_eq!(proxy.log().len(), log.len(), "nothing was let through");
    // Some hosts are reached without it.
    let mut direct = command(&place, &["cat", &format!("{}#dir/file", origin.url("/d.img"))]);
    direct.env("http_proxy", "http://127.0.0.1:1").env("no_proxy", "127.0.0.1");
    let direct = place.finish(&mut direct);
    assert_eq!((direct.code, direct.out.as_str()), (0, "from afar"), "{direct:?}");
    assert_eq!(proxy.log().len(), log.len());
}

/// As curl has it; what answers for plain http may be the proxy.
#[test]
fn each_scheme_goes_by_its_own_proxy() {
    let name = "http_source::each_scheme_goes_by_its_own_proxy";
    if !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let origin = Origin::start(fs::read(ext4(&place)).unwrap());
    let (plain, other) = (Proxy::start(origin.port(), 1, None), Proxy::start(1, 1, None));
    let by = |proxies: &[(&str, &Proxy)], words: &[&str]| {
        let mut becket = command(&place, words);
        for name in ["no_proxy", "NO_PROXY", "https_proxy", "HTTPS_PROXY"] {
            becket.env_remove(name);
        }
        becket.envs(proxies.iter().map(|(name, proxy)| (*name, format!("http://{}", proxy.address()))));
        place.finish(&mut becket)
    };
    let far = "http://images.test/d.img";
    let read = by(&[("https_proxy", &other), ("ALL_PROXY", &other), ("http_proxy", &plain)], &["ls", far]);
    assert!(read.code == 0 && !plain.log().is_empty(), "{read:?}");
    let near = origin.url("/d.img");
    let read = by(&[("https_proxy", &other), ("HTTP_PROXY", &other)], &["ls", &near]);
    assert_eq!(read.code, 0, "{read:?}");
    assert_eq!(other.log(), Vec::<String>::new());
    origin.trick(|_, _| Reply::status(403));
    let refused = by(&[("http_proxy", &plain)], &["ls", "http://images.test/e.img"]);
    assert!(refused.err.contains("the proxy on the way") && !refused.err.contains("netrc"), "{refused:?}");
    origin.honest();
    let mut becket = command(&place, &["ls", "http://images.test/e.img"]);
    let refused =
        place.finish(becket.env_remove("no_proxy").env("http_proxy", "socks5://me:secret@127.0.0.1:1"));
    assert!(refused.code == 1 && refused.err.contains("none that becket can use"), "{refused:?}");
    assert!(!refused.err.contains("secret"), "{refused:?}");
}

/// Its fetcher has the proxy of the command, and its password, which nothing shows.
#[test]
fn fuse_a_device_is_fetched_through_a_proxy() {
    let name = "http_source::fuse_a_device_is_fetched_through_a_proxy";
    if !require_root(name) || !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let origin = Origin::start(fs::read(&image).unwrap());
    let proxy = Proxy::start(origin.port(), 1, Some("Basic bWU6c2VjcmV0"));
    let words = ["attach", "--via", "fuse", "--origin-timeout", "60s", "http://images.test/d.img"];
    let mut attach = command(&place, &words);
    attach.env("http_proxy", format!("http://me:secret@{}", proxy.address()));
    let attached = place.finish(attach.env_remove("no_proxy").env_remove("NO_PROXY"));
    assert_eq!(attached.code, 0, "{attached:?}");
    assert!(fs::read(attached.out.trim()).unwrap() == fs::read(&image).unwrap());
    assert!(!place.ok(["list", "-v", "--json"]).contains("secret"));
    let doctor = place.ok(["doctor"]);
    assert!(doctor.contains("processes that fetch or decode images: 1"), "{doctor}");
    place.ok(["detach", "--all"]);
}

/// What an image says never makes becket open a URL.
#[test]
fn a_backing_name_that_is_a_url_is_not_opened() {
    let name = "http_source::a_backing_name_that_is_a_url_is_not_opened";
    if !require_plain_machine(name, &["mke2fs", "qemu-img"]) {
        return;
    }
    let place = scratch();
    let bytes = fs::read(ext4(&place)).unwrap();
    let origin = Origin::start(bytes);
    let url = origin.url("/d.img");
    let top = place.path("top.qcow2");
    tool(
        Command::new("qemu-img")
            .args(["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", &url])
            .arg(&top)
            .arg("48M"),
    );
    let local = run(&place, &["ls", top.to_str().unwrap()]);
    assert_eq!(local.code, 1, "{local:?}");
    let served = Origin::start(fs::read(&top).unwrap());
    let remote = run(&place, &["ls", &served.url("/top.qcow2")]);
    assert_eq!(remote.code, 1, "{remote:?}");
    assert!(origin.log().is_empty(), "{:?}", origin.log());
}

#[test]
fn what_store_prints_for_programs_has_all_fields() {
    let place = scratch();
    let origin = Origin::start(vec![7; 200_000]);
    let url = origin.url("/x.img?signature=secret");
    let json = |words: &[&str]| {
        let ran = run(&place, &[&["--json"], words].concat());
        assert!(!ran.out.contains("secret"), "{ran:?}");
        ran.json()
    };
    let fetched = json(&["store", "prefetch", &url]);
    assert_eq!(fetched["fetched"][0]["size"], 200_000);
    let list = json(&["store", "list"]);
    let object = &list["objects"][0];
    assert_eq!((&object["stored"], &object["in_use"]), (&200_000.into(), &false.into()), "{list:#}");
    assert_eq!(object["version"]["etag"], "\"one\"");
    let verified = json(&["store", "verify"]);
    assert_eq!(verified["verified"][0]["good"], 200_000);
    let data = fs::read(object["path"].as_str().unwrap()).unwrap();
    fs::write(object["path"].as_str().unwrap(), [&[8], &data[1..]].concat()).unwrap();
    let verified = run(&place, &["--json", "store", "verify"]);
    assert_eq!((verified.code, &verified.json()["verified"][0]["damaged"]), (1, &8192.into()));
    assert_eq!(json(&["store", "drop", &url])["dropped"][0]["size"], 200_000);
}
