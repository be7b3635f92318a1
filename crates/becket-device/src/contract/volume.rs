//! Volumes, as `io.systemd.StorageProvider` speaks of them.
//! Source: systemd 261's description of that interface, and `varlinkctl introspect` of its providers.

use serde::{Deserialize, Serialize};

/// The interface's name and description.
pub(crate) const INTERFACE: &str = "io.systemd.StorageProvider";
pub(crate) const DESCRIPTION: &str = include_str!("io.systemd.StorageProvider.varlink");

/// What a volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum VolumeType {
    Blk,
    Reg,
    Dir,
}

/// Whether a volume is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CreateMode {
    Any,
    New,
    Open,
}

/// What `Acquire` is asked. Fields that a later systemd adds are ignored.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Acquire {
    pub(crate) name: String,
    pub(crate) create_mode: Option<CreateMode>,
    pub(crate) template: Option<String>,
    /// Writable where that is possible, if it is not given.
    pub(crate) read_only: Option<bool>,
    pub(crate) request_as: Option<VolumeType>,
}

/// What it answers; the descriptor comes along.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Acquired {
    /// Which of the descriptors.
    pub(crate) file_descriptor_index: u32,
    #[serde(rename = "type")]
    pub(crate) kind: VolumeType,
    pub(crate) read_only: bool,
}

/// What the lists are asked.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Matching {
    pub(crate) match_name: Option<String>,
}

/// A volume in the list.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Listed {
    pub(crate) name: String,
    #[serde(rename = "type")]
    pub(crate) kind: VolumeType,
    pub(crate) read_only: bool,
    pub(crate) size_bytes: u64,
}

/// Why there is no volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "error")]
pub(crate) enum NoVolume {
    #[serde(rename = "io.systemd.StorageProvider.NoSuchVolume")]
    NoSuchVolume,
    #[serde(rename = "io.systemd.StorageProvider.NoSuchTemplate")]
    NoSuchTemplate,
    #[serde(rename = "io.systemd.StorageProvider.TypeNotSupported")]
    TypeNotSupported,
    #[serde(rename = "io.systemd.StorageProvider.CreateNotSupported")]
    CreateNotSupported,
    #[serde(rename = "io.systemd.StorageProvider.ReadOnlyVolume")]
    ReadOnlyVolume,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::contract::idl::Interface;

    #[test]
    fn what_is_sent_is_in_the_description() {
        let interface = Interface::parse(DESCRIPTION);
        assert_eq!(interface.name, INTERFACE);
        let sent = |value: serde_json::Value, all: BTreeSet<String>| {
            let keys: BTreeSet<String> = value.as_object().unwrap().keys().cloned().collect();
            assert!(keys.is_subset(&all), "{keys:?} of {all:?}");
        };
        let acquired = Acquired { file_descriptor_index: 0, kind: VolumeType::Blk, read_only: true };
        assert_eq!(
            serde_json::to_string(&acquired).unwrap(),
            r#"{"fileDescriptorIndex":0,"type":"blk","readOnly":true}"#
        );
        sent(serde_json::to_value(acquired).unwrap(), interface.outputs("Acquire"));
        let listed = Listed { name: String::new(), kind: VolumeType::Blk, read_only: false, size_bytes: 1 };
        sent(serde_json::to_value(listed).unwrap(), interface.outputs("ListVolumes"));
        for error in [
            NoVolume::NoSuchVolume,
            NoVolume::NoSuchTemplate,
            NoVolume::TypeNotSupported,
            NoVolume::CreateNotSupported,
            NoVolume::ReadOnlyVolume,
        ] {
            let sent = serde_json::to_value(error).unwrap();
            assert_eq!(interface.error(sent["error"].as_str().unwrap()), BTreeSet::new());
        }
    }

    #[test]
    fn a_call_is_understood_with_what_a_later_systemd_adds() {
        let text = r#"{"name":"/x","createMode":"open","readOnly":null,"requestAs":"blk","more":{}}"#;
        let call: Acquire = serde_json::from_str(text).unwrap();
        assert_eq!((call.create_mode, call.request_as), (Some(CreateMode::Open), Some(VolumeType::Blk)));
        assert!(call.read_only.is_none() && call.template.is_none());
        assert!(serde_json::from_str::<Acquire>(r#"{"name":"x","requestAs":"chr"}"#).is_err());
    }
}
