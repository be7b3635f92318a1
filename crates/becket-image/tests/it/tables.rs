//! Partition tables that the usual tools make, read back.
//! It never needs root: the tools write to files.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use becket_image::{Format, OpenOptions, Partition, inspect};

use crate::common::{dir, file, have, look, run, skip};

fn partitions(path: &Path) -> (Vec<Partition>, Vec<String>) {
    let options = OpenOptions { read_only: true, partitions: true, ..OpenOptions::default() };
    let opened = becket_image::open(path, &options).unwrap();
    (opened.partitions, opened.warnings)
}

/// Feeds `script` to sfdisk.
fn sfdisk(path: &Path, script: &str) {
    let mut child = Command::new("sfdisk")
        .args(["--quiet", "--no-reread", "--no-tell-kernel"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
}

/// What sfdisk itself reads: number, first byte, length, type, UUID and name.
type Row = (u32, u64, u64, String, Option<String>, Option<String>);

fn as_sfdisk_reads(path: &Path) -> Vec<Row> {
    let json = run("sfdisk", &["--json", path.to_str().unwrap()]);
    let table: serde_json::Value = serde_json::from_str(&json).unwrap();
    let text = |value: &serde_json::Value| value.as_str().map(str::to_lowercase);
    let rows = table["partitiontable"]["partitions"].as_array().unwrap().iter();
    rows.map(|row| {
        let node = row["node"].as_str().unwrap().strip_prefix(path.to_str().unwrap()).unwrap();
        (
            node.trim_start_matches('p').parse().unwrap(),
            row["start"].as_u64().unwrap() * 512,
            row["size"].as_u64().unwrap() * 512,
            text(&row["type"]).unwrap(),
            text(&row["uuid"]),
            row["name"].as_str().map(str::to_owned),
        )
    })
    .collect()
}

fn as_becket_reads(path: &Path) -> Vec<Row> {
    let (partitions, warnings) = partitions(path);
    assert_eq!(warnings, [""; 0]);
    partitions.into_iter().map(|p| (p.number, p.start, p.len, p.type_, p.uuid, p.label)).collect()
}

#[test]
fn gpt_means_the_same_to_sfdisk() {
    let dir = dir();
    if !have("sfdisk") {
        return skip("gpt_means_the_same_to_sfdisk", "sfdisk is not installed");
    }
    let path = file(dir.path(), "disk.img", 64 << 20);
    sfdisk(
        &path,
        "label: gpt\n\
         1: size=1MiB, type=U, name=\"EFI\"\n\
         3: size=17MiB, type=L, name=\"Größe \u{1f980} with blanks\"\n\
         128: size=3KiB, start=50000\n\
         7: type=S\n",
    );
    let rows = as_becket_reads(&path);
    assert_eq!(rows, as_sfdisk_reads(&path));
    assert_eq!(rows.len(), 4);
}

#[test]
fn mbr_means_the_same_to_sfdisk() {
    let dir = dir();
    if !have("sfdisk") {
        return skip("mbr_means_the_same_to_sfdisk", "sfdisk is not installed");
    }
    let path = file(dir.path(), "disk.img", 64 << 20);
    let logical: String =
        (0..12).map(|i| format!("{}: start={}, size=2000, type=83\n", 5 + i, 8192 + i * 4096)).collect();
    sfdisk(
        &path,
        &format!(
            "label: dos\n2: start=6144, size=100000, type=f\n4: start=2048, size=4096, type=c\n{logical}"
        ),
    );
    let mut expected = as_sfdisk_reads(&path);
    for row in &mut expected {
        // sfdisk names types without their base, and the container at its full length.
        row.3 = format!("{:#04x}", u8::from_str_radix(&row.3, 16).unwrap());
        row.2 = if row.0 == 2 { 1024 } else { row.2 };
    }
    let mut rows = as_becket_reads(&path);
    for row in &mut rows {
        assert!(row.4.take().is_some_and(|uuid| uuid.ends_with(&format!("-{:02x}", row.0))));
    }
    assert_eq!(rows, expected);
    assert_eq!(rows.len(), 14);
}

#[test]
fn a_gpt_by_sgdisk_survives_the_loss_of_its_start() {
    let dir = dir();
    if !have("sgdisk") {
        return skip("a_gpt_by_sgdisk_survives", "sgdisk is not installed");
    }
    let path = file(dir.path(), "disk.img", 16 << 20);
    run("sgdisk", &["-n1:0:+1M", "-t1:ef00", "-c1:boot", "-n2:0:0", path.to_str().unwrap()]);
    let (whole, warnings) = partitions(&path);
    assert_eq!((whole.len(), warnings.len()), (2, 0));
    assert_eq!(whole[0].label.as_deref(), Some("boot"));

    let disk = std::fs::File::options().write(true).open(&path).unwrap();
    rustix::io::pwrite(&disk, &[0; 34 * 512 - 512], 512).unwrap();
    let (rest, warnings) = partitions(&path);
    assert_eq!(rest, whole);
    assert!(warnings[0].contains("backup"), "{warnings:?}");
}

/// Its first sector is a record of the disk around it, and no table of its own.
#[test]
fn an_extended_partition_is_not_looked_into() {
    let _dir = dir();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mbr-logical.img");
    let (inner, warnings) = partitions(&fixture.join("p2"));
    assert_eq!((inner.len(), warnings), (0, vec![]), "the list of logical partitions");
    let walk = look(&fixture, Format::Auto, &[]).unwrap();
    let report = inspect(&walk.last().unwrap().image, "disk", Format::Auto);
    let extended = report.children.iter().find(|child| child.name == "p2").unwrap();
    assert_eq!(extended.partition_type_name, Some("Extended"));
    assert_eq!((extended.about.format, extended.children.len()), ("raw", 0), "{extended:?}");
    assert!(report.children.iter().all(|child| child.problems.is_empty()), "{report:?}");
    let error = look(&fixture.join("p2/p1"), Format::Auto, &[]).unwrap_err();
    assert!(error.to_string().contains("no partition table"), "{error}");
}
