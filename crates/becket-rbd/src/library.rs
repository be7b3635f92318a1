//! librados and librbd, found when the program starts: the functions that are used, and owners of what they
//! make.
//! Everything unsafe of this program is here. Nothing here decides anything.
//!
//! The declarations follow `rados/librados.h` and `rbd/librbd.h` of Ceph 12 and later.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock};

/// An error number of the libraries, as a positive one of the system.
pub(crate) type Errno = i32;

type Handle = *mut c_void;
type OnComplete = extern "C" fn(Handle, *mut c_void);
type OnExtent = extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// One who watches an image: `rbd_image_watcher_t`.
#[repr(C)]
struct Watcher {
    address: *mut c_char,
    id: i64,
    cookie: u64,
}

/// Declares the functions, by the library that has them.
macro_rules! functions {
    ($($library:ident: $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case, reason = "the libraries' names")]
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl Functions {
            fn load(rados: &Loaded, rbd: &Loaded) -> Result<Functions, String> {
                let of = |name: &str| if name == "rados" { rados } else { rbd };
                Ok(Functions {
                    $($name: {
                        let found = of(stringify!($library)).symbol(stringify!($name))?;
                        // SAFETY: the library's header declares it so.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    rados: rados_create2(*mut Handle, *const c_char, *const c_char, u64) -> c_int;
    rados: rados_conf_read_file(Handle, *const c_char) -> c_int;
    rados: rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    rados: rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
    rados: rados_connect(Handle) -> c_int;
    rados: rados_shutdown(Handle);
    rados: rados_getaddrs(Handle, *mut *mut c_char) -> c_int;
    rados: rados_buffer_free(*mut c_char);
    rados: rados_mon_command(
        Handle, *mut *const c_char, usize, *const c_char, usize, *mut *mut c_char, *mut usize,
        *mut *mut c_char, *mut usize
    ) -> c_int;
    rados: rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    rados: rados_ioctx_set_namespace(Handle, *const c_char);
    rados: rados_ioctx_destroy(Handle);
    rbd: rbd_image_options_create(*mut Handle);
    rbd: rbd_image_options_destroy(Handle);
    rbd: rbd_image_options_set_uint64(Handle, c_int, u64) -> c_int;
    rbd: rbd_create4(Handle, *const c_char, u64, Handle) -> c_int;
    rbd: rbd_rename(Handle, *const c_char, *const c_char) -> c_int;
    rbd: rbd_remove(Handle, *const c_char) -> c_int;
    rbd: rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd: rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd: rbd_close(Handle) -> c_int;
    rbd: rbd_get_size(Handle, *mut u64) -> c_int;
    rbd: rbd_get_id(Handle, *mut c_char, usize) -> c_int;
    rbd: rbd_snap_get_id(Handle, *const c_char, *mut u64) -> c_int;
    rbd: rbd_aio_create_completion(*mut c_void, OnComplete, *mut Handle) -> c_int;
    rbd: rbd_aio_get_return_value(Handle) -> isize;
    rbd: rbd_aio_release(Handle);
    rbd: rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
    rbd: rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
    rbd: rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd: rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
    rbd: rbd_aio_flush(Handle, Handle) -> c_int;
    rbd: rbd_diff_iterate2(Handle, *const c_char, u64, u64, u8, u8, OnExtent, *mut c_void) -> c_int;
    rbd: rbd_lock_acquire(Handle, c_int) -> c_int;
    rbd: rbd_lock_release(Handle) -> c_int;
    rbd: rbd_lock_get_owners(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd: rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd: rbd_lock_break(Handle, c_int, *const c_char) -> c_int;
    rbd: rbd_is_exclusive_lock_owner(Handle, *mut c_int) -> c_int;
    rbd: rbd_watchers_list(Handle, *mut Watcher, *mut usize) -> c_int;
    rbd: rbd_watchers_list_cleanup(*mut Watcher, usize);
}

/// `RBD_IMAGE_OPTION_FEATURES_SET`: features beside those of the configuration.
const FEATURES_SET: c_int = 8;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
const EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
const EXCLUSIVE: c_int = 0;

/// A library that is loaded for ever.
struct Loaded(*mut c_void);

impl Loaded {
    fn load(file: &CStr, package: &str) -> Result<Loaded, String> {
        // SAFETY: the name ends with a zero byte. What libraries do when they are loaded is theirs.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            let file = file.to_string_lossy();
            return Err(format!("{file} is not installed: package {package} (librbd1 on Debian and Ubuntu)"));
        }
        Ok(Loaded(handle))
    }

    fn symbol(&self, name: &str) -> Result<*mut c_void, String> {
        let name = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: both are valid.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if found.is_null() {
            return Err(format!("librbd is too old: it has no {}", name.to_string_lossy()));
        }
        Ok(found)
    }
}

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// The libraries, which were loaded.
#[derive(Clone, Copy)]
pub(crate) struct Library(&'static Functions);

/// What a call has said.
fn said(result: c_int) -> Result<(), Errno> {
    if result < 0 { Err(-result) } else { Ok(()) }
}

fn text(text: &str) -> Result<CString, Errno> {
    CString::new(text).map_err(|_| libc::EINVAL)
}

impl Library {
    /// Loads them.
    pub(crate) fn load() -> Result<Library, String> {
        let rados = Loaded::load(c"librados.so.2", "librados2")?;
        let rbd = Loaded::load(c"librbd.so.1", "librbd1")?;
        let functions = Functions::load(&rados, &rbd)?;
        Ok(Library(FUNCTIONS.get_or_init(|| functions)))
    }

    /// A cluster that is not connected to yet, for a user (`client.admin`).
    pub(crate) fn cluster(self, user: &str) -> Result<Cluster, Errno> {
        let user = text(user)?;
        let mut handle = null_mut();
        // SAFETY: all are valid for the call, which writes a handle.
        said(unsafe { (self.0.rados_create2)(&raw mut handle, c"ceph".as_ptr(), user.as_ptr(), 0) })?;
        Ok(Cluster { library: self, handle })
    }
}

/// A cluster.
pub(crate) struct Cluster {
    library: Library,
    handle: Handle,
}

// SAFETY: librados may be called by any thread.
unsafe impl Send for Cluster {}
// SAFETY: the same.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Reads a configuration, or the default ones.
    pub(crate) fn read_conf(&self, path: Option<&str>) -> Result<(), Errno> {
        let path = path.map(text).transpose()?;
        let path = path.as_ref().map_or(null(), |path| path.as_ptr());
        // SAFETY: a handle of ours, and a string or nothing.
        said(unsafe { (self.library.0.rados_conf_read_file)(self.handle, path) })
    }

    pub(crate) fn set(&self, option: &str, value: &str) -> Result<(), Errno> {
        let (option, value) = (text(option)?, text(value)?);
        // SAFETY: a handle of ours, and strings.
        said(unsafe { (self.library.0.rados_conf_set)(self.handle, option.as_ptr(), value.as_ptr()) })
    }

    pub(crate) fn get(&self, option: &str) -> Result<String, Errno> {
        let option = text(option)?;
        let mut bytes = vec![0u8; 4096];
        // SAFETY: a handle of ours, a string, and a buffer of that length.
        said(unsafe {
            (self.library.0.rados_conf_get)(
                self.handle,
                option.as_ptr(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
            )
        })?;
        Ok(CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// Connects, within the time that the configuration gives.
    pub(crate) fn connect(&self) -> Result<(), Errno> {
        // SAFETY: a handle of ours.
        said(unsafe { (self.library.0.rados_connect)(self.handle) })
    }

    /// As what this client is known to the cluster.
    pub(crate) fn address(&self) -> Result<String, Errno> {
        let mut found: *mut c_char = null_mut();
        // SAFETY: a handle of ours, and a place for a string, which is freed by the library.
        unsafe {
            said((self.library.0.rados_getaddrs)(self.handle, &raw mut found))?;
            let address = CStr::from_ptr(found).to_string_lossy().into_owned();
            (self.library.0.rados_buffer_free)(found);
            Ok(address)
        }
    }

    /// What a monitor answers to a command. It may wait as long as `rados_mon_op_timeout` says.
    pub(crate) fn ask(&self, command: &str) -> Result<Vec<u8>, Errno> {
        let command = text(command)?;
        let mut commands = [command.as_ptr()];
        let (mut answer, mut len): (*mut c_char, usize) = (null_mut(), 0);
        // SAFETY: a handle of ours, a string, no input, and places for an answer, which is copied and freed
        // by the library; what the monitor says beside it is not asked for.
        unsafe {
            said((self.library.0.rados_mon_command)(
                self.handle,
                commands.as_mut_ptr(),
                commands.len(),
                null(),
                0,
                &raw mut answer,
                &raw mut len,
                null_mut(),
                null_mut(),
            ))?;
            if answer.is_null() {
                return Ok(Vec::new());
            }
            let bytes = std::slice::from_raw_parts(answer.cast::<u8>(), len).to_vec();
            (self.library.0.rados_buffer_free)(answer);
            Ok(bytes)
        }
    }

    /// A pool, and in it a namespace.
    pub(crate) fn pool(self: &Arc<Cluster>, pool: &str, namespace: Option<&str>) -> Result<Pool, Errno> {
        let (pool, namespace) = (text(pool)?, namespace.map(text).transpose()?);
        let mut handle = null_mut();
        // SAFETY: a handle of ours, a string, and a place for a handle.
        said(unsafe { (self.library.0.rados_ioctx_create)(self.handle, pool.as_ptr(), &raw mut handle) })?;
        if let Some(namespace) = namespace {
            // SAFETY: a handle of ours, and a string.
            unsafe { (self.library.0.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
        }
        Ok(Pool { cluster: Arc::clone(self), handle })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: a handle of ours, which nothing uses any more.
        unsafe { (self.library.0.rados_shutdown)(self.handle) };
    }
}

/// A pool.
pub(crate) struct Pool {
    cluster: Arc<Cluster>,
    handle: Handle,
}

// SAFETY: librados may be called by any thread.
unsafe impl Send for Pool {}
// SAFETY: the same.
unsafe impl Sync for Pool {}

impl Pool {
    /// Makes an image of so many bytes, with the features that the cluster's configuration gives, and a lock.
    pub(crate) fn make(&self, name: &str, size: u64) -> Result<(), Errno> {
        let (name, library) = (text(name)?, self.cluster.library.0);
        let mut options = null_mut();
        // SAFETY: a place for a handle; then handles of ours and a string.
        said(unsafe {
            (library.rbd_image_options_create)(&raw mut options);
            let mut made = (library.rbd_image_options_set_uint64)(options, FEATURES_SET, EXCLUSIVE_LOCK);
            if made >= 0 {
                made = (library.rbd_create4)(self.handle, name.as_ptr(), size, options);
            }
            (library.rbd_image_options_destroy)(options);
            made
        })
    }

    /// Gives an image another name, which no image has yet.
    pub(crate) fn rename(&self, name: &str, other: &str) -> Result<(), Errno> {
        let (name, other) = (text(name)?, text(other)?);
        // SAFETY: a handle of ours, and strings.
        said(unsafe { (self.cluster.library.0.rbd_rename)(self.handle, name.as_ptr(), other.as_ptr()) })
    }

    /// Removes an image, which must be closed.
    pub(crate) fn remove(&self, name: &str) -> Result<(), Errno> {
        let name = text(name)?;
        // SAFETY: a handle of ours, and a string.
        said(unsafe { (self.cluster.library.0.rbd_remove)(self.handle, name.as_ptr()) })
    }

    /// Opens an image, or a snapshot of it.
    pub(crate) fn image(self, name: &str, snapshot: Option<&str>, read_only: bool) -> Result<Image, Errno> {
        let (name, snapshot) = (text(name)?, snapshot.map(text).transpose()?);
        let snapshot = snapshot.as_ref().map_or(null(), |snapshot| snapshot.as_ptr());
        let library = self.cluster.library;
        let open = if read_only { library.0.rbd_open_read_only } else { library.0.rbd_open };
        let mut handle = null_mut();
        // SAFETY: a handle of ours, strings, and a place for a handle.
        said(unsafe { open(self.handle, name.as_ptr(), &raw mut handle, snapshot) })?;
        Ok(Image { pool: self, handle })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: a handle of ours, which nothing uses any more.
        unsafe { (self.cluster.library.0.rados_ioctx_destroy)(self.handle) };
    }
}

/// An open image.
pub(crate) struct Image {
    pool: Pool,
    handle: Handle,
}

// SAFETY: librbd may be called by any thread.
unsafe impl Send for Image {}
// SAFETY: the same.
unsafe impl Sync for Image {}

/// What is done with a range. The bytes live until it is finished.
pub(crate) enum Work {
    /// As many bytes as the buffer has.
    Read(Vec<u8>),
    Write(Vec<u8>),
    Discard,
    Zero {
        allocated: bool,
    },
    Flush,
}

/// Takes the result: the number that the library has, and the bytes that were read.
type Finish = Box<dyn FnOnce(isize, Vec<u8>) + Send>;

struct Pending {
    library: Library,
    bytes: Vec<u8>,
    finish: Finish,
}

extern "C" fn on_complete(completion: Handle, pending: *mut c_void) {
    // SAFETY: it was made of a box by `submit`, and the library calls this once.
    let pending = unsafe { Box::from_raw(pending.cast::<Pending>()) };
    // SAFETY: the completion of this call, which nothing uses afterwards.
    let result = unsafe {
        let result = (pending.library.0.rbd_aio_get_return_value)(completion);
        (pending.library.0.rbd_aio_release)(completion);
        result
    };
    (pending.finish)(result, pending.bytes);
}

impl Image {
    fn functions(&self) -> &'static Functions {
        self.pool.cluster.library.0
    }

    /// The cluster that it is on.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.pool.cluster
    }

    /// Its length in bytes.
    pub(crate) fn size(&self) -> Result<u64, Errno> {
        let mut size = 0;
        // SAFETY: a handle of ours, and a place for a number.
        said(unsafe { (self.functions().rbd_get_size)(self.handle, &raw mut size) })?;
        Ok(size)
    }

    /// What no other image of the pool has had, of whatever name; one of the first format has none.
    pub(crate) fn id(&self) -> Result<Option<String>, Errno> {
        let mut bytes = [0u8; 256];
        // SAFETY: a handle of ours, and a buffer of that length.
        let got = said(unsafe {
            (self.functions().rbd_get_id)(self.handle, bytes.as_mut_ptr().cast(), bytes.len())
        });
        match got {
            Err(libc::EINVAL) => Ok(None),
            got => got.map(|()| {
                let id = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
                Some(id.to_string_lossy().into_owned())
            }),
        }
    }

    /// The same of a snapshot of it.
    pub(crate) fn snapshot_id(&self, snapshot: &str) -> Result<u64, Errno> {
        let (snapshot, mut id) = (text(snapshot)?, 0);
        // SAFETY: a handle of ours, a string, and a place for a number.
        said(unsafe { (self.functions().rbd_snap_get_id)(self.handle, snapshot.as_ptr(), &raw mut id) })?;
        Ok(id)
    }

    /// Begins some work; `finish` is called by a thread of the library, once.
    pub(crate) fn submit(&self, work: Work, offset: u64, len: u64, finish: Finish) {
        let library = self.pool.cluster.library;
        let (kind, bytes) = match work {
            Work::Read(bytes) => (Command::Read, bytes),
            Work::Write(bytes) => (Command::Write, bytes),
            Work::Discard => (Command::Discard, Vec::new()),
            Work::Zero { allocated } => (Command::Zero { allocated }, Vec::new()),
            Work::Flush => (Command::Flush, Vec::new()),
        };
        let mut pending = Box::new(Pending { library, bytes, finish });
        let buffer: *mut c_char = pending.bytes.as_mut_ptr().cast();
        let count = pending.bytes.len();
        let pending = Box::into_raw(pending);
        let mut completion = null_mut();
        let functions = library.0;
        // SAFETY: handles of ours. The buffer belongs to `pending`, which lives until `on_complete` takes it;
        // nothing else uses it meanwhile.
        let result = unsafe {
            let made =
                (functions.rbd_aio_create_completion)(pending.cast(), on_complete, &raw mut completion);
            if made < 0 {
                made
            } else {
                let (image, off) = (self.handle, offset);
                let begun = match kind {
                    Command::Read => (functions.rbd_aio_read)(image, off, count, buffer, completion),
                    Command::Write => (functions.rbd_aio_write)(image, off, count, buffer, completion),
                    Command::Discard => (functions.rbd_aio_discard)(image, off, len, completion),
                    Command::Zero { allocated } => {
                        let len = usize::try_from(len).unwrap_or(usize::MAX);
                        let thick = c_int::from(allocated);
                        (functions.rbd_aio_write_zeroes)(image, off, len, completion, thick, 0)
                    }
                    Command::Flush => (functions.rbd_aio_flush)(image, completion),
                };
                if begun < 0 {
                    (functions.rbd_aio_release)(completion);
                }
                begun
            }
        };
        if result < 0 {
            // SAFETY: the library has not taken it.
            let Pending { finish, bytes, .. } = *unsafe { Box::from_raw(pending) };
            finish(result as isize, bytes);
        }
    }

    /// Ranges that may hold other bytes than zeroes, within a range. First which objects there are, which the
    /// image's object map knows; then what these hold, which they are asked.
    pub(crate) fn stored(&self, offset: u64, len: u64) -> Result<Vec<(u64, u64)>, Errno> {
        let mut all = Vec::new();
        for (offset, len) in self.changed(offset, len, true)? {
            all.extend(self.changed(offset, len, false)?);
        }
        Ok(all)
    }

    /// Ranges that were written since there was nothing, neighbours as one.
    fn changed(&self, offset: u64, len: u64, whole_objects: bool) -> Result<Vec<(u64, u64)>, Errno> {
        extern "C" fn on_extent(offset: u64, len: usize, exists: c_int, all: *mut c_void) -> c_int {
            // SAFETY: the list of `changed`, which waits for this call.
            let all = unsafe { &mut *all.cast::<Vec<(u64, u64)>>() };
            match all.last_mut() {
                _ if exists == 0 => {}
                Some((from, before)) if *from + *before == offset => *before += len as u64,
                _ => all.push((offset, len as u64)),
            }
            0
        }
        let mut all: Vec<(u64, u64)> = Vec::new();
        // SAFETY: a handle of ours; the list is used by `on_extent` alone until this returns.
        said(unsafe {
            let list = (&raw mut all).cast();
            let diff = self.functions().rbd_diff_iterate2;
            diff(self.handle, null(), offset, len, 1, whole_objects.into(), on_extent, list)
        })?;
        Ok(all)
    }

    /// Takes the lock for writing, which is not handed over to others.
    pub(crate) fn lock(&self) -> Result<(), Errno> {
        // SAFETY: a handle of ours.
        said(unsafe { (self.functions().rbd_lock_acquire)(self.handle, EXCLUSIVE) })
    }

    pub(crate) fn unlock(&self) -> Result<(), Errno> {
        // SAFETY: a handle of ours.
        said(unsafe { (self.functions().rbd_lock_release)(self.handle) })
    }

    /// Whether it has the lock now.
    pub(crate) fn has_lock(&self) -> Result<bool, Errno> {
        let mut has = 0;
        // SAFETY: a handle of ours, and a place for a number.
        said(unsafe { (self.functions().rbd_is_exclusive_lock_owner)(self.handle, &raw mut has) })?;
        Ok(has != 0)
    }

    /// Who has the lock: the address of a client.
    pub(crate) fn owner(&self) -> Result<Option<String>, Errno> {
        let (mut mode, mut owners, mut count) = (0, [null_mut::<c_char>(); 8], 8);
        // SAFETY: a handle of ours, and places for that many strings, which are freed by the library.
        unsafe {
            let result = (self.functions().rbd_lock_get_owners)(
                self.handle,
                &raw mut mode,
                owners.as_mut_ptr(),
                &raw mut count,
            );
            match said(result) {
                Err(libc::ENOENT) => return Ok(None),
                other => other?,
            }
            let first = owners.first().filter(|owner| count > 0 && !owner.is_null());
            let first = first.map(|owner| CStr::from_ptr(*owner).to_string_lossy().into_owned());
            (self.functions().rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count);
            Ok(first)
        }
    }

    /// Takes the lock from another client, which can write nothing more to the cluster then.
    pub(crate) fn take_from(&self, owner: &str) -> Result<(), Errno> {
        let owner = text(owner)?;
        // SAFETY: a handle of ours, and a string.
        said(unsafe { (self.functions().rbd_lock_break)(self.handle, EXCLUSIVE, owner.as_ptr()) })
    }

    /// The addresses of those who have it open for writing.
    pub(crate) fn watchers(&self) -> Result<Vec<String>, Errno> {
        let mut count = 64;
        let mut found: Vec<Watcher> =
            (0..count).map(|_| Watcher { address: null_mut(), id: 0, cookie: 0 }).collect();
        // SAFETY: a handle of ours, and that many places, whose strings are freed by the library.
        unsafe {
            said((self.functions().rbd_watchers_list)(self.handle, found.as_mut_ptr(), &raw mut count))?;
            let all = found.iter().take(count).filter(|watcher| !watcher.address.is_null());
            let all =
                all.map(|watcher| CStr::from_ptr(watcher.address).to_string_lossy().into_owned()).collect();
            (self.functions().rbd_watchers_list_cleanup)(found.as_mut_ptr(), count);
            Ok(all)
        }
    }
}

#[derive(Clone, Copy)]
enum Command {
    Read,
    Write,
    Discard,
    Zero { allocated: bool },
    Flush,
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: a handle of ours, which nothing uses any more.
        let _ = unsafe { (self.functions().rbd_close)(self.handle) };
    }
}
