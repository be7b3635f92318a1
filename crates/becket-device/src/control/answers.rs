//! How a call is answered, whatever its interface: parameters in, a reply or the reason why not out, and what
//! every varlink service says of itself. Carries nothing out itself.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::contract::Error;
use crate::contract::messages::{Failure, Nothing};
use crate::contract::varlink::{Describe, Description, Info, Refusal, Reply, SERVICE, SERVICE_DESCRIPTION};
use crate::contract::volume::NoVolume;

/// What is answered to a call that did not succeed.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum NotDone {
    Failure(Failure),
    Refused(Refusal),
    NoVolume(NoVolume),
}

impl From<NoVolume> for NotDone {
    fn from(why: NoVolume) -> NotDone {
        NotDone::NoVolume(why)
    }
}

impl From<Error> for NotDone {
    fn from(error: Error) -> NotDone {
        NotDone::Failure(error.into())
    }
}

impl From<Refusal> for NotDone {
    fn from(refusal: Refusal) -> NotDone {
        NotDone::Refused(refusal)
    }
}

/// A reply, as it is sent.
pub(super) type Answer = Result<Vec<u8>, NotDone>;

/// Parses the parameters, acts, and writes the reply.
pub(super) fn with<P: DeserializeOwned, R: Serialize>(
    parameters: &str,
    act: impl FnOnce(P) -> Result<R, NotDone>,
) -> Answer {
    reply(act(parse(parameters)?)?, false)
}

/// The parameters of a call, as their type.
pub(super) fn parse<P: DeserializeOwned>(parameters: &str) -> Result<P, Refusal> {
    let unknown = |error: serde_json::Error| Refusal::InvalidParameter { parameter: error.to_string() };
    serde_json::from_str(parameters).map_err(unknown)
}

/// A reply, as it is sent; with `continues`, another one follows.
pub(super) fn reply(parameters: impl Serialize, continues: bool) -> Answer {
    let unspeakable =
        |error: serde_json::Error| Error::Server { what: format!("cannot answer: {error}"), log: None };
    Ok(serde_json::to_vec(&Reply { parameters, continues }).map_err(unspeakable)?)
}

/// Answers a call of a service that has these interfaces, by name and description, beside its own: what the
/// service is.
pub(super) fn of_service(
    method: &str,
    parameters: &str,
    interfaces: &[(&'static str, &'static str)],
) -> Answer {
    let (interface, name) = method.rsplit_once('.').unwrap_or(("", method));
    let all = || interfaces.iter().copied().chain([(SERVICE, SERVICE_DESCRIPTION)]);
    let not_found = |interface| Refusal::InterfaceNotFound { interface };
    match (interface, name) {
        (SERVICE, "GetInfo") => with(parameters, |_: Nothing| {
            let interfaces = all().map(|(name, _)| name).collect();
            Ok(Info {
                vendor: "becket",
                product: "becket",
                version: env!("CARGO_PKG_VERSION"),
                url: "",
                interfaces,
            })
        }),
        (SERVICE, "GetInterfaceDescription") => with(parameters, |Describe { interface }| {
            let found = all().find(|(name, _)| *name == interface);
            let (_, description) = found.ok_or_else(|| not_found(interface))?;
            Ok(Description { description })
        }),
        _ if all().any(|(name, _)| name == interface) => {
            Err(Refusal::MethodNotFound { method: method.to_owned() }.into())
        }
        _ => Err(not_found(interface.to_owned()).into()),
    }
}
