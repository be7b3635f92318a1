//! becket over block devices: if a test needs a block device, it gets a plain loop device over each image,
//! made by `losetup`.
//! Must never hide the device below from becket: only tests that check image paths see the file instead.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};

use crate::bench::PlainLoop;
use crate::command;
use crate::driver::{Attach, Becket, Driver, Info};

/// An image, the loop device over it, and becket's devices over that.
struct Stack {
    image: PathBuf,
    below: PlainLoop,
    devices: Vec<PathBuf>,
}

/// The `becket` command, given loop devices instead of images.
pub(crate) struct Stacked {
    becket: Becket,
    stacks: Mutex<Vec<Stack>>,
}

impl Stacked {
    pub(crate) fn new(becket: Becket) -> Self {
        Self { becket, stacks: Mutex::default() }
    }

    fn stacks(&self) -> MutexGuard<'_, Vec<Stack>> {
        // A test that panicked changed nothing halfway.
        self.stacks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a device, and with the last one of a loop device that device too.
    fn forget(&self, device: &Path) {
        self.stacks().retain_mut(|stack| {
            let before = stack.devices.len();
            stack.devices.retain(|other| other != device);
            before == stack.devices.len() || !stack.devices.is_empty()
        });
    }
}

fn with_image(stacks: &[Stack], info: Info) -> Info {
    let stack = stacks.iter().find(|stack| stack.below.0 == info.image);
    Info { image: stack.map_or(info.image, |stack| stack.image.clone()), ..info }
}

impl Driver for Stacked {
    fn is_becket(&self) -> bool {
        true
    }

    fn attach(&self, image: &Path, options: &Attach) -> Result<Info> {
        let mut stacks = self.stacks();
        // Twice the same image is twice the same block device.
        let known = stacks.iter().position(|stack| stack.image == image);
        let fresh = match known {
            Some(_) => None,
            None => Some(PlainLoop::with_blocks(image, options.block_size)?),
        };
        let below = known.and_then(|at| stacks.get(at)).map(|stack| &stack.below).or(fresh.as_ref());
        let below = below.context("a loop device is below")?.0.clone();
        let info = self.becket.attach(&below, options)?;
        let device = info.device.clone();
        match (known.and_then(|at| stacks.get_mut(at)), fresh) {
            (Some(stack), _) => stack.devices.push(device),
            (None, Some(below)) => {
                stacks.push(Stack { image: image.to_owned(), below, devices: vec![device] });
            }
            (None, None) => {}
        }
        Ok(with_image(&stacks, info))
    }

    fn detach(&self, target: &Path) -> Result<()> {
        self.becket.detach(target)?;
        self.forget(target);
        Ok(())
    }

    fn abandon(&self, target: &Path) -> Result<()> {
        self.becket.abandon(target)?;
        // The loop device, too, goes with its last user.
        self.forget(target);
        Ok(())
    }

    fn list(&self) -> Result<Vec<Info>> {
        let devices = self.becket.list()?;
        let stacks = self.stacks();
        Ok(devices.into_iter().map(|info| with_image(&stacks, info)).collect())
    }

    fn refresh(&self, target: &Path) -> Result<()> {
        for stack in self.stacks().iter().filter(|stack| stack.devices.iter().any(|device| device == target))
        {
            let mut losetup = command::command(&["losetup", "--set-capacity"]);
            losetup.arg(&stack.below.0);
            command::succeed(losetup)?;
        }
        self.becket.refresh(target)
    }

    fn set(&self, target: &Path, words: &[&str]) -> Result<()> {
        self.becket.set(target, words)
    }

    fn set_direct_io(&self, target: &Path, mode: &str) -> Result<()> {
        self.becket.set_direct_io(target, mode)
    }

    fn records(&self) -> Option<PathBuf> {
        self.becket.records()
    }
}
