//! A record's file, understood or not. It is looked at and never changed here.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::contract::versions;
use crate::record::device::Device;
use crate::record::unknown::{Head, Unknown};
use crate::system::process::ProcessId;

/// The file's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    version: u32,
    boot_id: String,
    name: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    needs: Vec<String>,
    entry: Entry,
}

impl Record {
    /// One that this becket writes.
    pub(super) fn new(boot_id: &str, name: &str, entry: Entry) -> Record {
        let needs = if let Entry::Device(device) = &entry { device.needs.clone() } else { Vec::new() };
        let (boot_id, name) = (boot_id.to_owned(), name.to_owned());
        Record { version: versions::record(), boot_id, name, needs, entry }
    }
}

/// What a record says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub(crate) enum Entry {
    /// A device is being attached under this name.
    Claim {
        /// What is being attached.
        #[serde(with = "crate::contract::path_text::one")]
        image: PathBuf,
        /// By whom; the claim falls with it.
        claimant: ProcessId,
    },
    /// A device. In a box, since it is so much larger than a claim.
    Device(Box<Device>),
    /// Something that another version of becket has recorded. It is never written.
    #[serde(skip)]
    Unknown(Box<Unknown>),
}

impl Entry {
    /// That of a device.
    pub(crate) fn of(device: &Device) -> Entry {
        Entry::Device(Box::new(device.clone()))
    }
}

/// What was found in the place of a record.
pub(super) enum Looked {
    Nothing,
    Entry(Entry),
    /// It is of another start of the machine, which may have ended before it was written.
    Foreign,
    /// It is not a record: cut off, damaged, or of another name.
    Corrupt(String),
}

/// What a file says that was found in the place of a name's record.
pub(super) fn understand(text: &[u8], name: &str, boot_id: &str) -> Looked {
    if text.iter().all(|byte| *byte == 0) {
        return Looked::Foreign;
    }
    let known = last_whole::<Record>(text).ok();
    let known = known.filter(|record| versions::understood(record.version, &record.needs));
    let (of_boot, of_name, entry) = match known {
        Some(Record { boot_id, name, entry, .. }) => (boot_id, name, entry),
        None => match last_whole::<Head>(text) {
            Ok(head) => {
                let (of_boot, of_name) = (head.boot_id.clone(), head.name.clone());
                (of_boot, of_name, Entry::Unknown(Box::new(Unknown::new(head))))
            }
            Err(error) => return Looked::Corrupt(error.to_string()),
        },
    };
    if of_name != name || !names_match(&entry, name) {
        return Looked::Corrupt(format!("it speaks of {of_name:?}"));
    }
    if of_boot == boot_id { Looked::Entry(entry) } else { Looked::Foreign }
}

/// A record's text with one word more of its device, and otherwise as it was, whatever its version.
pub(super) fn with_note(text: &[u8], key: &str, value: &str) -> std::io::Result<Vec<u8>> {
    let mut record: serde_json::Value = last_whole(text)?;
    if let Some(entry) = record.get_mut("entry").and_then(serde_json::Value::as_object_mut) {
        entry.insert(key.to_owned(), value.into());
    }
    let mut noted = serde_json::to_vec(&record)?;
    noted.push(b'\n');
    Ok(noted)
}

/// The last record of a file that is whole. What is broken off behind it was never announced.
fn last_whole<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    // As a rule it is a line; older builds wrote one in many.
    let last = text.trim_ascii_end().rsplit(|byte| *byte == b'\n').next();
    if let Some(Ok(record)) = last.map(serde_json::from_slice) {
        return Ok(record);
    }
    let mut records = serde_json::Deserializer::from_slice(text).into_iter();
    let mut last = records.next().unwrap_or_else(|| serde_json::from_slice(b""))?;
    for record in records {
        match record {
            Ok(record) => last = record,
            Err(error) if error.is_eof() => break,
            Err(error) => return Err(error),
        }
    }
    Ok(last)
}

fn names_match(entry: &Entry, name: &str) -> bool {
    match entry {
        Entry::Device(device) => device.info.name == name,
        Entry::Claim { .. } | Entry::Unknown(_) => true,
    }
}

/// Whether two records speak of the same use of the same node.
pub(super) fn same_use(a: &Device, b: &Device) -> bool {
    a.info.transport == b.info.transport
        && a.info.number == b.info.number
        && a.server == b.server
        && (a.starting || b.starting || a.info.diskseq == b.info.diskseq)
}
