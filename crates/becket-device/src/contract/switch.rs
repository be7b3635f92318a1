//! Whether the page cache is bypassed, as messages between programs of different versions say it: a switch,
//! and a string for what a switch cannot say.

use becket_image::DirectIo;
use serde::{Deserialize, Deserializer, Serializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum Said {
    Switch(bool),
    Word(DirectIo),
}

/// `true` where it serves, as versions that knew no more said it, and `false` for never.
pub(crate) fn serialize<S: Serializer>(wanted: &DirectIo, out: S) -> Result<S::Ok, S::Error> {
    match wanted {
        DirectIo::Auto => out.serialize_bool(true),
        DirectIo::Off => out.serialize_bool(false),
        DirectIo::On => out.serialize_str("on"),
    }
}

pub(crate) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<DirectIo, D::Error> {
    Ok(match Said::deserialize(from)? {
        Said::Switch(true) => DirectIo::Auto,
        Said::Switch(false) => DirectIo::Off,
        Said::Word(wanted) => wanted,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, serde::Serialize, Deserialize)]
    struct Message {
        #[serde(with = "super")]
        direct_io: DirectIo,
    }

    #[test]
    fn older_versions_understand_all_but_what_they_do_not_know() {
        for (direct_io, text) in [
            (DirectIo::Auto, r#"{"direct_io":true}"#),
            (DirectIo::Off, r#"{"direct_io":false}"#),
            (DirectIo::On, r#"{"direct_io":"on"}"#),
        ] {
            let message = Message { direct_io };
            assert_eq!(serde_json::to_string(&message).unwrap(), text);
            assert_eq!(serde_json::from_str::<Message>(text).unwrap(), message);
        }
        assert!(serde_json::from_str::<Message>(r#"{"direct_io":1}"#).is_err());
    }
}
