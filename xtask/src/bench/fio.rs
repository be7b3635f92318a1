//! What fio is asked to do in the guest, and what of its answer is kept.
//! Never judges a number: a run that fio calls failed is kept with fio's words.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// One job for fio.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Workload {
    /// Short and without spaces, as `randread-4k-d64`.
    pub(crate) name: String,
    /// fio's `rw`.
    pub(crate) pattern: String,
    /// Bytes of one I/O, in KiB.
    pub(crate) block_kib: u32,
    /// I/Os in flight.
    pub(crate) depth: u32,
}

impl Workload {
    fn new(pattern: &str, block_kib: u32, depth: u32) -> Workload {
        let size = if block_kib >= 1024 { format!("{}m", block_kib / 1024) } else { format!("{block_kib}k") };
        Workload { name: format!("{pattern}-{size}-d{depth}"), pattern: pattern.to_owned(), block_kib, depth }
    }

    /// Everything that `cost` measures, the most telling first.
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
        let size = if self.block_kib >= 1024 {
            format!("{} MiB", self.block_kib / 1024)
        } else {
            format!("{} KiB", self.block_kib)
        };
        format!("{size} {kind}, depth {}", self.depth)
    }

    /// fio's arguments but for the file's name; `engine` as fio calls it.
    pub(crate) fn arguments(&self, engine: &str) -> String {
        let Workload { name, pattern, block_kib, depth } = self;
        format!(
            "--name={name} --ioengine={engine} --direct=1 --rw={pattern} --bs={block_kib}k --iodepth={depth} \
             --size=256M --time_based --ramp_time=200ms --runtime=1 --norandommap --randrepeat=1"
        )
    }
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
    clat_ns: Latency,
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
    let percentile = |name: &str| direction.clat_ns.percentile.get(name).copied().unwrap_or_default();
    Ok(Measure {
        iops: direction.iops,
        bytes_per_second: direction.bw_bytes,
        latency_mean_ns: direction.clat_ns.mean,
        latency_p50_ns: percentile("50.000000"),
        latency_p99_ns: percentile("99.000000"),
        load_user_percent: job.usr_cpu,
        load_system_percent: job.sys_cpu,
    })
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
"read":{"total_ios":43000,"iops":43123.5,"bw_bytes":176633856,"clat_ns":{"mean":1480000.5,
 "percentile":{"50.000000":1400000,"99.000000":2000000}}},
"write":{"total_ios":0,"iops":0.0,"bw_bytes":0,"clat_ns":{"mean":0.0}}}]}"#;

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
}
