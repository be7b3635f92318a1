//! Varlink's frame around what an interface defines: a call, a reply, and `org.varlink.service`, by which
//! every varlink service describes itself. <https://varlink.org> has the protocol.
//! It knows no method of becket's own.

use serde::{Deserialize, Serialize};

/// The interface that every service has.
pub(crate) const SERVICE: &str = "org.varlink.service";
pub(crate) const SERVICE_DESCRIPTION: &str = include_str!("org.varlink.service.varlink");

/// A call with the parameters of one method. A caller that accepts several replies (`more`) gets one, but of
/// methods that say otherwise.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Call<P> {
    /// The method's name behind that of its interface.
    pub(crate) method: String,
    #[serde(default = "Option::default", skip_serializing_if = "Option::is_none")]
    pub(crate) parameters: Option<P>,
    /// The caller expects no reply.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) oneway: bool,
    /// The caller accepts several replies.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) more: bool,
}

/// What a method that succeeded returns.
#[derive(Debug, Serialize)]
pub(crate) struct Reply<P> {
    pub(crate) parameters: P,
    /// Another reply to the same call follows.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) continues: bool,
}

/// Why a call reached no method.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "error", content = "parameters")]
pub(crate) enum Refusal {
    #[serde(rename = "org.varlink.service.InterfaceNotFound")]
    InterfaceNotFound { interface: String },
    #[serde(rename = "org.varlink.service.MethodNotFound")]
    MethodNotFound { method: String },
    #[serde(rename = "org.varlink.service.InvalidParameter")]
    InvalidParameter { parameter: String },
    #[serde(rename = "org.varlink.service.PermissionDenied")]
    PermissionDenied,
    #[serde(rename = "org.varlink.service.ExpectedMore")]
    ExpectedMore,
}

/// The service, as `GetInfo` describes it.
#[derive(Debug, Serialize)]
pub(crate) struct Info {
    pub(crate) vendor: &'static str,
    pub(crate) product: &'static str,
    pub(crate) version: &'static str,
    pub(crate) url: &'static str,
    pub(crate) interfaces: Vec<&'static str>,
}

/// What `GetInterfaceDescription` is asked.
#[derive(Debug, Deserialize)]
pub(crate) struct Describe {
    pub(crate) interface: String,
}

/// What it answers.
#[derive(Debug, Serialize)]
pub(crate) struct Description {
    pub(crate) description: &'static str,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::contract::idl::Interface;

    #[test]
    fn the_service_s_interface_says_what_is_sent() {
        let interface = Interface::parse(SERVICE_DESCRIPTION);
        assert_eq!(interface.name, SERVICE);
        let keys = |value: serde_json::Value| -> BTreeSet<String> {
            value.as_object().unwrap().keys().cloned().collect()
        };
        let info = Info { vendor: "", product: "", version: "", url: "", interfaces: vec![""] };
        assert_eq!(interface.outputs("GetInfo"), keys(serde_json::to_value(info).unwrap()));
        assert_eq!(interface.inputs("GetInterfaceDescription"), BTreeSet::from(["interface".to_owned()]));
        let description = serde_json::to_value(Description { description: "" }).unwrap();
        assert_eq!(interface.outputs("GetInterfaceDescription"), keys(description));
        for refusal in [
            Refusal::InterfaceNotFound { interface: String::new() },
            Refusal::MethodNotFound { method: String::new() },
            Refusal::InvalidParameter { parameter: String::new() },
        ] {
            let sent = serde_json::to_value(refusal).unwrap();
            assert_eq!(interface.error(sent["error"].as_str().unwrap()), keys(sent["parameters"].clone()));
        }
        let denied = serde_json::to_string(&Refusal::PermissionDenied).unwrap();
        assert_eq!(denied, r#"{"error":"org.varlink.service.PermissionDenied"}"#);
        assert_eq!(interface.error("org.varlink.service.PermissionDenied"), BTreeSet::new());
    }

    #[test]
    fn a_call_says_only_what_is_not_usual() {
        let call = Call { method: "a.b.C".into(), parameters: None::<()>, oneway: false, more: false };
        assert_eq!(serde_json::to_string(&call).unwrap(), r#"{"method":"a.b.C"}"#);
        let text = r#"{"method":"a.b.C","parameters":[1],"oneway":true,"more":true,"upgrade":false}"#;
        let call = serde_json::from_str::<Call<Vec<u8>>>(text).unwrap();
        assert!(call.oneway && call.more && call.parameters == Some(vec![1]));
    }
}
