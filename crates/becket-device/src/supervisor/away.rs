//! Devices whose image is on a server: what connects to it, and what is shown while it is away.
//! Connects to nothing itself.

use std::path::Path;
use std::sync::Arc;

use becket_image::{Map, Source};
use tracing::{info, warn};

use super::change::Length;
use super::devices::Supervisor;
use super::exports::Part;
use super::links::{CLIENTS, Change, Connector, Helper, OnChange};
use super::owned::Owned;
use crate::contract::portion::Portion;
use crate::contract::spec::Spec;
use crate::contract::{DeviceInfo, Error, ErrorKind};
use crate::record::store::Entry;
use crate::system::log;
use crate::system::sync::lock;

impl Supervisor {
    /// Starts what connects to the server of an image, where that is on one. `alone`: see [`Exports::take`].
    ///
    /// [`Exports::take`]: super::exports::Exports::take
    pub(super) fn connector(
        &self,
        spec: &Spec,
        (sources, map): (&mut [Source], &Map),
        mark: u64,
        alone: bool,
        again: Option<&[String]>,
    ) -> Result<Option<Connector>, Error> {
        let portion = Portion::of(sources, map, &spec.image);
        let part = portion.map(|portion| self.exports.take(Part::new(portion, mark), alone));
        let part = part.transpose().map_err(|other| self.attached(&spec.image, other))?;
        let myself = self.myself.clone();
        let on_change = move |change: &Change| {
            if let Some(supervisor) = myself.upgrade() {
                supervisor.server_is_away(mark, change);
            }
        };
        let ours = (mark, Arc::new(on_change) as OnChange);
        let mut connector = Connector::start(&self.fetchers, spec, sources, again, ours)?;
        connector.iter_mut().for_each(|connector| connector.keep(part.clone()));
        Ok(connector)
    }

    /// Refuses what [`Self::connector`] would refuse.
    pub(super) fn may_take(&self, image: &Path, portion: &Portion) -> Result<(), Error> {
        self.exports.clash(portion).map_or(Ok(()), |other| Err(self.attached(image, other)))
    }

    /// Why an image is not attached that the device with that mark has.
    fn attached(&self, image: &Path, mark: u64) -> Error {
        let (image, clash) = (image.to_owned(), "another device of becket's has it".to_owned());
        let source = becket_image::Error::InUse { path: image.clone(), clash, readers: false };
        let recorded =
            self.store.entries().unwrap_or_default().into_iter().find_map(|(_, entry)| match entry {
                Entry::Device(device) if device.mark == mark => Some(device.info),
                _ => None,
            });
        let Some(info) = recorded else { return Error::Image(source) };
        let part = (info.spec.image != image).then(|| info.spec.title());
        Error::Attached { image, part, name: info.name, device: info.device, source: Box::new(source) }
    }

    /// Notes what was said of a device's image before anybody knew the device.
    pub(super) fn catch_up(&self, owned: &Owned) {
        let (helper, mark) = {
            let state = lock(&owned.state);
            (state.connector.as_ref().map(Connector::helper), state.device.mark)
        };
        if let Some(helper) = helper {
            helper.catch_up(|change| self.server_is_away(mark, change));
        }
    }

    /// How long the image of a device is now: its file is measured, its server is asked.
    pub(super) fn length_now(&self, name: &str) -> Result<Length, Error> {
        match self.helper_of(name)?.and_then(|helper| helper.look()) {
            None => Ok(Length::Measured),
            Some(Ok(size)) => Ok(Length::Served(size)),
            Some(Err(why)) => Err(Error::Failed {
                kind: ErrorKind::Server,
                message: format!("the server of its image cannot be asked how long that is: {why}"),
                hint: Some(
                    "try again once it answers; one that takes a single client says it when the device \
                     connects anew"
                        .to_owned(),
                ),
            }),
        }
    }

    /// Whether the server of a device's image answers now.
    pub(super) fn answers(&self, name: &str) -> Result<(), Error> {
        let reached = self.helper_of(name)?.map_or(Ok(()), |helper| helper.reach());
        reached.map_err(|why| Error::Failed {
            kind: ErrorKind::Timeout,
            message: format!(
                "the server of its image does not answer, and what was written to {name} must reach it first: {why}"
            ),
            hint: Some(format!("try again once it answers; becket detach {name} does not wait for it")),
        })
    }

    /// What speaks with the process that reaches the server of a device's image. It is not asked under the
    /// lock: what is heard meanwhile takes that.
    fn helper_of(&self, name: &str) -> Result<Option<Arc<Helper>>, Error> {
        let owned = self.owned(name).ok_or_else(|| self.not_owned(name))?;
        Ok(lock(&owned.state).connector.as_ref().map(Connector::helper))
    }

    /// Notes whether the server of a device's image is away.
    fn server_is_away(&self, mark: u64, change: &Change) {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        for owned in devices {
            let mut state = lock(&owned.state);
            if state.device.mark != mark || state.gone {
                continue;
            }
            let name = state.name().to_owned();
            if let Change::Size(size) = change {
                // What cannot be done now is tried again when it is said again, within a second.
                let failed = self.follow(&mut state, *size).err();
                if let Some(error) = failed.filter(|_| state.unfollowed.replace(*size) != Some(*size)) {
                    warn!(device = name, "its image has {size} bytes now, and it cannot follow: {error}");
                }
                return;
            }
            if let Change::Client(client) = change {
                if state.device.clients.contains(client) {
                    return;
                }
                let client = client.clone();
                self.note(&mut state, |device| {
                    let surplus = (device.clients.len() + 1).saturating_sub(CLIENTS);
                    device.clients.drain(..surplus);
                    device.clients.push(client);
                });
                return;
            }
            let since = state.away_since.get_or_insert_with(log::now).clone();
            let away = shown(&state.device.info, change, &since);
            if away.is_none() {
                state.away_since = None;
            }
            // What is known is not said again: of a lost image each request says so.
            if away == state.device.info.away {
                return;
            }
            match change {
                Change::Here => info!(event = "origin_back", device = name, "its server is there again"),
                Change::Reconnecting(why) | Change::Waiting(why) => {
                    warn!(event = "origin_away", device = name, "nothing comes from its server: {why}");
                }
                Change::Replaced(why) => {
                    warn!(event = "source_changed", device = name, "its source changed: {why}");
                }
                Change::Damaged(why) => {
                    warn!(event = "source_damaged", device = name, "its source is damaged: {why}");
                }
                Change::Lost(why) => {
                    warn!(event = "image_lost", device = name, "its image is another's: {why}");
                }
                Change::Client(_) | Change::Size(_) => {}
            }
            if away.is_some() && state.device.info.away.is_none() {
                self.watch_dead_reads(&owned);
            }
            self.note(&mut state, |device| device.info.away = away);
            return;
        }
    }
}

/// How the server of a device's image is shown, where anything is to be shown.
fn shown(info: &DeviceInfo, change: &Change, since: &str) -> Option<String> {
    let url = info.spec.url.as_deref().or(info.spec.backing_url.as_deref());
    let host = host_of(url.unwrap_or_default());
    match change {
        Change::Here | Change::Client(_) | Change::Size(_) => None,
        Change::Lost(why) => Some(format!("lost since {since}: {why}")),
        Change::Reconnecting(why) => Some(format!("reconnecting since {since}: {why}")),
        // Of a compressed file of this host no server is waited for, but room in the store.
        Change::Waiting(why) if host.is_empty() => Some(format!("waiting since {since}: {why}")),
        Change::Waiting(why) => Some(format!("waiting for {host} since {since}: {why}")),
        Change::Replaced(why) => Some(format!("source changed: {why}")),
        Change::Damaged(why) => Some(format!("source damaged: {why}")),
    }
}

/// The host in a URL, with its port.
fn host_of(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split(['/', '?', '#']).next().unwrap_or(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_a_url_is_shown() {
        assert_eq!(host_of("https://example.org:8/a/b.img#p1"), "example.org:8");
        assert_eq!(host_of("oci://registry"), "registry");
        assert_eq!(host_of("/images/disk.img.gz"), "");
    }
}
