//! What fio is asked to do in the guest, and what of its answer is kept.
//! Never judges a number: a run that fio calls failed is kept with fio's words.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::record::{Clock, Outcome};

/// One job for fio.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Workload {
    /// Short and without spaces, as `randread-4k-d64`.
    pub(crate) name: String,
    /// fio's `rw`.
    pub(crate) pattern: String,
    /// Bytes of one I/O, in KiB.
    pub(crate) block_kib: u32,
    /// I/Os in flight for each job.
    pub(crate) depth: u32,
    /// Jobs at the same time.
    pub(crate) jobs: u32,
}

impl Workload {
    pub(crate) fn new(pattern: &str, block_kib: u32, depth: u32) -> Workload {
        let name = format!("{pattern}-{}-d{depth}", size(block_kib, "k", "m"));
        Workload { name, pattern: pattern.to_owned(), block_kib, depth, jobs: 1 }
    }

    /// The same by several jobs at once.
    pub(crate) fn with_jobs(self, jobs: u32) -> Workload {
        Workload { name: format!("{}-j{jobs}", self.name), jobs, ..self }
    }

    /// The rows that speed is judged by, the most telling first.
    pub(crate) fn all() -> Vec<Workload> {
        [
            ("randread", 4, 64),
            ("randwrite", 4, 64),
            ("randread", 4, 1),
            ("randwrite", 4, 1),
            ("read", 128, 16),
            ("write", 128, 16),
            ("read", 1024, 4),
            ("write", 1024, 4),
        ]
        .map(|(pattern, block, depth)| Workload::new(pattern, block, depth))
        .to_vec()
    }

    /// For people.
    pub(crate) fn title(&self) -> String {
        let kind = match self.pattern.as_str() {
            "randread" => "random read",
            "randwrite" => "random write",
            "read" => "sequential read",
            "write" => "sequential write",
            other => other,
        };
        let mut title = format!("{} {kind}, depth {}", size(self.block_kib, " KiB", " MiB"), self.depth);
        if self.jobs > 1 {
            title.push_str(&format!(", {} jobs", self.jobs));
        }
        title
    }

    /// fio's arguments but for the file's name; `engine` as fio calls it.
    pub(crate) fn arguments(&self, engine: &str, clock: Clock) -> String {
        // Counted instructions repeat within a thousandth after a tenth of a second; time does not.
        let times = match clock {
            Clock::Instructions => "--ramp_time=100ms --runtime=500ms",
            Clock::Time => "--ramp_time=200ms --runtime=1",
        };
        format!("{} --size=256M --time_based {times}", self.base(engine))
    }

    fn base(&self, engine: &str) -> String {
        let Workload { name, pattern, block_kib, depth, jobs } = self;
        // What a program waits for begins with its submission: lat, not clat, which leaves the system call
        // out.
        let mut line = format!(
            "--name={name} --ioengine={engine} --direct=1 --rw={pattern} --bs={block_kib}k --iodepth={depth} \
             --norandommap --randrepeat=1 --clat_percentiles=0 --lat_percentiles=1"
        );
        if *jobs > 1 {
            line.push_str(&format!(" --numjobs={jobs} --group_reporting"));
        }
        line
    }
}

fn size(kib: u32, small: &str, large: &str) -> String {
    if kib >= 1024 { format!("{}{large}", kib / 1024) } else { format!("{kib}{small}") }
}

/// What one run of fio measured; times are of the guest's clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measure {
    /// I/Os in a second.
    pub(crate) iops: f64,
    /// Bytes in a second.
    pub(crate) bytes_per_second: f64,
    /// Mean time of one I/O from submission to completion.
    pub(crate) latency_mean_ns: f64,
    /// The same, median.
    pub(crate) latency_p50_ns: f64,
    /// The same, 99 of 100 were faster.
    pub(crate) latency_p99_ns: f64,
    /// Share of the time that fio itself ran in user mode, per cent.
    pub(crate) load_user_percent: f64,
    /// Share of the time that fio itself ran in the kernel, per cent.
    pub(crate) load_system_percent: f64,
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i64,
    read: Direction,
    write: Direction,
    usr_cpu: f64,
    sys_cpu: f64,
}

#[derive(Deserialize)]
struct Direction {
    total_ios: u64,
    iops: f64,
    bw_bytes: f64,
    lat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    mean: f64,
    #[serde(default)]
    percentile: std::collections::BTreeMap<String, f64>,
}

/// Reads fio's JSON of one job in one direction.
pub(crate) fn parse(text: &str) -> Result<Measure> {
    // Warnings may stand before the object.
    let text = text.find("\n{").map_or(text, |at| &text[at..]);
    let output: Output = serde_json::from_str(text.trim()).context("fio's answer is not as expected")?;
    let [job] = &output.jobs[..] else { bail!("fio ran {} jobs, not one", output.jobs.len()) };
    if job.error != 0 {
        bail!("fio ended with error {}", job.error);
    }
    let direction = match (job.read.total_ios, job.write.total_ios) {
        (1.., 0) => &job.read,
        (0, 1..) => &job.write,
        (reads, writes) => bail!("fio finished {reads} reads and {writes} writes"),
    };
    let percentile = |name: &str| direction.lat_ns.percentile.get(name).copied().unwrap_or_default();
    Ok(Measure {
        iops: direction.iops,
        bytes_per_second: direction.bw_bytes,
        latency_mean_ns: direction.lat_ns.mean,
        latency_p50_ns: percentile("50.000000"),
        latency_p99_ns: percentile("99.000000"),
        load_user_percent: job.usr_cpu,
        load_system_percent: job.sys_cpu,
    })
}

/// What became of a run that ended with this code and these words.
pub(crate) fn outcome(code: &str, said: &str) -> Outcome {
    match (code, parse(said)) {
        ("0", Ok(measure)) => Outcome::Measured(measure),
        ("0", Err(error)) => Outcome::Failed(format!("{error:#}")),
        (code, _) => Outcome::Failed(format!("fio ended with {code}: {said}")),
    }
}

/// A piece of what the guest wrote: a line `@@ WORD WORD ...`, then text up to the next such line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Section<'a> {
    pub(crate) words: Vec<&'a str>,
    pub(crate) body: &'a str,
}

/// Splits a report of the guest; what stands before the first section is left out.
pub(crate) fn sections(text: &str) -> Vec<Section<'_>> {
    const MARK: &str = "@@ ";
    let mut starts: Vec<usize> = text.match_indices("\n@@ ").map(|(at, _)| at + 1).collect();
    if text.starts_with(MARK) {
        starts.insert(0, 0);
    }
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    let pieces = starts.iter().zip(ends).map(|(&start, end)| &text[start + MARK.len()..end]);
    pieces
        .map(|piece| {
            let (head, body) = piece.split_once('\n').unwrap_or((piece, ""));
            Section { words: head.split_whitespace().collect(), body: body.trim() }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"fio: a warning
{"fio version":"fio-3.33","jobs":[{"jobname":"x","error":0,"usr_cpu":12.5,"sys_cpu":40.0,
"read":{"total_ios":43000,"iops":43123.5,"bw_bytes":176633856,"lat_ns":{"mean":1480000.5,
 "percentile":{"50.000000":1400000,"99.000000":2000000}}},
"write":{"total_ios":0,"iops":0.0,"bw_bytes":0,"lat_ns":{"mean":0.0}}}]}"#;

    #[test]
    fn fios_answer_is_read() {
        let measure = parse(ANSWER).unwrap();
        assert_eq!(measure.iops, 43123.5);
        assert_eq!(measure.latency_p50_ns, 1_400_000.0);
        assert_eq!(measure.latency_p99_ns, 2_000_000.0);
        assert_eq!(measure.load_system_percent, 40.0);
    }

    #[test]
    fn a_run_without_a_single_io_is_no_measurement() {
        let error = parse(&ANSWER.replace("43000", "0")).unwrap_err().to_string();
        assert!(error.contains("0 reads"), "{error}");
        assert!(parse(&ANSWER.replace("\"error\":0", "\"error\":5")).is_err());
        assert!(parse("fio: cannot open").is_err());
    }

    #[test]
    fn reports_are_cut_at_their_marks() {
        let text = "noise\n@@ run a 1 0\n{\"x\": \"@@ y\"}\n@@ run b 1 1\ntwo\nlines\n@@ end\n";
        let all = sections(text);
        assert_eq!(all.len(), 3);
        assert_eq!(all[0], Section { words: vec!["run", "a", "1", "0"], body: "{\"x\": \"@@ y\"}" });
        assert_eq!(all[1].body, "two\nlines");
        assert_eq!(all[2], Section { words: vec!["end"], body: "" });
        assert_eq!(sections("@@ first\nx")[0].body, "x");
    }

    #[test]
    fn names_of_workloads_are_unlike_each_other() {
        let names: std::collections::BTreeSet<String> =
            Workload::all().into_iter().map(|workload| workload.name).collect();
        assert_eq!(names.len(), Workload::all().len());
        assert!(names.contains("randread-4k-d64") && names.contains("write-1m-d4"));
    }

    #[test]
    fn jobs_are_in_the_name_and_on_the_command_line() {
        let job = Workload::new("randread", 4, 256).with_jobs(2);
        assert_eq!(job.name, "randread-4k-d256-j2");
        assert_eq!(job.title(), "4 KiB random read, depth 256, 2 jobs");
        assert!(job.arguments("libaio", Clock::Time).contains("--numjobs=2 --group_reporting"));
    }

    #[test]
    fn a_run_that_did_not_end_keeps_its_words() {
        assert_eq!(outcome("124", "stuck"), Outcome::Failed("fio ended with 124: stuck".into()));
        assert!(matches!(outcome("0", ANSWER), Outcome::Measured(_)));
        assert!(matches!(outcome("0", "no JSON"), Outcome::Failed(_)));
    }
}
