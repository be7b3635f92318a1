//! Device-mapper's control device: `include/uapi/linux/dm-ioctl.h`.
//! It never believes a reply: every offset and length in one is checked before it is used.
//!
//! Devices are named by their UUID, which cannot be changed; their name is another matter.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::ioctl::Opcode;
use rustix::ioctl::opcode::read_write;

/// Major and minor number of `/dev/mapper/control`.
pub const DM_CONTROL: (u32, u32) = (10, 236);

const DM_NAME_LEN: usize = 128;
const DM_UUID_LEN: usize = 129;
const DM_MAX_TYPE_NAME: usize = 16;

const DM_READONLY_FLAG: u32 = 1 << 0;
const DM_SUSPEND_FLAG: u32 = 1 << 1;
const DM_PERSISTENT_DEV_FLAG: u32 = 1 << 3;
const DM_STATUS_TABLE_FLAG: u32 = 1 << 4;
const DM_ACTIVE_PRESENT_FLAG: u32 = 1 << 5;
const DM_BUFFER_FULL_FLAG: u32 = 1 << 8;
const DM_SKIP_LOCKFS_FLAG: u32 = 1 << 10;
const DM_NOFLUSH_FLAG: u32 = 1 << 11;
const DM_DEFERRED_REMOVE: u32 = 1 << 17;

/// For udev's rules (libdevmapper's `DM_UDEV_PRIMARY_SOURCE_FLAG`): this event is a change of the device
/// itself and not a mere look at it. Without it on the first resume the rules take the device for one that is
/// not ready yet, and neither blkid nor systemd ever looks at it.
const DM_UDEV_PRIMARY_SOURCE_FLAG: u32 = 0x0040;
/// Rules find their flags in the upper half of the cookie; a lower half of 0 means that no process waits for
/// udev.
const DM_UDEV_FLAGS_SHIFT: u32 = 16;
const UDEV: u32 = DM_UDEV_PRIMARY_SOURCE_FLAG << DM_UDEV_FLAGS_SHIFT;

/// The interface that is spoken. The minor number only ever grows, and a kernel takes every smaller one.
const VERSION: [u32; 3] = [4, 0, 0];
/// Replies are asked for with this much room first ...
const REPLY_FIRST: usize = 4096;
/// ... and at most with this much: some hundred thousand devices, or targets.
const REPLY_MOST: usize = 16 << 20;

/// Head of every request and reply, `struct dm_ioctl`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DmIoctl {
    version: [u32; 3],
    data_size: u32,
    data_start: u32,
    target_count: u32,
    open_count: i32,
    flags: u32,
    event_nr: u32,
    padding: u32,
    dev: u64,
    name: [u8; DM_NAME_LEN],
    uuid: [u8; DM_UUID_LEN],
    data: [u8; 7],
}

/// Head of a line of a table, `struct dm_target_spec`. The parameters follow as text, up to a NUL.
#[repr(C)]
#[derive(Clone, Copy)]
struct DmTargetSpec {
    sector_start: u64,
    length: u64,
    status: i32,
    next: u32,
    target_type: [u8; DM_MAX_TYPE_NAME],
}

/// What the kernel says of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Major and minor number.
    pub dev: (u32, u32),
    /// Its name.
    pub name: String,
    /// How often it is open, by processes and by devices that stand on it.
    pub open_count: u32,
    /// Lines of its live table.
    pub targets: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// It takes no I/O at the moment.
    pub suspended: bool,
    /// It has a live table.
    pub active: bool,
    /// It goes when its last user closes it.
    pub deferred_remove: bool,
}

/// One line of a table, in sectors of 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// First sector on the device.
    pub start: u64,
    /// How many.
    pub len: u64,
    /// `linear`, `zero` ...
    pub kind: String,
    /// What that kind takes: `MAJOR:MINOR SECTOR` for `linear`.
    pub params: String,
}

macro_rules! commands {
    ($($name:ident = $number:literal;)*) => {
        $(const $name: Opcode = read_write::<DmIoctl>(0xfd, $number);)*
    };
}

commands! {
    DM_VERSION = 0;
    DM_LIST_DEVICES = 2;
    DM_DEV_CREATE = 3;
    DM_DEV_REMOVE = 4;
    DM_DEV_SUSPEND = 6;
    DM_DEV_STATUS = 7;
    DM_TABLE_LOAD = 9;
    DM_TABLE_STATUS = 12;
    DM_LIST_VERSIONS = 13;
}

/// The interface's version. `EACCES` without `CAP_SYS_ADMIN`, as for every command.
pub fn version(control: BorrowedFd<'_>) -> io::Result<[u32; 3]> {
    Ok(Call::new()?.run(control, DM_VERSION)?.version)
}

/// Names of the kinds of target that are loaded. Others are loaded when a table asks for them.
pub fn target_kinds(control: BorrowedFd<'_>) -> io::Result<Vec<String>> {
    list(control, DM_LIST_VERSIONS, 16, 0)
}

/// Names of all devices.
pub fn device_names(control: BorrowedFd<'_>) -> io::Result<Vec<String>> {
    list(control, DM_LIST_DEVICES, 12, 8)
}

/// Makes a device without a table; with a minor number that is free, or the requested one. `EBUSY` when name,
/// UUID or number are taken.
pub fn create(control: BorrowedFd<'_>, name: &str, uuid: &str, minor: Option<u32>) -> io::Result<Status> {
    let mut call = Call::new()?.named(name)?.with_uuid(uuid)?;
    if let Some(minor) = minor {
        call.head.flags |= DM_PERSISTENT_DEV_FLAG;
        call.head.dev = encode_minor(minor);
    }
    Ok(status_of(&call.run(control, DM_DEV_CREATE)?))
}

/// Gives a device a table, which counts from the next [`resume`] on. `EBUSY` when a device below is claimed
/// by others than device-mapper, `EINVAL` when a line is wrong or its kind does not exist.
pub fn load(control: BorrowedFd<'_>, uuid: &str, read_only: bool, table: &[Target]) -> io::Result<()> {
    let mut call = Call::new()?.with_uuid(uuid)?;
    call.head.flags |= if read_only { DM_READONLY_FLAG } else { 0 };
    call.head.target_count = u32::try_from(table.len()).map_err(|_| invalid())?;
    call.body = write_table(table)?;
    call.run(control, DM_TABLE_LOAD).map(drop)
}

/// Lets a device take I/O, by its new table if there is one; the change happens between requests: those under
/// way end first and later ones wait. `quietly` leaves file systems on it alone, which otherwise write
/// everything back and freeze for the time of the change.
pub fn resume(control: BorrowedFd<'_>, uuid: &str, quietly: bool) -> io::Result<Status> {
    let mut call = Call::new()?.with_uuid(uuid)?;
    call.head.flags |= if quietly { DM_SKIP_LOCKFS_FLAG } else { 0 };
    call.head.event_nr = UDEV;
    Ok(status_of(&call.run(control, DM_DEV_SUSPEND)?))
}

/// Removes a device; `EBUSY` when it is open, `ENXIO` when there is none.
pub fn remove(control: BorrowedFd<'_>, uuid: &str) -> io::Result<()> {
    let mut call = Call::new()?.with_uuid(uuid)?;
    call.head.event_nr = UDEV;
    call.run(control, DM_DEV_REMOVE).map(drop)
}

/// Removes a device now, or has the kernel do it at its last close. `true` when it is gone.
pub fn remove_deferred(control: BorrowedFd<'_>, uuid: &str) -> io::Result<bool> {
    let mut call = Call::new()?.with_uuid(uuid)?;
    call.head.flags |= DM_DEFERRED_REMOVE;
    call.head.event_nr = UDEV;
    Ok(call.run(control, DM_DEV_REMOVE)?.flags & DM_DEFERRED_REMOVE == 0)
}

/// What there is to know of a device. `ENXIO` when there is none.
pub fn status(control: BorrowedFd<'_>, uuid: &str) -> io::Result<Status> {
    Ok(status_of(&Call::new()?.with_uuid(uuid)?.run(control, DM_DEV_STATUS)?))
}

/// A device's live table.
pub fn table(control: BorrowedFd<'_>, uuid: &str) -> io::Result<Vec<Target>> {
    let mut call = Call::new()?.with_uuid(uuid)?;
    // No flush of what is on its way: a question must not change anything.
    call.head.flags |= DM_STATUS_TABLE_FLAG | DM_NOFLUSH_FLAG;
    let (head, body) = call.answered(control, DM_TABLE_STATUS)?;
    read_table(&body, head.target_count)
}

/// A request that is being put together.
struct Call {
    head: DmIoctl,
    body: Vec<u8>,
}

impl Call {
    fn new() -> io::Result<Call> {
        let head = DmIoctl {
            version: VERSION,
            data_size: length(size_of::<DmIoctl>())?,
            data_start: length(size_of::<DmIoctl>())?,
            target_count: 0,
            open_count: 0,
            flags: 0,
            event_nr: 0,
            padding: 0,
            dev: 0,
            name: [0; DM_NAME_LEN],
            uuid: [0; DM_UUID_LEN],
            data: [0; 7],
        };
        Ok(Call { head, body: Vec::new() })
    }

    fn named(mut self, name: &str) -> io::Result<Call> {
        set_text(&mut self.head.name, name)?;
        Ok(self)
    }

    fn with_uuid(mut self, uuid: &str) -> io::Result<Call> {
        set_text(&mut self.head.uuid, uuid)?;
        Ok(self)
    }

    fn run(self, control: BorrowedFd<'_>, command: Opcode) -> io::Result<DmIoctl> {
        Ok(self.once(control, command, 0)?.0)
    }

    /// With as much room for the answer as it needs; that is returned from its start on.
    fn answered(self, control: BorrowedFd<'_>, command: Opcode) -> io::Result<(DmIoctl, Vec<u8>)> {
        let mut room = REPLY_FIRST;
        loop {
            let (head, buffer) = self.once(control, command, room)?;
            if head.flags & DM_BUFFER_FULL_FLAG == 0 {
                let from = usize::try_from(head.data_start).map_err(|_| nonsense())?;
                let to = usize::try_from(head.data_size).map_err(|_| nonsense())?;
                // Without an answer the size is that of the head alone.
                let body = buffer.get(from..to.max(from)).ok_or_else(nonsense)?;
                return Ok((head, body.to_vec()));
            }
            room *= 2;
            if room > REPLY_MOST {
                return Err(io::Error::from_raw_os_error(libc::E2BIG));
            }
        }
    }

    fn once(&self, control: BorrowedFd<'_>, command: Opcode, room: usize) -> io::Result<(DmIoctl, Vec<u8>)> {
        let mut head = self.head;
        let size = size_of::<DmIoctl>() + self.body.len().max(room);
        head.data_size = length(size)?;
        let mut buffer = Vec::with_capacity(size);
        buffer.extend_from_slice(bytes_of(&head));
        buffer.extend_from_slice(&self.body);
        buffer.resize(size, 0);
        // SAFETY: the commands of device-mapper read and write at most `data_size` bytes from the pointer on,
        // which is the buffer's length.
        let done = unsafe { libc::ioctl(control.as_raw_fd(), command as _, buffer.as_mut_ptr()) };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        let head = head_of(&buffer).ok_or_else(nonsense)?;
        Ok((head, buffer))
    }
}

/// Names in a list whose entries hold, at byte `name_at`, a text; the distance to the next entry is a `u32`
/// at byte `next_at`.
fn list(control: BorrowedFd<'_>, command: Opcode, name_at: usize, next_at: usize) -> io::Result<Vec<String>> {
    names(&Call::new()?.answered(control, command)?.1, name_at, next_at)
}

fn names(body: &[u8], name_at: usize, next_at: usize) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    let mut rest = body;
    while !rest.is_empty() {
        let name = text(rest.get(name_at..).ok_or_else(nonsense)?)?;
        // A list of devices without any holds one entry of zeroes.
        if name.is_empty() {
            break;
        }
        names.push(name);
        let next: [u8; 4] =
            rest.get(next_at..).and_then(|rest| rest.first_chunk()).copied().ok_or_else(nonsense)?;
        match usize::try_from(u32::from_ne_bytes(next)).map_err(|_| nonsense())? {
            0 => break,
            // Each step goes on by at least the head of an entry, so this ends.
            next if next > name_at => rest = rest.get(next..).ok_or_else(nonsense)?,
            _ => return Err(nonsense()),
        }
    }
    Ok(names)
}

fn write_table(table: &[Target]) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    for target in table {
        let head = size_of::<DmTargetSpec>();
        let whole = (head + target.params.len() + 1).next_multiple_of(8);
        let mut spec = DmTargetSpec {
            sector_start: target.start,
            length: target.len,
            status: 0,
            next: length(whole)?,
            target_type: [0; DM_MAX_TYPE_NAME],
        };
        set_text(&mut spec.target_type, &target.kind)?;
        if target.params.bytes().any(|byte| byte == 0) {
            return Err(invalid());
        }
        let end = body.len() + whole;
        body.extend_from_slice(bytes_of(&spec));
        body.extend_from_slice(target.params.as_bytes());
        body.resize(end, 0);
    }
    Ok(body)
}

/// In a reply `next` counts from the start of the first line, not of its own.
fn read_table(body: &[u8], count: u32) -> io::Result<Vec<Target>> {
    let mut table = Vec::new();
    let mut at = 0;
    for _ in 0..count {
        let rest = body.get(at..).ok_or_else(nonsense)?;
        let spec = spec_of(rest).ok_or_else(nonsense)?;
        table.push(Target {
            start: spec.sector_start,
            len: spec.length,
            kind: text(&spec.target_type)?,
            params: text(rest.get(size_of::<DmTargetSpec>()..).unwrap_or_default())?,
        });
        let next = usize::try_from(spec.next).map_err(|_| nonsense())?;
        if next <= at {
            return if table.len() == count as usize { Ok(table) } else { Err(nonsense()) };
        }
        at = next;
    }
    Ok(table)
}

fn status_of(head: &DmIoctl) -> Status {
    let is = |flag| head.flags & flag != 0;
    Status {
        dev: decode(head.dev),
        name: text(&head.name).unwrap_or_default(),
        open_count: u32::try_from(head.open_count).unwrap_or(0),
        targets: head.target_count,
        read_only: is(DM_READONLY_FLAG),
        suspended: is(DM_SUSPEND_FLAG),
        active: is(DM_ACTIVE_PRESENT_FLAG),
        deferred_remove: is(DM_DEFERRED_REMOVE),
    }
}

/// From the kernel's encoding of device numbers: 12 bits of major between the minor's halves.
fn decode(dev: u64) -> (u32, u32) {
    let major = (dev >> 8) & 0xfff;
    let minor = (dev & 0xff) | ((dev >> 12) & 0xf_ff00);
    (major as u32, minor as u32)
}

/// The kernel looks at the minor number alone when a device is made.
fn encode_minor(minor: u32) -> u64 {
    let minor = u64::from(minor);
    (minor & 0xff) | ((minor & !0xff) << 12)
}

/// Text up to its NUL, or to the end where there is none.
fn text(bytes: &[u8]) -> io::Result<String> {
    let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8(text.to_vec()).map_err(|_| nonsense())
}

/// Sets a text that ends with a NUL.
fn set_text(field: &mut [u8], text: &str) -> io::Result<()> {
    if text.len() >= field.len() || text.bytes().any(|byte| byte == 0) {
        return Err(invalid());
    }
    field.fill(0);
    field.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
    Ok(())
}

fn length(bytes: usize) -> io::Result<u32> {
    u32::try_from(bytes).map_err(|_| invalid())
}

fn invalid() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}

fn nonsense() -> io::Error {
    io::Error::from_raw_os_error(libc::EBADMSG)
}

/// Structures of plain integers without a byte of padding.
trait Plain: Copy {}
impl Plain for DmIoctl {}
impl Plain for DmTargetSpec {}

fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: the structures named `Plain` have no padding (their sizes are the sums of their fields', by
    // test), so all of their bytes are initialised; the slice lives as long as the value.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast(), size_of::<T>()) }
}

fn head_of(bytes: &[u8]) -> Option<DmIoctl> {
    read_plain(bytes)
}

fn spec_of(bytes: &[u8]) -> Option<DmTargetSpec> {
    read_plain(bytes)
}

fn read_plain<T: Plain>(bytes: &[u8]) -> Option<T> {
    let bytes = bytes.get(..size_of::<T>())?;
    // SAFETY: there are as many bytes as the structure has, every pattern of which is a value of its
    // integers.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

#[cfg(test)]
#[path = "dm_tests.rs"]
mod tests;
