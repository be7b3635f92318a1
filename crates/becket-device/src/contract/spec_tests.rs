//! The bytes of builds that had no [`Spec`]: what they have written is understood, and what is written now is
//! theirs. The files in `written` come from such a build.

use std::fmt::Debug;

use becket_image::Map;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::*;
use crate::contract::messages::Attach;
use crate::contract::protocol::{Order, Report};
use crate::record::store::Entry;

const ATTACH: &str = include_str!("written/attach.json");
const ORDER: &str = include_str!("written/order.json");
const HELD: &str = include_str!("written/held.json");
const RECORD: &str = include_str!("written/record.json");

/// What a text says, once it is certain that the same is written again.
fn same<T: Serialize + DeserializeOwned>(text: &str) -> T {
    let understood: T = serde_json::from_str(text).unwrap();
    let written = serde_json::to_value(&understood).unwrap();
    assert_eq!(written, serde_json::from_str::<Value>(text).unwrap());
    understood
}

/// Without one of its fields, and with one that nobody knows.
fn refused<T: DeserializeOwned + Debug>(text: &str, inside: Option<&str>, needed: &[&str], strict: bool) {
    let changed = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut value: Value = serde_json::from_str(text).unwrap();
        let object = match inside {
            Some(inside) => &mut value[inside],
            None => &mut value,
        };
        change(object.as_object_mut().unwrap());
        serde_json::from_value::<T>(value)
    };
    for field in needed {
        changed(&|fields| drop(fields.remove(*field).unwrap())).unwrap_err();
    }
    let unknown = changed(&|fields| drop(fields.insert("unheard".to_owned(), 1.into())));
    assert_eq!(unknown.is_err(), strict);
}

#[test]
fn a_call_has_the_bytes_that_it_had() {
    let call: Attach = same(ATTACH);
    assert_eq!((call.spec.image.to_str(), call.spec.queues), (Some("/i.img"), Some(2)));
    assert_eq!((call.spec.mode, call.spec.offset), (Some(DataMode::ZeroCopy), 512));
    assert_eq!(call.map, Map::contiguous(0, 512, 1 << 40));
    assert!(call.backing.lease && call.backing.cgroup && !call.backing.grows);
    assert_eq!(call.backing.understood().direct_io, DirectIo::On);
    refused::<Attach>(ATTACH, None, &["image", "offset", "block_size", "files", "direct_io", "lease"], true);
}

#[test]
fn an_order_and_what_a_worker_holds_have_the_bytes_that_they_had() {
    let Order::Serve(order) = same(ORDER) else { panic!() };
    let Report::Held(held) = same(HELD) else { panic!() };
    assert_eq!(order, held);
    assert_eq!((order.backing.direct_io, order.backing.lease), (DirectIo::On, true));
    assert_eq!(order.backing.files.len(), 1);
    assert_eq!(order.backing.encoded.unwrap().cache_size, Some(7));
    let needed = ["files", "direct_io", "lease", "cgroup", "map", "mark"];
    refused::<Order>(ORDER, Some("serve"), &needed, true);
    refused::<Report>(HELD, Some("held"), &needed, true);
}

/// Facts of files and of nothing else: what is of another kind, or of two, is not understood.
#[test]
fn a_source_of_an_unknown_kind_is_refused() {
    let mut order: Value = serde_json::from_str(ORDER).unwrap();
    let known = order["serve"]["files"][0].clone();
    let mut mixed = known.clone();
    mixed["link"] = Value::Object(serde_json::Map::new());
    for other in [serde_json::json!({"unheard": {}}), serde_json::json!({}), mixed] {
        order["serve"]["files"][0] = other;
        assert!(serde_json::from_value::<Order>(order.clone()).is_err());
    }
    let backing = Backing { files: vec![serde_json::from_value(known).unwrap()], ..Backing::default() };
    assert_eq!(needs_of_new_device(Kind::Ublk, &backing), [""; 0], "older builds know files");
    assert_eq!(needs_of_new_device(Kind::Nbd, &backing), ["exports"], "and no devices without a disk");
}

#[test]
fn a_record_has_the_bytes_that_it_had() {
    let Entry::Device(device) = same(RECORD) else { panic!() };
    let Spec { image, cow, size_limit, mode, block_size, .. } = device.info.spec;
    assert_eq!((image.to_str(), cow), (Some("/images/a b.img"), Some("/o.qcow2".into())));
    assert_eq!((size_limit, mode, block_size), (Some(1 << 20), Some(DataMode::BatchCopy), 512));
    // A later build may say more of a device, and an earlier one had neither overlays nor faults.
    refused::<Entry>(RECORD, Some("info"), &["image", "offset", "block_size", "reason"], false);
    let mut older: Value = serde_json::from_str(RECORD).unwrap();
    let info = older["info"].as_object_mut().unwrap();
    info.retain(|field, _| !["cow", "faults"].contains(&field.as_str()));
    serde_json::from_value::<Entry>(older).unwrap();
}
