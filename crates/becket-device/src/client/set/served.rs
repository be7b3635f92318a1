//! Changes of a device that becket serves: checked here, where the user's rights and mounts are visible, and
//! made by the supervisor, which opens no image.

use becket_image::{FileSource, Opened, OuterDisk, Source};
use becket_transport::node;

use super::changes::{Changes, open};
use super::compare::Progress;
use super::guard::{self, Caches, Use};
use crate::contract::messages::{NewImage, Nothing, OneDevice, Reach, Set};
use crate::contract::spec::facts_of;
use crate::contract::{DeviceInfo, Error, ErrorKind, Spec};
use crate::control::client;
use crate::control::health::Concerns;
use crate::record::device::Device;
use crate::record::judge::disk_of;
use crate::record::store::Store;

pub(super) fn set(
    store: &Store,
    device: &Device,
    changes: &Changes,
    progress: &mut Progress<'_>,
) -> Result<DeviceInfo, Error> {
    let info = &device.info;
    let opened = changes.image.as_deref().map(|path| open(store, device, path, changes)).transpose()?;
    let shortest = opened.as_ref().map_or(info.size, |opened| opened.map.len());
    let block = u64::from(info.spec.block_size.max(1));
    let len = shortest.min(changes.size_limit.flatten().unwrap_or(u64::MAX)) / block * block;
    let freezes = changes.read_only == Some(true) && !info.spec.read_only;
    let mut away = if freezes || opened.is_some() { away(store, info) } else { None };
    if let Some(away) = away.take_if(|_| opened.is_some()) {
        return Err(away);
    }
    let using = Use::allowing(info, changes, opened.is_some(), len)?;
    let held = using.as_ref().is_some_and(Use::is_held);
    if let Some(opened) = &opened {
        guard::may_get(store, info, held, opened, changes.force, progress)?;
    }
    if freezes {
        guard::freeze(info, &mut away)?;
    }
    let live = Live { store, device, shortest: if changes.force { 0 } else { len } };
    let done = match opened {
        Some(opened) => live.replace(changes, opened),
        None => match live.call(changes, None) {
            Err(error) if error.kind() == ErrorKind::ReadOnly => live.reopen(changes),
            other => other,
        },
    };
    done.map_err(|error| {
        if freezes && info.has_disk() {
            // Best effort: what counts is the error that led here.
            let _ = node::set_read_only(&disk_of(info), false);
        }
        // Then what was written and not flushed keeps it.
        away.unwrap_or(error)
    })
}

/// Why what programs have written to a device cannot be written back now. The thread that does that would
/// wait in the kernel for the server of the image, and keep this process from ending.
fn away(store: &Store, info: &DeviceInfo) -> Option<Error> {
    let Spec { image, url, backing_url, .. } = &info.spec;
    if !becket_image::is_remote(image) && url.is_none() && backing_url.is_none() {
        return None;
    }
    let request = Reach { name: info.name.clone() };
    match client::call_running::<_, Nothing>(store.runtime(), "Reach", &request, Concerns::Server) {
        Err(error) if error.kind() == ErrorKind::Timeout => Some(error),
        // An older server does not know the question.
        _ => None,
    }
}

/// A device that may be changed now.
struct Live<'a> {
    store: &'a Store,
    device: &'a Device,
    /// Fewest bytes that its users leave it.
    shortest: u64,
}

impl Live<'_> {
    /// Puts another image in the place of the one that there is.
    fn replace(&self, changes: &Changes, opened: Opened) -> Result<DeviceInfo, Error> {
        // What was written to the device was meant for the old image.
        Caches::of(&self.device.info)?.write_back()?;
        let new = self.call(changes, Some(opened))?;
        guard::forget_cached(&new)?;
        Ok(new)
    }

    /// Makes a device writable whose image is open for reading only, with the rights of the caller.
    ///
    /// The image's locks cannot be held twice at once, not even by us, so they are complete only when the
    /// supervisor has released the old ones. Until then the device stays read-only, with files that could be
    /// written to.
    fn reopen(&self, changes: &Changes) -> Result<DeviceInfo, Error> {
        let info = &self.device.info;
        if let Some(cow) = &info.spec.cow {
            return Err(Error::Failed {
                kind: ErrorKind::ReadOnly,
                message: format!("the overlay of {}, {}, is open for reading only", info.name, cow.display()),
                hint: Some(info.again("")),
            });
        }
        if let Some(url) = &info.spec.url {
            return Err(Error::Failed {
                kind: ErrorKind::ReadOnly,
                message: format!("the bytes of {} come into becket's store, which is only read", info.name),
                hint: Some(info.anew("--cow FILE ", url)),
            });
        }
        let opened =
            open(self.store, self.device, &info.spec.image, &Changes { shared: true, ..changes.clone() })?;
        if opened.identity != self.device.image {
            return Err(Error::Failed {
                kind: ErrorKind::NotFound,
                message: format!("{} is not the image of {} any more", info.spec.image.display(), info.name),
                hint: Some("put the right one in its place by --image".to_owned()),
            });
        }
        let kept = || Error::io("keep", &info.spec.image);
        let own: Vec<FileSource> =
            opened.sources.iter().map(copy).collect::<Result<_, _>>().map_err(kept())?;
        let outer: Vec<OuterDisk> =
            opened.outer.iter().map(OuterDisk::try_clone).collect::<Result<_, _>>().map_err(kept())?;
        let range = opened.range.clone();
        self.call(&Changes { read_only: None, ..changes.clone() }, Some(opened))?;
        let lock = |file: &FileSource, write| {
            outer.iter().try_for_each(|outer| outer.relock(&info.spec.image, write))?;
            file.lock(&info.spec.image, range.as_ref(), write)
        };
        if !changes.shared
            && let Some(file) = own.first()
            && let Err(error) = lock(file, true)
        {
            // It still reads. Best effort: what counts is the clash.
            let _ = lock(file, false);
            return Err(Error::Image(error));
        }
        self.call(&Changes { read_only: Some(false), ..Changes::default() }, None)
    }

    fn call(&self, changes: &Changes, opened: Option<Opened>) -> Result<DeviceInfo, Error> {
        let mut fds = Vec::new();
        let format = changes.format_for(self.device).chosen();
        let image = opened.map(|mut opened| {
            opened.keep_outer();
            opened.complete(changes.direct_io.unwrap_or_default());
            let files = facts_of(&opened.sources);
            fds.extend(opened.sources.into_iter().flat_map(Source::into_descriptors));
            let partitions = opened.partitions.into_iter().map(Into::into).collect();
            NewImage { path: opened.path.clone(), format, map: opened.map, files, partitions }
        });
        let request = Set {
            name: self.device.info.name.clone(),
            direct_io: changes.direct_io,
            read_only: changes.read_only,
            size_limit: changes.size_limit.map(Option::unwrap_or_default),
            shortest: self.shortest,
            image,
        };
        let reply: OneDevice = {
            let concerns = Concerns::Worker(self.device.info.worker_pid);
            client::call(self.store.runtime(), "Set", &request, &fds, concerns)?
        };
        Ok(reply.device)
    }
}

fn copy(source: &Source) -> std::io::Result<FileSource> {
    source.file().ok_or(std::io::ErrorKind::Unsupported)?.try_clone()
}
