//! What would be done, and why a device is as it is: attach and detach up to the first thing that changes
//! anything.
//! It creates no device, no file and no record, and fetches of a remote image only what opening it needs.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use becket_image::{OpenOptions, Opened, SourceFacts};
use becket_transport::Kind;
use serde::{Deserialize, Serialize};

use crate::client::attach::prepare;
use crate::client::detach::{not_ours, server_status, users_at};
use crate::client::list::resolve;
use crate::client::{planner, unrecorded};
use crate::contract::messages::{Foresee, Nothing};
use crate::contract::portion::Portion;
use crate::contract::shape::{self, has_disk};
use crate::contract::spec::{Spec, facts_of};
use crate::contract::{AttachOptions, Choice, DataMode, DeviceInfo, DeviceState, Error, ErrorKind, User};
use crate::control::client;
use crate::control::health::Concerns;
use crate::record::device::Device;
use crate::record::links;
use crate::record::runtime::Runtime;
use crate::record::store::{self, Store};
use crate::system::describe::unasked_read_only;
use crate::system::sync::lock;

/// What an attach would make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Foreseen {
    /// The name that was asked for.
    pub name: Option<String>,
    /// The file that holds the image.
    #[serde(with = "crate::contract::path_text::one")]
    pub image: PathBuf,
    /// The URL that it is fetched from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// How it would be offered.
    pub transport: Kind,
    /// Why.
    pub reason: String,
    /// What each transport says, the preferred ones first.
    pub choices: Vec<Choice>,
    /// Length in bytes.
    pub size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Writes would be refused.
    pub read_only: bool,
    /// Its partition devices: number, first byte and length.
    pub partitions: Vec<ForeseenPartition>,
    /// Blocks of it would be decoded while they are read.
    pub decoded: bool,
    /// A process of its own would serve it.
    pub isolated: bool,
    /// becket's server would be started for it.
    pub starts_server: bool,
    /// The overlay that would take what is written.
    #[serde(with = "crate::contract::path_text::maybe")]
    pub cow: Option<PathBuf>,
    /// That overlay would be created.
    pub creates_cow: bool,
    /// What the user should know although it would go well.
    pub warnings: Vec<String>,
}

/// A partition of a device that is not there yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForeseenPartition {
    /// Its number in the table, from 1.
    pub number: u32,
    /// Where it begins on the device, in bytes.
    pub start: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Its label in the table.
    pub label: Option<String>,
}

/// What the images of one command would have, each of which excludes others as its device would.
#[derive(Debug, Default)]
pub struct Rehearsal(Mutex<Vec<Taken>>);

/// What a device would have that is not made.
#[derive(Debug)]
struct Taken {
    /// An overlay that would be created.
    overlay: Option<PathBuf>,
    portion: Option<Portion>,
    /// It does not mind who else has its portion.
    shared: bool,
    /// Its locks keep others out.
    opened: Opened,
}

impl Rehearsal {
    /// What [`crate::attach`] would make of the image at `image`, after those that were foreseen before. Only
    /// the making of a device can show that the kernel refuses it.
    ///
    /// # Errors
    /// As [`crate::attach`], as far as it can be known.
    pub fn foresee(&self, image: &Path, options: &AttachOptions) -> Result<Foreseen, Error> {
        let (foreseen, taken) = foresee(image, options)?;
        let mut all = lock(&self.0);
        all.iter().try_for_each(|other| taken.beside(other))?;
        all.push(taken);
        Ok(foreseen)
    }
}

impl Taken {
    /// Refuses what both would have. The locks of their files have been asked for before.
    fn beside(&self, other: &Taken) -> Result<(), Error> {
        let overlay = self.overlay.as_ref().filter(|overlay| other.overlay.as_ref() == Some(*overlay));
        let portion = self.portion.as_ref().zip(other.portion.as_ref());
        let image =
            portion.filter(|(one, other)| !self.shared && one.clashes(other)).map(|_| &self.opened.path);
        match overlay.or(image) {
            Some(path) => {
                let clash = "another image of this command has it".to_owned();
                Err(Error::Image(becket_image::Error::InUse { path: path.clone(), clash, readers: false }))
            }
            None => Ok(()),
        }
    }
}

fn foresee(image: &Path, options: &AttachOptions) -> Result<(Foreseen, Taken), Error> {
    let store = Store::open(Runtime::open()?)?;
    if let Some(name) = &options.name {
        store::check_name(name)?;
        if let Ok(device) = resolve(&store, Path::new(name))
            && device.info.name == *name
        {
            let (image, device) = (Some(device.info.spec.image), Some(device.info.device));
            return Err(Error::NameInUse { name: name.clone(), image, device });
        }
    }
    let mut options = options.clone();
    options.open.rehearsal = true;
    let creates_cow = options.open.cow.as_ref().is_some_and(|cow| !options.open.read_only && !cow.exists());
    let opened = prepare(&store, image, &mut options, false, false)?;
    if let Some(name) = &options.name {
        links::are_free(&store, name, opened.partitions.iter().map(|partition| partition.number))?;
    }
    let plan = planner::plan_for(&opened, &options, false).map_err(|error| error.of_image(image))?;
    let portion = Portion::of(&opened.sources, &opened.map, &opened.path);
    if let Some(portion) = portion.clone().filter(|_| !options.open.shared) {
        let asked = Foresee { image: opened.path.clone(), portion };
        match client::call_running::<_, Nothing>(store.runtime(), "Foresee", &asked, Concerns::Server) {
            Err(error) if error.kind() == ErrorKind::InUse => return Err(error),
            // An older server does not know the question.
            _ => {}
        }
    }
    let served = plan.kind.is_served();
    let talkative = facts_of(&opened.sources).iter().any(SourceFacts::is_talkative);
    let block = u64::from(opened.block_size.max(1));
    let mut warnings = opened.warnings.clone();
    warnings.extend(unasked_read_only(opened.read_only_reason.as_deref(), &options));
    let part = |part: &becket_image::Partition| ForeseenPartition {
        number: part.number,
        start: part.start,
        size: part.len,
        label: part.label.clone(),
    };
    let foreseen = Foreseen {
        name: options.name.clone(),
        image: opened.path.clone(),
        url: options.spec.url.clone(),
        transport: plan.kind,
        reason: plan.reason,
        choices: planner::choices(&opened, &options, false),
        size: opened.map.len() / block * block,
        block_size: opened.block_size,
        read_only: opened.read_only,
        partitions: opened.partitions.iter().map(part).collect(),
        decoded: !opened.encoded.is_empty(),
        isolated: served && (options.isolate || talkative),
        starts_server: served && server_status()?.is_none(),
        cow: opened.overlay.as_ref().map(|overlay| overlay.path.clone()),
        creates_cow,
        warnings,
    };
    let overlay = foreseen.cow.clone().filter(|_| creates_cow);
    let shared = options.open.shared;
    Ok((foreseen, Taken { overlay, portion, shared, opened }))
}

/// What would become of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaving {
    /// The device's name.
    pub name: String,
    /// Its node.
    #[serde(with = "crate::contract::path_text::one")]
    pub device: PathBuf,
    /// What would be done.
    pub outcome: Outcome,
    /// What uses it now, as far as this user may see.
    pub users: Vec<User>,
}

/// What would be done to a device that is to be detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It would go.
    Detached,
    /// It would go when its last user closes it.
    DetachedLater,
    /// It would stay, because it is in use.
    Refused,
}

/// What [`crate::detach`] would do.
///
/// # Errors
/// There is no such device.
pub fn foresee_detach(target: impl AsRef<Path>, lazy: bool) -> Result<Leaving, Error> {
    let store = Store::open(Runtime::open()?)?;
    let info = match resolve(&store, target.as_ref()) {
        Err(none @ Error::NoDevice { .. }) => unrecorded::find(store.runtime().links(), target.as_ref())
            .ok_or_else(|| not_ours(none, target.as_ref()))?,
        found => found?.info,
    };
    // A detach waits as long for programs that merely have it open.
    let users = users_at(&store, &info, !lazy);
    let outcome = match users.is_empty() {
        true => Outcome::Detached,
        false if lazy => Outcome::DetachedLater,
        false => Outcome::Refused,
    };
    Ok(Leaving { name: info.name, device: info.device, outcome, users })
}

/// Why a device is offered as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    /// The device's name.
    pub name: String,
    /// Its node.
    #[serde(with = "crate::contract::path_text::one")]
    pub device: PathBuf,
    /// How it is offered.
    pub transport: Kind,
    /// Why, as it was when the device was attached.
    pub reason: String,
    /// What each transport would say if it were attached now, the preferred ones first. None is asked about
    /// what is no block device.
    pub choices: Vec<Choice>,
    /// Why the image is not part of that answer, where it is not.
    pub note: Option<String>,
    /// The image is accessed past the page cache.
    pub direct_io: bool,
    /// Why, or why not.
    pub direct_io_reason: String,
    /// What would make it faster.
    pub faster: Vec<Advice>,
}

/// One thing that would make a device faster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advice {
    /// What costs time.
    pub what: String,
    /// What changes that.
    pub fix: Option<String>,
}

/// Why the device is as it is that goes by a NAME, a path under /dev, or the path of its image. Its image is
/// opened for reading only, and never fetched.
///
/// # Errors
/// There is none, or more than one.
pub fn why(target: impl AsRef<Path>) -> Result<Why, Error> {
    let store = Store::open(Runtime::open()?)?;
    let device = resolve(&store, target.as_ref())?;
    let info = &device.info;
    let (mut choices, decoded, mut note) = now(&device);
    let mut faster = Vec::new();
    if has_disk(info.transport) {
        let preferred = choices.iter().take_while(|choice| choice.transport != info.transport);
        faster.extend(preferred.filter_map(|choice| other_transport(info, choice)));
    } else {
        // Its user has chosen how it is reached.
        (choices, note) = (Vec::new(), None);
    }
    faster.extend(of_the_way(info));
    if decoded {
        let image = info.spec.title();
        faster.push(Advice {
            what: "blocks of the image are decoded when they are read".to_owned(),
            fix: Some(format!(
                "becket copy {image} FILE, and {} that; it takes more room",
                info.making().command
            )),
        });
    }
    Ok(Why {
        name: info.name.clone(),
        device: info.device.clone(),
        transport: info.transport,
        reason: info.spec.reason.clone(),
        choices,
        note,
        direct_io: info.direct_io,
        direct_io_reason: info.direct_io_reason.clone(),
        faster,
    })
}

/// What the transports would say now, whether the image has encoded blocks, and why that is not known.
fn now(device: &Device) -> (Vec<Choice>, bool, Option<String>) {
    let info = &device.info;
    if let Some(why) = elsewhere(info) {
        let choices = planner::choices_of_machine(Some(why));
        return (choices, false, Some("the image is elsewhere and was not opened for this".to_owned()));
    }
    match opened(device) {
        Ok((opened, options)) => {
            // The kernel's own drivers had such a device from `run` or `mount`, which hold it open.
            let leased = info.spec.autoclear && !info.transport.is_served();
            (planner::choices(&opened, &options, leased), !opened.encoded.is_empty(), None)
        }
        Err(error) => {
            (planner::choices_of_machine(None), false, Some(format!("the image cannot be opened: {error}")))
        }
    }
}

/// Whether bytes are fetched from there; a local file that was decoded is named by its path.
fn is_remote(url: &str) -> bool {
    url.contains("://")
}

/// Why only becket can serve an image that is on no file system of this host.
fn elsewhere(info: &DeviceInfo) -> Option<&'static str> {
    if info.spec.url.as_deref().is_some_and(is_remote) {
        return Some(
            "bytes of the image are fetched when they are read, and the kernel cannot wait for them",
        );
    }
    becket_image::is_remote(&info.spec.image)
        .then_some("the image is on a server, which the kernel cannot ask")
}

/// The image again, for reading and beside its users, and the options that matter to transports.
fn opened(device: &Device) -> Result<(Opened, AttachOptions), Error> {
    let spec = &device.info.spec;
    let format = device.format.as_deref().and_then(|format| format.parse().ok()).unwrap_or_default();
    let open = OpenOptions {
        read_only: true,
        shared: true,
        rehearsal: true,
        offset: spec.offset,
        block_size: Some(spec.block_size),
        cow: spec.cow.clone(),
        format,
        ..OpenOptions::default()
    };
    let mut opened = becket_image::open_partly(&spec.image, &open).map_err(Error::Image)?;
    opened.read_only = spec.read_only;
    // What is in a container, and no image inside another, gets room while it is written.
    let container = opened.nested && spec.image.exists();
    opened.grows = !spec.read_only && (container || spec.cow.is_some());
    // The record says what the device was given of these, and not what was asked for.
    let asked = Spec { queues: None, depth: None, mode: None, ..spec.clone() };
    Ok((opened, AttachOptions { spec: asked, open, ..AttachOptions::default() }))
}

/// What a transport that becket prefers to the device's own would need.
fn other_transport(info: &DeviceInfo, choice: &Choice) -> Option<Advice> {
    let Choice { transport, possible, reason, fix } = choice;
    if *possible {
        let again = info.again(" without --via");
        return Some(Advice { what: format!("{transport} can take it by now"), fix: Some(again) });
    }
    let what = format!("becket would prefer {transport}, but {reason}");
    fix.as_ref().map(|fix| Advice { what, fix: Some(fix.clone()) })
}

/// What its own way of moving bytes costs.
fn of_the_way(info: &DeviceInfo) -> Vec<Advice> {
    let mut advice = Vec::new();
    let mut add = |what: String, fix: Option<String>| advice.push(Advice { what, fix });
    if !info.direct_io {
        add(format!("direct I/O is off: {}", info.direct_io_reason), None);
    }
    // What comes from a server is in becket's own memory first.
    let copied = matches!(info.spec.mode, Some(DataMode::Copy | DataMode::BatchCopy))
        && !becket_image::is_remote(&info.spec.image);
    if let Some(instead) = shape::of(info.transport).copies.filter(|_| copied) {
        add(format!("data is copied between the kernel and becket; {instead}"), None);
    }
    if info.spec.faults.is_some() {
        let fix = info.again(" without --fault");
        add("faults are injected for testing".to_owned(), Some(fix));
    }
    if let Some(url) = info.spec.url.as_ref().filter(|url| is_remote(url)) {
        let fix = format!("becket store prefetch {url}");
        add("bytes that are not in the store are fetched when they are read".to_owned(), Some(fix));
    }
    if let Some(away) = &info.away {
        add(format!("requests wait: {away}"), None);
    }
    if info.state != DeviceState::Live {
        add(format!("its state is: {}", info.state), Some("becket list".to_owned()));
    }
    advice
}
