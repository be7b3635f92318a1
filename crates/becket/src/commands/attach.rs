//! `becket attach IMAGE...`: many images at once, one device path a line in the order given.
//! Never detaches what worked because something else failed.

use super::common;
use crate::{args, failure::Failure, ui::Ui};
use becket_device::{AttachOptions, DeviceInfo};
use serde_json::{Value, json};
use std::{
    path::PathBuf,
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

/// Attaching waits for the kernel more than it computes: more threads than CPUs, but not one per image.
const THREADS: usize = 16;

type Outcome = Result<DeviceInfo, Failure>;

pub(crate) fn run(ui: &Ui, args: &args::Attach) -> Result<u8, Failure> {
    if args.device.name.is_some() && args.images.len() > 1 {
        return Err(Failure::usage("one --name cannot name several devices")
            .hint("attach the images one by one, or leave --name away"));
    }
    let options = common::options(&args.device);
    let mut devices = Vec::new();
    let mut failures = Vec::new();
    let mut printed = Ok(());
    in_parallel(&args.images, &options, |image, outcome| match outcome {
        Ok(info) => {
            ui.explain(&info);
            if !ui.json && printed.is_ok() {
                printed = ui.line(info.device.display().to_string());
            }
            devices.push(info);
        }
        Err(failure) => {
            ui.failure(&failure);
            failures.push((image.clone(), failure));
        }
    });
    printed?;
    if ui.json {
        let errors: Vec<Value> = failures
            .iter()
            .map(|(image, failure)| {
                let mut error = failure.to_json();
                error["image"] = json!(image.display().to_string());
                error
            })
            .collect();
        // The shape is one for one image and for many.
        ui.value(&json!({ "devices": devices, "errors": errors }))?;
    }
    Ok(u8::from(!failures.is_empty()))
}

/// Attaches all images and tells the outcomes in the order of the images, each as soon as it is its turn.
fn in_parallel(images: &[PathBuf], options: &AttachOptions, mut tell: impl FnMut(&PathBuf, Outcome)) {
    let attach = |image: &PathBuf| {
        becket_device::attach(image, options)
            .map_err(|error| Failure::device("attach", image.display(), &error))
    };
    if let [image] = images {
        return tell(image, attach(image));
    }
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..THREADS.min(images.len()) {
            let (sender, next, attach) = (sender.clone(), &next, &attach);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(image) = images.get(index) else { return };
                    // The receiver lives until all senders are gone.
                    let _ = sender.send((index, attach(image)));
                }
            });
        }
        drop(sender);
        let mut waiting: Vec<Option<Outcome>> = images.iter().map(|_| None).collect();
        let mut turn = 0;
        for (index, outcome) in receiver {
            if let Some(place) = waiting.get_mut(index) {
                *place = Some(outcome);
            }
            while let Some((image, outcome)) =
                images.get(turn).zip(waiting.get_mut(turn).and_then(Option::take))
            {
                tell(image, outcome);
                turn += 1;
            }
        }
    });
}
