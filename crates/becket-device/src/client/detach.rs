//! The end of a device, and what changes while it lives.
//! It never takes a block device away from its users, and never touches one that is not becket's.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::client::kernel_made::KernelDriver;
use crate::client::list::{devices, resolve};
use crate::client::{kernel_drivers, partitions, unrecorded};
use crate::contract::messages::{Detach, OneDevice, Refresh};
use crate::contract::shape::has_disk;
use crate::contract::{CLIENTS, DetachOptions, DeviceInfo, DeviceState, Error, ErrorKind, User};
use crate::control::client;
use crate::control::health::{self, Concerns};
use crate::record::device::Device;
use crate::record::judge::{disk_of, lives};
use crate::record::register::forget;
use crate::record::runtime::Runtime;
use crate::record::store::Store;
use crate::system::kernel::System;
use crate::system::users;

/// How long is waited for a program that merely has the device open (those that look at every new device let
/// go in less), and for clients of an export: its worker hears a moment later that they have gone.
const PATIENCE: Duration = Duration::from_secs(1);

/// Detaches the device that goes by a NAME, a path under /dev, or the path of its image, and waits until
/// it is really gone. With `lazy` a device in use is detached with its last user; its state then is
/// [`DeviceState::Detaching`].
///
/// # Errors
/// There is no such device, it is in use, or it does not go in time.
pub fn detach(target: impl AsRef<Path>, options: &DetachOptions) -> Result<DeviceInfo, Error> {
    let store = Store::open(Runtime::open()?)?;
    let device = match resolve(&store, target.as_ref()) {
        // The records may have been removed.
        Err(none @ Error::NoDevice { .. }) => {
            return unrecorded::detach(store.runtime(), target.as_ref(), options)?
                .ok_or_else(|| not_ours(none, target.as_ref()));
        }
        found => found?,
    };
    if options.force && has_disk(device.info.transport) {
        return Err(Error::Failed {
            kind: ErrorKind::InvalidOption,
            message: "only an export can be taken from its clients".to_owned(),
            hint: Some("end the users of the device, or detach it with the last of them: --lazy".to_owned()),
        });
    }
    match kernel_drivers::of(device.info.transport) {
        Some(driver) => detach_kernel_made(&store, device, driver, options),
        None => detach_served(&store, device, options),
    }
}

/// That becket has no such device to detach.
pub(crate) fn not_ours(none: Error, target: &Path) -> Error {
    if !target.as_os_str().as_encoded_bytes().starts_with(b"/dev/loop") {
        return none;
    }
    Error::Failed {
        kind: none.kind(),
        message: none.to_string(),
        hint: Some(
            "becket detaches only what it attached: see `becket list`; for other loop devices: losetup --detach"
                .to_owned(),
        ),
    }
}

fn detach_kernel_made(
    store: &Store,
    device: Device,
    driver: &dyn KernelDriver,
    options: &DetachOptions,
) -> Result<DeviceInfo, Error> {
    if !options.lazy {
        let who = || named(store, &device.info, users::of(&disk_of(&device.info)));
        once_unused(&device.info, options, who, || driver.detach_unused(&device).map_err(Error::Device))?;
    } else if !driver.detach_lazily(&device).map_err(Error::Device)? {
        return Ok(DeviceInfo { state: DeviceState::Detaching, ..device.info });
    }
    forget(store, &device);
    Ok(device.info)
}

fn detach_served(store: &Store, device: Device, options: &DetachOptions) -> Result<DeviceInfo, Error> {
    let force = options.force.then_some(true);
    let request = Detach { name: device.info.name.clone(), lazy: options.lazy, force };
    let mut info = device.info.clone();
    let mut waited = false;
    health::running(&device)?;
    let concerns = Concerns::Worker(device.info.worker_pid);
    let who = || named(store, &device.info, users_of(store.runtime(), &device.info));
    once_unused(&device.info, options, who, || {
        match client::call::<_, OneDevice>(store.runtime(), "Detach", &request, &[], concerns) {
            Ok(reply) => info = reply.device,
            Err(Error::Busy { .. }) => {
                waited = true;
                return Ok(false);
            }
            // It went with the user that we were waiting for.
            Err(error) if waited && error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(true)
    })?;
    if options.lazy && info.state == DeviceState::Detaching {
        return Ok(info);
    }
    let deadline = Instant::now() + options.timeout;
    while is_there(store, &device)? {
        if Instant::now() >= deadline {
            let seconds = options.timeout.as_secs();
            return Err(Error::Timeout { device: device.info.device, seconds });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(info)
}

/// The same users, with what becket serves from the device in place of the processes that do it: ending these
/// would not end the use.
fn named(store: &Store, info: &DeviceInfo, users: Vec<User>) -> Vec<User> {
    if !info.has_disk() {
        // Of no device it is the image.
        return users;
    }
    let disk = users::blocks(&disk_of(info));
    let is_image = |path: &Path| {
        // Of other files it would ask a file system that may not answer.
        let number = path.starts_with("/dev").then(|| users::number_of(path)).flatten();
        number.is_some_and(|number| disk.iter().any(|block| block.number == number))
    };
    let over = devices(store).unwrap_or_default().into_iter().map(|device| device.info);
    // One that the kernel serves itself is among the users.
    let over = over.filter(|over| kernel_drivers::of(over.transport).is_none() && is_image(&over.spec.image));
    let mut found: Vec<User> = over.map(|over| User::served(&over.name)).collect();
    let nameless = |user: &User| found.is_empty() || !user.is_becket();
    let others: Vec<User> = users.into_iter().filter(nameless).collect();
    found.extend(others);
    found
}

/// Who uses a device now; if `patient`, without who lets it go in a moment.
pub(crate) fn users_at(store: &Store, info: &DeviceInfo, patient: bool) -> Vec<User> {
    let deadline = Instant::now() + if patient { PATIENCE } else { Duration::ZERO };
    loop {
        let users = named(store, info, users_of(store.runtime(), info));
        if users.is_empty() || has_lasting(info, &users) || Instant::now() >= deadline {
            return users;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Whether waiting for the users of a device makes no sense: they do not go by themselves.
fn has_lasting(info: &DeviceInfo, users: &[User]) -> bool {
    has_disk(info.transport) && !users.iter().all(users::passing)
}

/// Who uses a device. The clients of an export are not found below /proc.
fn users_of(runtime: &Runtime, info: &DeviceInfo) -> Vec<User> {
    if info.is_file() {
        return info.device.parent().map(users::below).unwrap_or_default();
    }
    if info.has_disk() {
        return users::of(&disk_of(info));
    }
    let clients = health::connections(runtime, info).unwrap_or(0);
    let how = format!("{clients} connected");
    (clients > 0).then(|| User { pid: 0, command: CLIENTS.to_owned(), how }).into_iter().collect()
}

/// Whether the device has a record, which its server removes when everything else is done.
fn is_there(store: &Store, device: &Device) -> Result<bool, Error> {
    let found = store.device(&device.info.name)?;
    Ok(found.is_some_and(|found| found.mark == device.mark && lives(&System, &found)))
}

/// Retries until the device is unused, which `attempt` asks the kernel. Its users are searched for only when
/// it is in use, because that takes a walk over /proc: lasting users are an error at once, passing ones and
/// clients of an export only after a while.
fn once_unused(
    info: &DeviceInfo,
    options: &DetachOptions,
    who: impl Fn() -> Vec<User>,
    mut attempt: impl FnMut() -> Result<bool, Error>,
) -> Result<(), Error> {
    let deadline = Instant::now() + PATIENCE.min(options.timeout);
    let busy = |users| Err(Error::Busy { device: info.device.clone(), users });
    let mut pause = Duration::from_millis(2);
    let mut looked = false;
    while !attempt()? {
        let late = Instant::now() >= deadline;
        if late || !looked {
            let users = who();
            if late || has_lasting(info, &users) {
                return busy(users);
            }
            looked = true;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    Ok(())
}

/// Takes over a changed size of the image of the device that `target` names, and a changed partition table.
/// It is not an error if nothing has changed; a disk of fixed length (that of a qcow2) never changes its
/// size.
///
/// # Errors
/// There is no such device, the size has changed and its transport cannot follow, or a partition is in use
/// that the table no longer has.
pub fn refresh(target: impl AsRef<Path>) -> Result<DeviceInfo, Error> {
    let store = Store::open(Runtime::open()?)?;
    let mut device = resolve(&store, target.as_ref())?;
    let sized = match kernel_drivers::of(device.info.transport) {
        None => {
            health::responding(store.runtime(), &device)?;
            let concerns = Concerns::Worker(device.info.worker_pid);
            let request = Refresh { name: device.info.name.clone(), partitions: None };
            client::call::<_, OneDevice>(store.runtime(), "Refresh", &request, &[], concerns).map(|reply| {
                device.info = reply.device;
            })
        }
        Some(driver) => driver.refresh(&device).map_err(Error::Device).and_then(|size| {
            let mut new = device.clone();
            new.info.size = size;
            store.update(&device, &new)?;
            device = new;
            Ok(())
        }),
    };
    match sized {
        // It cannot follow its image's length, and its table may have been changed all the same.
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            partitions::refresh(&store, device)?;
            Err(error)
        }
        // A server that does not say that length may answer no read either. The table is not looked at: such
        // a read waits, and nothing ends it.
        Err(error) => Err(error),
        Ok(()) => partitions::refresh(&store, device),
    }
}

/// What the supervisor says of itself, when one runs.
///
/// # Errors
/// One runs and cannot be talked to.
pub fn server_status() -> Result<Option<crate::contract::ServerStatus>, Error> {
    let Some(runtime) = Runtime::existing()? else { return Ok(None) };
    client::call_running(&runtime, "Status", &crate::contract::messages::Nothing {}, Concerns::Server)
}
