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

use becket_testkit::{Ran, Scratch, image, require_fuse, require_plain_machine, skip, tool, wait_until};
use common::ceph::{Cluster, require_cluster};
use common::page::{PAGE, direct, read};
use common::scratch;

/// How many requests moto takes without a signature: those that set it up.
const UNSIGNED: &str = "5";

/// A program of moto's, where `scripts/setup.sh` has installed it or on the path.
fn moto(program: &str) -> Option<PathBuf> {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/moto/bin").join(program);
    let on_path = || {
        let all = std::env::var_os("PATH")?;
        std::env::split_paths(&all).map(|dir| dir.join(program)).find(|path| path.exists())
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
    let Some(moto) = moto("moto_server") else {
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

/// Puts a file at `images/d.img`; the server and the user are those of the gateway.
const PUT: &str = "import boto3, sys
s3 = boto3.client('s3', endpoint_url=sys.argv[1], aws_access_key_id='access',
                  aws_secret_access_key='secret', region_name='us-east-1')
s3.create_bucket(Bucket='images')
s3.upload_file(sys.argv[2], 'images', 'd.img')";

/// S3 as a Ceph cluster has it. What an object lies on may die under a device, and come back.
#[test]
fn fuse_an_object_in_a_ceph_cluster_is_read_also_when_its_osd_dies() {
    let name = "s3_source::fuse_an_object_in_a_ceph_cluster_is_read_also_when_its_osd_dies";
    if !require_fuse(name) || !require_cluster(name) || !require_plain_machine(name, &["radosgw"]) {
        return;
    }
    let Some(python) = moto("python") else { return skip(name, "needs boto3, which moto brings") };
    let cluster = Cluster::start("bluestore");
    cluster.say("start-rgw");
    let port = fs::read_to_string(cluster.conf().with_file_name("rgw")).unwrap();
    let endpoint = format!("http://127.0.0.1:{}", port.trim());
    let place = scratch();
    // More than one part: its ETag is none of its bytes.
    let body = image::random_bytes(24 << 20, 1);
    fs::write(place.path("d.img"), &body).unwrap();
    tool(Command::new(python).args(["-c", PUT, &endpoint]).arg(place.path("d.img")));
    let url = "s3://images/d.img";
    let keys = [
        ("AWS_ACCESS_KEY_ID", "access"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_ENDPOINT_URL_S3", &endpoint),
    ];
    let wrong = [keys[0], ("AWS_SECRET_ACCESS_KEY", "wrong"), keys[2]];
    let refused = run(&place, &wrong, &["attach", "--via", "fuse", url]);
    assert!(refused.code == 1 && refused.err.contains("does not allow it"), "{refused:?}");
    let ran = run(&place, &keys, &["attach", "--via", "fuse", "--name", "object", url]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let device = direct(Path::new(ran.out.trim()));
    let compare = |from: usize, to: usize| {
        for at in (from..to).step_by(PAGE) {
            assert!(read(&device, at as u64).unwrap().0 == body[at..at + PAGE], "at {at}");
        }
    };
    compare(0, 1 << 20);
    cluster.say("kill-osd");
    std::thread::scope(|scope| {
        // Far from what was read, so that none of it is there already.
        let waits = scope.spawn(|| compare(16 << 20, 20 << 20));
        std::thread::sleep(Duration::from_secs(3));
        assert!(!waits.is_finished(), "nobody could have answered");
        cluster.say("start-osd");
        waits.join().unwrap();
    });
    compare(0, body.len());
    drop(device);
    let ran = run(&place, &keys, &["detach", "object"]);
    assert_eq!(ran.code, 0, "{ran:?}");
}
