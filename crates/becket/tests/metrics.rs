//! Metrics over HTTP: what a client gets, what the process that talks with clients may do, and Prometheus
//! itself with the dashboard and the alerts of `dist/prometheus`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use becket_testkit::{
    Scratch, image, origin::Origin, patience, require_device, require_fuse, require_plain_machine, tool,
    wait_until,
};
use common::{scratch, web};
use serde_json::Value;

/// `becket metrics --listen`, ended with this.
struct Endpoint {
    child: Child,
    address: String,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Endpoint {
    fn start(place: &Scratch) -> Endpoint {
        let mut command = place.becket();
        command.args(["metrics", "--listen", "tcp:127.0.0.1:0"]).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split("tcp:").nth(1).and_then(|rest| rest.split(',').next());
        let address = address.unwrap_or_else(|| panic!("it says where it listens: {line}")).to_owned();
        Endpoint { child, address }
    }

    fn reporter(&self) -> u32 {
        let pid = self.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.trim().parse().unwrap()
    }

    /// The head and the body of the answer to what is sent.
    fn answer(&self, request: &[u8]) -> (String, String) {
        exchange(&self.address, request)
    }

    fn get(&self, path: &str) -> (String, String) {
        self.answer(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes())
    }
}

fn exchange(address: &str, request: &[u8]) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(patience(Duration::from_secs(20)))).unwrap();
    stream.write_all(request).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
    (head.to_owned(), body.to_owned())
}

/// Without what differs from one moment to the next.
fn lasting(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.starts_with("becket_scrape_duration_seconds ")).collect()
}

#[test]
fn an_endpoint_answers_with_the_metrics_and_holds_nothing() {
    if !require_device("metrics::an_endpoint_answers_with_the_metrics_and_holds_nothing") {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    place.attach(&place.path("a.img"), &["--name", "scraped"]);
    let endpoint = Endpoint::start(&place);
    let (head, body) = endpoint.get("/metrics");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    assert_eq!(lasting(&body), lasting(&place.ok(["metrics"])));
    assert!(body.contains("becket_device_info{name=\"scraped\""), "{body}");

    let (head, body) = endpoint.answer(b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200") && body.is_empty(), "{head} {body}");
    assert!(endpoint.get("/etc/passwd").0.starts_with("HTTP/1.1 404"));
    assert!(endpoint.answer(b"POST /metrics HTTP/1.1\r\n\r\n").0.starts_with("HTTP/1.1 405"));
    assert!(endpoint.answer(b"\xff\xfe\r\n\r\n").0.starts_with("HTTP/1.1 400"));
    assert!(endpoint.answer(&[b'a'; 8192]).0.starts_with("HTTP/1.1 431"));

    // Clients that ask nothing keep no other one waiting, however many they are.
    let silent: Vec<TcpStream> = (0..50).map(|_| TcpStream::connect(&endpoint.address).unwrap()).collect();
    let began = Instant::now();
    assert!(endpoint.get("/metrics").0.starts_with("HTTP/1.1 200"));
    assert!(began.elapsed() < patience(Duration::from_secs(5)), "{:?}", began.elapsed());
    drop(silent);

    let status = fs::read_to_string(format!("/proc/{}/status", endpoint.reporter())).unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    assert_eq!(field("CapEff:"), "0000000000000000", "{status}");
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()), "{status}");
    let held = fs::read_dir(format!("/proc/{}/fd", endpoint.reporter())).unwrap();
    let held: Vec<PathBuf> = held.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok()).collect();
    let files: Vec<&PathBuf> =
        held.iter().filter(|path| path.starts_with("/") && !path.starts_with("/dev/null")).collect();
    assert!(files.iter().all(|path| !path.starts_with(place.path(""))), "{held:?}");
}

/// It ends with the command, and the command ends with it.
#[test]
fn a_reporter_is_never_alone() {
    let place = scratch();
    let mut endpoint = Endpoint::start(&place);
    let reporter = endpoint.reporter();
    rustix_kill(reporter);
    let mut ended = None;
    assert!(wait_until(patience(Duration::from_secs(10)), || {
        ended = endpoint.child.try_wait().unwrap();
        ended.is_some()
    }));
    assert_eq!(ended.unwrap().code(), Some(1), "systemd starts it again");

    let mut endpoint = Endpoint::start(&place);
    let reporter = endpoint.reporter();
    endpoint.child.kill().unwrap();
    endpoint.child.wait().unwrap();
    let gone = || !Path::new(&format!("/proc/{reporter}")).exists();
    assert!(wait_until(patience(Duration::from_secs(10)), gone));
}

fn rustix_kill(pid: u32) {
    tool(Command::new("kill").args(["-KILL", &pid.to_string()]));
}

fn dist(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/prometheus").join(name).canonicalize().unwrap()
}

/// What the dashboard and the alerts ask.
fn queries() -> Vec<(String, String)> {
    let board: Value =
        serde_json::from_str(&fs::read_to_string(dist("becket-dashboard.json")).unwrap()).unwrap();
    let panels = board["panels"].as_array().unwrap().iter();
    let mut found: Vec<(String, String)> = panels
        .flat_map(|panel| {
            let title = panel["title"].as_str().unwrap().to_owned();
            panel["targets"].as_array().unwrap().iter().map(move |target| {
                let expr = target["expr"].as_str().unwrap();
                (title.clone(), expr.replace("$name", ".*").replace("$__rate_interval", "10s"))
            })
        })
        .collect();
    // `expr:` with its value on the same line, or folded below.
    let rules = fs::read_to_string(dist("becket.rules.yml")).unwrap();
    let mut lines = rules.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        let Some(expr) = line.strip_prefix("expr:").map(str::trim) else { continue };
        let mut expr = expr.trim_start_matches(">-").to_owned();
        while let Some(more) = lines.next_if(|line| expr.is_empty() || line.starts_with('+')) {
            expr = format!("{expr} {more}");
        }
        found.push(("alert".to_owned(), expr));
    }
    found
}

#[test]
fn fuse_prometheus_scrapes_and_answers_every_query() {
    let name = "metrics::fuse_prometheus_scrapes_and_answers_every_query";
    if !require_plain_machine(name, &["prometheus", "promtool", "xz"]) || !require_fuse(name) {
        return;
    }
    let place = scratch();
    let raw = place.path("raw.img");
    image::random(&raw, 1 << 20, 1);
    let packed = place.path("packed.img");
    fs::write(&packed, b"becket! ".repeat(1 << 17)).unwrap();
    tool(Command::new("xz").arg(&packed));
    let words = ["--via", "fuse", "--name"];
    let origin = Origin::start(fs::read(&raw).unwrap());
    let remote = [&["attach"], &words[..], &["remote", "--origin-timeout", "90s", &origin.url("/raw.img")]];
    web::ok(&place, &remote.concat());
    let devices = [
        place.attach(&raw, &[&words[..], &["raw"]].concat()),
        place.attach(&place.path("packed.img.xz"), &[&words[..], &["packed"]].concat()),
    ];
    let endpoint = Endpoint::start(&place);
    let mut check =
        Command::new("promtool").args(["check", "metrics"]).stdin(Stdio::piped()).spawn().unwrap();
    check.stdin.take().unwrap().write_all(endpoint.get("/metrics").1.as_bytes()).unwrap();
    assert!(check.wait().unwrap().success(), "promtool has objections to the metrics");
    tool(Command::new("promtool").args(["check", "rules"]).arg(dist("becket.rules.yml")));

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let config = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{:?}]\nscrape_configs:\n- job_name: becket\n  \
         static_configs: [{{targets: [{:?}]}}]\n",
        dist("becket.rules.yml"),
        endpoint.address
    );
    fs::write(place.path("prometheus.yml"), config).unwrap();
    let mut prometheus = Command::new("prometheus");
    prometheus.current_dir(place.path("")).stderr(fs::File::create(place.path("prometheus.log")).unwrap());
    prometheus.args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"]);
    let child = prometheus.arg(format!("--web.listen-address={address}")).spawn().unwrap();
    let running = Endpoint { child, address };
    let log = || fs::read_to_string(place.path("prometheus.log")).unwrap_or_default();
    let query = |expr: &str| -> Value {
        let escaped: String = expr.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let (head, body) = running
            .answer(format!("GET /api/v1/query?query={escaped} HTTP/1.0\r\nHost: x\r\n\r\n").as_bytes());
        assert!(head.contains(" 200 "), "{expr}: {head} {body}");
        serde_json::from_str(&body).unwrap()
    };
    let up = || {
        TcpStream::connect(&running.address).is_ok()
            && exchange(&running.address, b"GET /-/ready HTTP/1.0\r\n\r\n").0.contains(" 200 ")
            && query("up{job=\"becket\"}")["data"]["result"][0]["value"][1] == "1"
    };
    assert!(wait_until(patience(Duration::from_secs(60)), up), "{}", log());

    // A rate needs two scrapes with something between them.
    let began = Instant::now();
    let mut block = vec![0; 4096];
    while began.elapsed() < Duration::from_secs(8) {
        let file = fs::OpenOptions::new().read(true).write(true).open(&devices[0]).unwrap();
        file.write_at(&block, 8192).unwrap();
        file.sync_all().unwrap();
        for device in &devices {
            // The page cache answers the second time; discarded pages are read again.
            let file = fs::File::open(device).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            file.read_at(&mut block, 4096).unwrap();
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let queries = queries();
    assert!(queries.len() > 25, "{queries:?}");
    for (title, expr) in &queries {
        let found = query(expr);
        assert_eq!(found["status"], "success", "{title}: {expr}: {found}");
        let samples = found["data"]["result"].as_array().unwrap();
        // An alert that has nothing to say answers with no sample: so must all of them now.
        assert_eq!(
            samples.is_empty(),
            title == "alert",
            "{title}: {expr}: {found}\n{}",
            endpoint.get("/metrics").1
        );
    }
    let latency = query(
        "histogram_quantile(0.99, sum by (name, le) (rate(becket_device_read_duration_seconds_bucket{name=\"raw\"}[10s])))",
    );
    let seconds: f64 = latency["data"]["result"][0]["value"][1].as_str().unwrap().parse().unwrap();
    assert!(seconds > 0.0 && seconds < 20.0, "{latency}");
    let alerts = exchange(&running.address, b"GET /api/v1/rules HTTP/1.0\r\nHost: x\r\n\r\n").1;
    let alerts: Value = serde_json::from_str(&alerts).unwrap();
    let rules = alerts["data"]["groups"][0]["rules"].as_array().unwrap();
    assert!(rules.len() >= 6 && rules.iter().all(|rule| rule["health"] != "err"), "{alerts}");
}
