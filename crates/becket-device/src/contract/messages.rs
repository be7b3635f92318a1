//! The words between a command and the supervisor: varlink calls over a unix socket, with descriptors.
//! It decides nothing; the interface itself is described in `org.becket.Becket1.varlink`.

use std::path::PathBuf;

use becket_engine::Summary;
use becket_image::{DirectIo, Map, SourceFacts};
use becket_transport::Kind;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::contract::DeviceId;
use crate::contract::portion::Portion;
use crate::contract::spec::{Backing, Spec};
use crate::contract::{DeviceInfo, Error, ErrorKind, Part, path_text, text_path};

pub(crate) const INTERFACE: &str = "org.becket.Becket1";
pub(crate) const DESCRIPTION: &str = include_str!("org.becket.Becket1.varlink");

/// Which workers do not respond to their supervisor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pulse {
    /// Their processes.
    pub(crate) unresponsive: Vec<u32>,
    /// The worker that new devices go to, where there is one.
    #[serde(default)]
    pub(crate) shared: Option<u32>,
    /// How many clients each export has.
    #[serde(default)]
    pub(crate) connections: Vec<Count>,
    /// How much there is of each image that comes while it is read.
    #[serde(default)]
    pub(crate) stored: Vec<Stored>,
}

/// What is there of a device's image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stored {
    /// The device's mark, in decimal digits.
    pub(crate) mark: String,
    pub(crate) part: Part,
}

/// How many clients an export has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Count {
    pub(crate) export: DeviceId,
    pub(crate) clients: u64,
}

/// An image that its sender has opened; see the interface for the order of the descriptors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Attach {
    pub(crate) name: Option<String>,
    #[serde(flatten)]
    pub(crate) spec: Spec,
    /// The `--format` that its sender has opened it with, for the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) format: Option<String>,
    pub(crate) map: Map,
    /// The map is too long for a message and comes along.
    pub(crate) map_aside: bool,
    /// As [`Backing::said`] has it.
    #[serde(flatten)]
    pub(crate) backing: Backing,
    /// Sent as null by clients that had `--below`.
    #[serde(default, skip_serializing)]
    pub(crate) below: IgnoredAny,
    pub(crate) add_partitions: bool,
    pub(crate) partitions: Vec<TableEntry>,
    pub(crate) isolate: bool,
    /// Where only the server can see to it, no other device may have what it writes, nor write what it reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) alone: Option<bool>,
    /// One whose bytes becket moves.
    pub(crate) transport: Kind,
    pub(crate) warnings: Vec<String>,
}

/// A partition that the image's table names. What is in it is the image's own business.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TableEntry {
    pub(crate) number: u32,
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) label: Option<String>,
    pub(crate) uuid: Option<String>,
}

impl From<becket_image::Partition> for TableEntry {
    fn from(partition: becket_image::Partition) -> Self {
        let becket_image::Partition { number, start, len, label, uuid, .. } = partition;
        TableEntry { number, start, len, label, uuid }
    }
}

impl From<TableEntry> for becket_image::Partition {
    fn from(entry: TableEntry) -> Self {
        let TableEntry { number, start, len, label, uuid } = entry;
        becket_image::Partition { number, start, len, label, uuid, type_: String::new() }
    }
}

/// What a device would have that is not made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Foresee {
    #[serde(with = "crate::contract::path_text::one")]
    pub(crate) image: PathBuf,
    pub(crate) portion: Portion,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Detach {
    pub(crate) name: String,
    pub(crate) lazy: bool,
    /// Older servers know nothing of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) force: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Refresh {
    pub(crate) name: String,
    /// What the partition table on the device says now, where its partitions are to follow that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) partitions: Option<Vec<TableEntry>>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Reach {
    pub(crate) name: String,
}

/// Live changes; what is not given stays.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Set {
    pub(crate) name: String,
    pub(crate) direct_io: Option<DirectIo>,
    pub(crate) read_only: Option<bool>,
    /// 0 for none.
    pub(crate) size_limit: Option<u64>,
    /// Fewest bytes that the device may be left with: its users were checked for this size. The image may
    /// have become shorter.
    pub(crate) shortest: u64,
    pub(crate) image: Option<NewImage>,
}

/// Another image for a live device. Its descriptors come along.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewImage {
    #[serde(with = "crate::contract::path_text::one")]
    pub(crate) path: PathBuf,
    /// As that of [`Attach`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) format: Option<String>,
    pub(crate) map: Map,
    pub(crate) files: Vec<SourceFacts>,
    pub(crate) partitions: Vec<TableEntry>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stat {
    pub(crate) name: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counted {
    pub(crate) stats: Summary,
}

/// For methods without parameters.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct OneDevice {
    pub(crate) device: DeviceInfo,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Devices {
    pub(crate) devices: Vec<DeviceInfo>,
}

/// What a supervisor says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// becket's version.
    pub version: String,
    /// The supervisor.
    pub pid: u32,
    /// Its worker, once a device needed one.
    pub worker_pid: Option<u32>,
    /// Number of devices it owns.
    pub devices: u32,
    /// Number of processes that fetch or decode images; older servers do not say it.
    #[serde(default)]
    pub fetchers: Option<u32>,
    /// It was asked to end and does when its devices are gone.
    pub stopping: bool,
    /// Precautions that the environment did not allow.
    pub notes: Vec<String>,
}

/// The interface's errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "error", content = "parameters")]
pub(crate) enum Failure {
    #[serde(rename = "org.becket.Becket1.Busy")]
    Busy { device: String },
    #[serde(rename = "org.becket.Becket1.NameInUse")]
    NameInUse { name: String, image: Option<String>, device: Option<String> },
    #[serde(rename = "org.becket.Becket1.Failed")]
    Failed { kind: String, message: String, hint: Option<String> },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let text = |path: PathBuf| path_text(&path).into_owned();
        match error {
            Error::Busy { device, .. } => Failure::Busy { device: text(device) },
            Error::NameInUse { name, image, device } => {
                Failure::NameInUse { name, image: image.map(text), device: device.map(text) }
            }
            error => {
                Failure::Failed { kind: word(error.kind()), message: error.to_string(), hint: error.hint() }
            }
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            // Users are for the client to find: it sees its own mount namespace, the supervisor does not.
            Failure::Busy { device } => Error::Busy { device: text_path(&device), users: Vec::new() },
            Failure::NameInUse { name, image, device } => {
                let path = |text: Option<String>| text.as_deref().map(text_path);
                Error::NameInUse { name, image: path(image), device: path(device) }
            }
            Failure::Failed { kind, message, hint } => Error::Failed { kind: kind_of(&kind), message, hint },
        }
    }
}

/// The word for a kind on the wire: serde's.
fn word(kind: ErrorKind) -> String {
    match serde_json::to_value(kind) {
        Ok(serde_json::Value::String(word)) => word,
        _ => "io".to_owned(),
    }
}

/// A word of a newer server counts as its failure.
fn kind_of(word: &str) -> ErrorKind {
    serde_json::from_value(word.into()).unwrap_or(ErrorKind::Server)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use becket_engine::Faults;

    use super::*;
    use crate::contract::event::{Batch, Wanted};
    use crate::contract::idl::Interface;
    use crate::contract::table::Encoding;
    use crate::contract::varlink::Call;
    use crate::contract::{DataMode, Export, Happened};
    use crate::record::store::tests::device;

    fn attach() -> Attach {
        Attach {
            below: Default::default(),
            name: Some("one".into()),
            spec: Spec {
                image: "/i.img".into(),
                url: Some("https://h/i.img".into()),
                backing_url: Some("nbd://h".into()),
                cow: Some("/o.qcow2".into()),
                offset: 512,
                size_limit: None,
                read_only: false,
                block_size: 512,
                queues: Some(2),
                depth: None,
                mode: Some(DataMode::ZeroCopy),
                faults: Some(Faults::default()),
                origin_timeout: Some(60),
                export: Some(Export { name: "a".into(), allow: vec!["x".into()], ..Export::default() }),
                autoclear: false,
                reason: "why".into(),
            },
            format: Some("qcow2".into()),
            map: Map::contiguous(0, 512, 1 << 40),
            map_aside: false,
            backing: Backing {
                encoded: Some(Encoding { cache_size: Some(1 << 30), direct_io: true }),
                lease: true,
                cgroup: true,
                ..Backing::default()
            },
            add_partitions: true,
            partitions: Vec::new(),
            isolate: true,
            alone: Some(true),
            transport: Kind::Fuse,
            warnings: vec!["w".into()],
        }
    }

    fn new_image() -> NewImage {
        let map = Map::contiguous(0, 0, 512);
        NewImage {
            path: "/n.img".into(),
            format: Some("raw".into()),
            map,
            files: Vec::new(),
            partitions: Vec::new(),
        }
    }

    fn status() -> ServerStatus {
        ServerStatus {
            version: "0".into(),
            pid: 1,
            worker_pid: None,
            devices: 0,
            fetchers: None,
            stopping: false,
            notes: Vec::new(),
        }
    }

    fn keys(value: &impl Serialize) -> BTreeSet<String> {
        serde_json::to_value(value).unwrap().as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn the_interface_says_what_is_sent() {
        let interface = Interface::parse(DESCRIPTION);
        assert_eq!(interface.name, INTERFACE);
        let inputs = |name: &str| interface.inputs(name);
        let outputs = |name: &str| interface.outputs(name);
        let type_of = |name: &str| interface.custom(name);
        assert_eq!(inputs("Attach"), keys(&attach()));
        let portion = Portion { export: String::new(), start: 0, end: None, writes: true };
        assert_eq!(type_of("Portion"), keys(&portion));
        assert_eq!(inputs("Foresee"), keys(&Foresee { image: PathBuf::new(), portion }));
        assert_eq!(outputs("Foresee"), keys(&Nothing {}));
        assert_eq!(inputs("Detach"), keys(&Detach { name: String::new(), lazy: false, force: Some(true) }));
        assert_eq!(inputs("Refresh"), keys(&Refresh { name: String::new(), partitions: Some(Vec::new()) }));
        assert_eq!(inputs("Reach"), keys(&Reach { name: String::new() }));
        assert_eq!(outputs("Reach"), keys(&Nothing {}));
        assert_eq!(inputs("Set"), keys(&Set::default()));
        assert_eq!(inputs("Stat"), keys(&Stat { name: String::new() }));
        assert_eq!(outputs("Stat"), keys(&Counted { stats: Summary::default() }));
        assert_eq!(inputs("List"), keys(&Nothing {}));
        assert_eq!((inputs("HandOver"), outputs("HandOver")), (keys(&Nothing {}), keys(&Nothing {})));
        assert_eq!(outputs("List"), keys(&Devices { devices: Vec::new() }));
        assert_eq!(outputs("Status"), keys(&status()));
        assert_eq!(outputs("Ping"), keys(&Pulse::default()));
        assert_eq!(
            (inputs("Events"), outputs("Events")),
            (keys(&Wanted::default()), keys(&Batch::default()))
        );
        let one = keys(&OneDevice { device: device("one", 1).info });
        for name in ["Attach", "Detach", "Refresh", "Set"] {
            assert_eq!(outputs(name), one);
        }
        let text = String::new;
        let (number, at, event, level, message) = (1, text(), text(), text(), text());
        let happened = Happened { number, at, event, level, device: Some(text()), message };
        assert_eq!(type_of("Event"), keys(&happened));
        let mut exported = device("one", 1).info;
        (exported.connections, exported.spec.export) = (Some(3), Some(Export::default()));
        (exported.away, exported.spec.origin_timeout) = (Some(String::new()), Some(1));
        exported.unsaved = Some(String::new());
        (exported.spec.url, exported.stored) = (Some(String::new()), Some(Part::default()));
        exported.spec.backing_url = Some(String::new());
        exported.counted_before = Some(Box::default());
        assert_eq!(type_of("Device"), keys(&exported));
        assert_eq!(type_of("Export"), keys(&Export::default()));
        assert_eq!(type_of("Count"), keys(&Count { export: DeviceId::NONE, clients: 0 }));
        assert_eq!(type_of("Stored"), keys(&Stored { mark: text(), part: Part::default() }));
        assert_eq!(type_of("Part"), keys(&Part::default()));
        assert_eq!(type_of("NewImage"), keys(&new_image()));
        assert_eq!(type_of("Stats"), keys(&Summary::default()));
        assert_eq!(type_of("Activity"), keys(&becket_engine::Activity::default()));
        assert_eq!(type_of("Decoded"), keys(&becket_engine::Decodings::default()));
        for failure in [
            Failure::Busy { device: text() },
            Failure::NameInUse { name: text(), image: None, device: None },
            Failure::Failed { kind: text(), message: text(), hint: None },
        ] {
            let sent = serde_json::to_value(failure).unwrap();
            assert_eq!(interface.error(sent["error"].as_str().unwrap()), keys(&sent["parameters"]));
        }
    }

    #[test]
    fn calls_come_back_as_they_were_sent() {
        let attach = attach();
        let text = serde_json::to_string(&attach).unwrap();
        assert_eq!(serde_json::from_str::<Attach>(&text).unwrap(), attach);
        assert!(serde_json::from_str::<Detach>(r#"{"name":"a","lazy":false,"forced":true}"#).is_err());
        assert!(serde_json::from_str::<Detach>(r#"{"name":"a"}"#).is_err());
    }

    #[test]
    fn what_goes_past_the_page_cache_is_said_by_two_switches() {
        let wants = |direct_io, too: Option<bool>| {
            let encoded = too.map(|direct_io| Encoding { cache_size: None, direct_io });
            let mut call = serde_json::to_value(attach()).unwrap();
            call["direct_io"] = serde_json::Value::Bool(direct_io);
            call["encoded"] = serde_json::to_value(encoded).unwrap();
            let said = serde_json::from_value::<Attach>(call).unwrap().backing;
            let understood = said.clone().understood();
            assert!(understood.encoded.is_none_or(|encoding| !encoding.direct_io));
            if understood.direct_io != DirectIo::Off {
                assert_eq!(understood.clone().said(), said);
            }
            understood.direct_io
        };
        assert_eq!([wants(false, None), wants(false, Some(true))], [DirectIo::Off; 2]);
        assert_eq!([wants(true, None), wants(true, Some(false))], [DirectIo::Auto; 2]);
        assert_eq!(wants(true, Some(true)), DirectIo::On);
        // As a version says it that knows one of them.
        let older = serde_json::from_str::<Encoding>(r#"{"cache_size":null}"#).unwrap();
        assert!(!older.direct_io);
    }

    #[test]
    fn a_map_that_lies_is_refused() {
        // Two extents that overlap; the image's own checks are behind the deserialiser.
        let mut value = serde_json::to_value(attach()).unwrap();
        let extents = serde_json::to_value([
            becket_image::Extent { start: 0, len: 1024, place: becket_image::Place::Zero },
            becket_image::Extent { start: 512, len: 512, place: becket_image::Place::Zero },
        ])
        .unwrap();
        let map = value.get_mut("map").unwrap();
        match map.get_mut("extents") {
            Some(inside) => *inside = extents,
            None => *map = extents,
        }
        assert!(serde_json::from_value::<Attach>(value).is_err());
    }

    /// Calls with bytes changed, cut out, doubled and moved: whatever is accepted as a call has a meaning, is
    /// what goes on the wire again, and its map has no gap.
    #[test]
    fn damaged_calls_are_refused_or_mean_what_they_say() {
        const STRUCTURE: &[u8] = b"0123456789-.eE\",:{}[]ntf";
        let good = serde_json::to_string(&Call {
            method: "org.becket.Becket1.Attach".to_owned(),
            parameters: Some(attach()),
            oneway: false,
            more: false,
        });
        let good = good.unwrap().into_bytes();
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut below = |end: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % end as u64).unwrap()
        };
        let (mut taken, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            for _ in 0..=below(3) {
                let (at, other) = (below(bytes.len()), below(bytes.len()));
                match below(5) {
                    0 => bytes[at] = below(256) as u8,
                    // Structure and numbers are where mistakes hide.
                    1 => bytes[at] = STRUCTURE[below(STRUCTURE.len())],
                    2 => drop(bytes.drain(at.min(other)..at.max(other))),
                    3 => bytes.swap(at, other),
                    _ => bytes.extend_from_within(at..),
                }
                if bytes.is_empty() {
                    break;
                }
            }
            let call = serde_json::from_slice::<Call<serde_json::Value>>(&bytes).ok();
            let parsed = call.and_then(|call| serde_json::from_value::<Attach>(call.parameters?).ok());
            let Some(parsed) = parsed else {
                refused += 1;
                continue;
            };
            taken += 1;
            let again = serde_json::to_value(&parsed).unwrap();
            assert_eq!(serde_json::from_value::<Attach>(again).unwrap(), parsed);
            let ends = parsed.map.extents().iter().scan(0, |at, extent| {
                assert_eq!(extent.start, *at, "{parsed:?}");
                *at = extent.start.checked_add(extent.len)?;
                Some(*at)
            });
            assert_eq!(ends.last().unwrap_or(0), parsed.map.len());
        }
        assert!(taken > 100 && refused > 1000, "{taken} taken, {refused} refused");
    }

    #[test]
    fn errors_keep_their_class_message_and_hint() {
        let cases = [
            Error::NoDevice { target: "x".into() },
            Error::Busy { device: "/dev/ublkb0".into(), users: Vec::new() },
            Error::NameInUse { name: "n".into(), image: Some("/i".into()), device: None },
            Error::Worker { what: "died".into() },
        ];
        for error in cases {
            let (kind, text, hint) = (error.kind(), error.to_string(), error.hint());
            let wire = serde_json::to_string(&Failure::from(error)).unwrap();
            let back = Error::from(serde_json::from_str::<Failure>(&wire).unwrap());
            assert_eq!((back.kind(), back.to_string(), back.hint()), (kind, text, hint));
        }
        assert_eq!(kind_of("of a later version"), ErrorKind::Server);
    }
}
