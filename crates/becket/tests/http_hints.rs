//! What the user is advised to do when a server of images refuses or cannot be reached.
//! Sends only to the loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::fs;

use becket_testkit::origin::{Origin, Reply};
use common::scratch;
use common::web::{command, run};

#[test]
fn who_has_no_home_directory_hears_that_no_password_was_looked_for() {
    let place = scratch();
    let origin = Origin::start(vec![7; 1 << 20]);
    origin.trick(|_, _| Reply::status(401));
    let hint = |home: Option<&str>, url: &str| {
        let mut command = command(&place, &["ls", url]);
        for name in ["NETRC", "HOME", "AWS_ACCESS_KEY_ID", "DOCKER_CONFIG", "XDG_RUNTIME_DIR"] {
            command.env_remove(name);
        }
        let ran = place.finish(command.envs(home.map(|home| ("HOME", home))));
        assert_eq!(ran.code, 1, "{ran:?}");
        ran.err
    };
    let host = origin.url("").replace("http://", "");
    for (url, usual) in [
        (origin.url("/d.img"), "/.netrc"),
        (format!("s3://bucket/d.img?endpoint=http://{host}"), "aws configure"),
        (format!("oci://{host}/d"), "docker login REGISTRY"),
    ] {
        let said = hint(None, &url);
        assert!(said.contains("$HOME") && !said.contains(usual), "{said}");
        let said = hint(Some("/"), &url);
        assert!(said.contains(usual) && !said.contains("$HOME"), "{said}");
    }
}

#[test]
fn a_refusal_says_which_password_was_sent_or_why_none_was() {
    let place = scratch();
    let (origin, other) = (Origin::start(vec![7; 1 << 20]), Origin::start(vec![7; 1 << 20]));
    for server in [&origin, &other] {
        server.trick(|_, _| Reply::status(401));
    }
    let (url, netrc) = (origin.url("/d.img"), place.path("netrc"));
    let hint = || {
        let ran = run(&place, &["ls", &url]);
        assert!(ran.code == 1 && !ran.err.contains("s3cret"), "{ran:?}");
        ran.err.split_once("hint: ").unwrap_or_else(|| panic!("{ran:?}")).1.trim().to_owned()
    };
    let file = netrc.display();
    assert!(hint().starts_with(&format!("put name and password for 127.0.0.1 into {file};")), "{}", hint());
    for (text, said) in [
        ("machine h login me password s3cret", "has no login for 127.0.0.1: "),
        ("machine 127.0.0.1 login me password s3cret", "was sent: check it"),
        ("machine 127.0.0.1 login Bearer password s3cret", "was not sent: a token goes over https only"),
        ("machine 127.0.0.1 login me password \"s3cret", "a quoted word in it has no end"),
    ] {
        fs::write(&netrc, text).unwrap();
        let hint = hint();
        assert!(hint.contains(said) && hint.contains(&file.to_string()), "{text}: {hint}");
    }
    fs::remove_file(&netrc).unwrap();
    fs::create_dir(&netrc).unwrap();
    assert!(hint().starts_with(&format!("{file} cannot be read, so no password")), "{}", hint());
    // The other server gets none, whatever the file says.
    fs::remove_dir(&netrc).unwrap();
    fs::write(&netrc, "machine 127.0.0.1 login me password s3cret").unwrap();
    let to = other.url("/there.img");
    origin.trick(move |_, _| Reply::status(302).with("Location", &to));
    assert!(hint().starts_with(&format!("it redirects to {}, and passwords", other.url(""))), "{}", hint());
    assert!(other.log().iter().all(|request| request.header("authorization").is_none()));
}

#[test]
fn a_proxy_that_is_dead_is_named_with_its_variable() {
    let place = scratch();
    for (variable, proxy) in [("http_proxy", "http://me:s3cret@127.0.0.1:1"), ("ALL_PROXY", "127.0.0.1:1")] {
        let mut becket = command(&place, &["ls", "--origin-timeout", "100ms", "http://images.test/d.img"]);
        becket.env_remove("no_proxy").env_remove("NO_PROXY").env(variable, proxy);
        let ran = place.finish(&mut becket);
        let said = format!("(by the proxy 127.0.0.1:1 that ${variable} names)");
        assert!(ran.code == 1 && ran.err.contains(&said) && !ran.err.contains("s3cret"), "{ran:?}");
    }
}

#[test]
fn who_names_what_is_not_there_hears_what_was_looked_for() {
    let place = scratch();
    let origin = Origin::start(vec![7; 1 << 20]);
    origin.trick(|_, _| Reply::status(404));
    let endpoint = origin.url("");
    for (url, said) in [
        (origin.url("/d.img"), "a path inside the image follows #: https://HOST/disk.img#p1".to_owned()),
        (
            format!("s3://images/dir/d.img?endpoint={endpoint}"),
            format!("check the bucket images and the key dir/d.img: they were looked for at {endpoint} "),
        ),
        ("s3:///d.img".to_owned(), "the URL names no bucket".to_owned()),
    ] {
        let ran = run(&place, &["ls", &url]);
        assert!(ran.code == 1 && ran.err.contains(&said), "{ran:?}");
    }
}
