//! The conversation with a program that wants volumes, by `io.systemd.StorageProvider`. It serves root and
//! its own user, and attaches nothing itself.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;

use serde_json::value::RawValue;

use super::answers::{self, NotDone, parse, reply};
use super::socket::{Socket, no_longer};
use crate::contract::varlink::{Call, Refusal};
use crate::contract::volume::{
    Acquire, Acquired, CreateMode, DESCRIPTION, INTERFACE, Listed, Matching, NoVolume, VolumeType,
};
use crate::contract::{DeviceInfo, Error};

/// A volume that was handed out: its block device, open.
#[derive(Debug)]
pub struct Volume {
    /// The device.
    pub device: File,
    /// It was opened for reading only.
    pub read_only: bool,
}

/// Why a volume is not handed out.
#[derive(Debug)]
pub enum Unavailable {
    /// There is none of that name.
    Missing,
    /// It was to be written, and can only be read.
    ReadOnly,
    /// Anything else.
    Failed(Error),
}

/// Where volumes come from.
pub trait Volumes: Sync {
    /// Opens the volume of that name. `read_only`: `None` is writable where that is possible.
    ///
    /// # Errors
    /// There is none, or it cannot be had as it is wanted.
    fn acquire(&self, name: &str, read_only: Option<bool>) -> Result<Volume, Unavailable>;
    /// Those that are there without being asked for.
    ///
    /// # Errors
    /// They cannot be listed.
    fn list(&self) -> Result<Vec<DeviceInfo>, Error>;
    /// Whether a name is one of those that a shell's pattern means.
    fn matches(&self, pattern: &str, name: &str) -> bool;
}

/// What a call gets: replies in their order, and the descriptor that comes with the last.
type Answers = Result<(Vec<Vec<u8>>, Option<File>), NotDone>;

/// Serves one connection until its peer hangs up.
///
/// # Errors
/// The peer is gone, or has sent nonsense.
pub(crate) fn converse(volumes: &dyn Volumes, stream: UnixStream) -> io::Result<()> {
    let peer = becket_uapi::peer::of(&stream)?.uid;
    let mut socket = Socket::new(stream);
    if peer != rustix::process::geteuid().as_raw() && peer != 0 {
        return socket.send(serde_json::to_vec(&Refusal::PermissionDenied)?, &[], &mut no_longer);
    }
    while let Some((message, _)) = socket.receive(&mut no_longer)? {
        let call: Call<Box<RawValue>> = serde_json::from_slice(&message)?;
        let (replies, device) = match answer(volumes, &call) {
            Ok(answers) => answers,
            Err(error) => (vec![serde_json::to_vec(&error)?], None),
        };
        if call.oneway {
            continue;
        }
        let device: Vec<BorrowedFd<'_>> = device.iter().map(|device| device.as_fd()).collect();
        for reply in replies {
            socket.send(reply, &device, &mut no_longer)?;
        }
    }
    Ok(())
}

fn answer(volumes: &dyn Volumes, call: &Call<Box<RawValue>>) -> Answers {
    let parameters = call.parameters.as_ref().map_or("{}", |parameters| parameters.get());
    let (interface, name) = call.method.rsplit_once('.').unwrap_or(("", &call.method));
    match (interface, name) {
        (INTERFACE, "Acquire") => acquire(volumes, parse(parameters)?),
        (INTERFACE, "ListVolumes" | "ListTemplates") if !call.more => Err(Refusal::ExpectedMore.into()),
        (INTERFACE, "ListVolumes") => list(volumes, &parse(parameters)?),
        (INTERFACE, "ListTemplates") => {
            let _: Matching = parse(parameters)?;
            Err(NoVolume::NoSuchTemplate.into())
        }
        _ => {
            let answer = answers::of_service(&call.method, parameters, &[(INTERFACE, DESCRIPTION)]);
            Ok((vec![answer?], None))
        }
    }
}

fn acquire(volumes: &dyn Volumes, asked: Acquire) -> Answers {
    if asked.create_mode == Some(CreateMode::New) {
        return Err(NoVolume::CreateNotSupported.into());
    }
    if asked.template.is_some_and(|template| !template.is_empty()) {
        return Err(NoVolume::NoSuchTemplate.into());
    }
    if asked.request_as.is_some_and(|kind| kind != VolumeType::Blk) {
        return Err(NoVolume::TypeNotSupported.into());
    }
    let volume = volumes.acquire(&asked.name, asked.read_only).map_err(|why| match why {
        Unavailable::Missing => NoVolume::NoSuchVolume.into(),
        Unavailable::ReadOnly => NoVolume::ReadOnlyVolume.into(),
        Unavailable::Failed(error) => NotDone::from(error),
    })?;
    let read_only = volume.read_only;
    let acquired = Acquired { file_descriptor_index: 0, kind: VolumeType::Blk, read_only };
    Ok((vec![reply(acquired, false)?], Some(volume.device)))
}

fn list(volumes: &dyn Volumes, asked: &Matching) -> Answers {
    let wanted = |device: &DeviceInfo| {
        asked.match_name.as_deref().is_none_or(|pattern| volumes.matches(pattern, &device.name))
    };
    let listed: Vec<Listed> = volumes
        .list()?
        .into_iter()
        .filter(wanted)
        .map(|device| Listed {
            name: device.name,
            kind: VolumeType::Blk,
            read_only: device.spec.read_only,
            size_bytes: device.size,
        })
        .collect();
    let last = listed.len().checked_sub(1).ok_or(NoVolume::NoSuchVolume)?;
    let replies = listed.into_iter().enumerate().map(|(at, one)| reply(one, at < last));
    Ok((replies.collect::<Result<_, _>>()?, None))
}
