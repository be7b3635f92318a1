//! Images in S3, served by moto, which compares signatures. Sends only to the loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use becket_testkit::{Ran, Scratch, require_plain_machine, skip, wait_until};
use common::scratch;

/// How many requests moto takes without a signature: those that set it up.
const UNSIGNED: &str = "5";

/// The server, where `scripts/setup.sh` has installed it or on the path.
fn moto() -> Option<PathBuf> {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/moto/bin/moto_server");
    let on_path = || {
        let all = std::env::var_os("PATH")?;
        std::env::split_paths(&all).map(|dir| dir.join("moto_server")).find(|path| path.exists())
    };
    Some(ours).filter(|path| path.exists()).or_else(on_path)
}

/// A process that ends with this.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn send(port: u16, head: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let length = body.len();
    let head =
        format!("{head}\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    answer
}

fn run(place: &Scratch, env: &[(&str, &str)], words: &[&str]) -> Ran {
    let mut command = place.becket();
    for name in
        ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"]
    {
        command.env_remove(name);
    }
    for name in
        ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"]
    {
        command.env_remove(name);
    }
    command.env("BECKET_STORE", place.path("store")).env("HOME", place.path("")).args(words);
    command.env("AWS_SHARED_CREDENTIALS_FILE", place.path("credentials"));
    command.env("AWS_CONFIG_FILE", place.path("config"));
    command.envs(env.iter().copied());
    place.finish(&mut command)
}

#[test]
fn an_object_in_s3_is_read_with_keys_that_nothing_shows() {
    let name = "s3_source::an_object_in_s3_is_read_with_keys_that_nothing_shows";
    if !require_plain_machine(name, &[]) {
        return;
    }
    let Some(moto) = moto() else {
        skip(name, "needs moto_server");
        return;
    };
    let place = scratch();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut server = Command::new(moto);
    server.args(["-H", "127.0.0.1", "-p", &port.to_string()]).env("INITIAL_NO_AUTH_ACTION_COUNT", UNSIGNED);
    server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _server = Ends(server.spawn().unwrap());
    let listens = || TcpStream::connect(("127.0.0.1", port)).is_ok();
    assert!(wait_until(Duration::from_secs(60), listens), "moto does not listen");
    let body: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    let plain = "\r\nContent-Type: application/octet-stream";
    send(port, "PUT /images HTTP/1.1", b"");
    send(port, &format!("PUT /images/dir/d.img HTTP/1.1{plain}"), &body);
    let iam = |query: &str| {
        let form = "\r\nContent-Type: application/x-www-form-urlencoded";
        let signed = "AWS4-HMAC-SHA256 Credential=x/20200101/us-east-1/iam/aws4_request, SignedHeaders=host, \
                      Signature=0";
        let head = format!("POST / HTTP/1.1\r\nAuthorization: {signed}{form}");
        send(port, &head, format!("Version=2010-05-08&UserName=u&{query}").as_bytes())
    };
    iam("Action=CreateUser");
    let policy = "%7B%22Version%22%3A%222012-10-17%22%2C%22Statement%22%3A%5B%7B%22Effect%22%3A%22Allow%22%2C%22\
                  Action%22%3A%22s3%3A%2A%22%2C%22Resource%22%3A%22%2A%22%7D%5D%7D";
    iam(&format!("Action=PutUserPolicy&PolicyName=p&PolicyDocument={policy}"));
    let made = iam("Action=CreateAccessKey");
    let between = |tag: &str| {
        let (_, rest) = made.split_once(&format!("<{tag}>")).unwrap();
        rest.split('<').next().unwrap().to_owned()
    };
    let (id, secret) = (between("AccessKeyId"), between("SecretAccessKey"));
    let endpoint = format!("http://127.0.0.1:{port}");
    let url = "s3://images/dir/d.img";
    let keys = [
        ("AWS_ACCESS_KEY_ID", id.as_str()),
        ("AWS_SECRET_ACCESS_KEY", &secret),
        ("AWS_ENDPOINT_URL_S3", &endpoint),
    ];
    let hidden = |ran: Ran| {
        assert!(!ran.out.contains(&secret) && !ran.err.contains(&secret), "{ran:?}");
        ran
    };
    let copied = place.path("copied");
    let copy = hidden(run(&place, &keys, &["copy", url, copied.to_str().unwrap()]));
    assert_eq!(copy.code, 0, "{copy:?}");
    assert!(fs::read(&copied).unwrap() == body, "the copy differs");
    let list = hidden(run(&place, &keys, &["--json", "store", "list"]));
    assert_eq!(list.json()["objects"][0]["url"], url);
    for meta in fs::read_dir(place.path("store/v1")).unwrap() {
        let text = fs::read_to_string(meta.unwrap().path().join("meta.json")).unwrap();
        assert!(!text.contains(&secret) && !text.contains(&id), "{text}");
    }
    // From the files, by a profile and an endpoint that the URL names.
    let text = format!("[work]\naws_access_key_id = {id}\naws_secret_access_key = {secret}\n");
    fs::write(place.path("credentials"), text).unwrap();
    let named = format!("{url}?profile=work&endpoint={endpoint}");
    let ran = hidden(run(&place, &[], &["store", "prefetch", &named]));
    assert_eq!(ran.code, 0, "{ran:?}");
    // A key that is wrong, and none.
    let wrong = [keys[0], ("AWS_SECRET_ACCESS_KEY", "wrong"), keys[2]];
    let refused = hidden(run(&place, &wrong, &["store", "prefetch", url]));
    assert!(refused.code == 1 && refused.err.contains("does not allow it"), "{refused:?}");
    assert!(refused.err.contains("profile"), "{refused:?}");
    let none = run(&place, &[], &["store", "prefetch", &format!("{url}?profile=none")]);
    assert!(none.code != 0 && none.err.contains("no profile"), "{none:?}");
}
