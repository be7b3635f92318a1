//! `becket map IMAGE`: where its bytes are, as a table, JSON or a picture.
//! Never attaches or changes anything.

use super::{common, map_svg};
use crate::{
    args,
    failure::Failure,
    ui::{Ui, table},
    units::format_size,
};
use becket_image::{End, Extent, Image, Level, Place, layer::detect};
use serde_json::{Value, json};

/// Extents that a table for people has; more are counted.
const ROWS_MAX: usize = 1000;

pub(crate) fn run(ui: &Ui, args: &args::Map) -> Result<u8, Failure> {
    let path = &args.look.path;
    let walk = common::look(path, args.look.format, "map")?;
    let level = walk.last().map_err(|error| common::image_failure("map", path, error))?;
    if walk.end != End::Image {
        let error = becket_image::Error::NotAnImage { path: path.clone(), what: "a directory" };
        return Err(common::image_failure("map", path, error).hint("see what is in it: becket ls PATH"));
    }
    if let Some(file) = &args.svg {
        let bars: Vec<map_svg::Bar<'_>> = walk
            .levels
            .iter()
            .map(|level| map_svg::Bar { level, format: format(level, args.look.format_of(1)) })
            .collect();
        std::fs::write(file, map_svg::draw(&bars))
            .map_err(|error| Failure::io(format!("cannot write {}", file.display()), &error))?;
    }
    if ui.json {
        let levels: Vec<Value> = walk.levels.iter().map(|level| summary(level, args)).collect();
        ui.value(&json!({
            "image": level.path,
            "size": level.image.len(),
            "levels": levels,
            "extents": level.image.map().extents().iter().map(|extent| entry(&level.image, extent)).collect::<Vec<_>>(),
        }))?;
        return Ok(0);
    }
    if args.svg.is_some() {
        return Ok(0);
    }
    let extents = level.image.map().extents();
    let head = ["START", "LENGTH", "KIND", "IN", "AT"].map(str::to_owned).to_vec();
    let rows: Vec<Vec<String>> = std::iter::once(head)
        .chain(extents.iter().take(ROWS_MAX).map(|extent| row(&walk.levels, &level.image, extent)))
        .collect();
    ui.line(table(&rows, &[0, 1, 4]).trim_end())?;
    if extents.len() > ROWS_MAX {
        ui.note(format!("{} more; --json has them all", extents.len() - ROWS_MAX));
    }
    Ok(0)
}

/// What kind of bytes an extent has, and for encoded ones how.
fn kind(image: &Image, extent: &Extent) -> String {
    match extent.place {
        Place::Data { .. } => "data".to_owned(),
        Place::Zero => "zero".to_owned(),
        Place::Encoded { layer, .. } => {
            let layer = usize::try_from(layer).ok().and_then(|layer| image.encoded().nth(layer));
            layer.map_or_else(|| "encoded".to_owned(), |layer| layer.codec().to_string())
        }
    }
}

fn row(levels: &[Level], image: &Image, extent: &Extent) -> Vec<String> {
    let host = levels.first().map(|level| level.path.clone()).unwrap_or_default();
    let (place, at) = match extent.place {
        Place::Data { offset, .. } => (host, offset.to_string()),
        Place::Zero => ("-".to_owned(), "-".to_owned()),
        Place::Encoded { layer, offset } => (format!("layer {layer}"), offset.to_string()),
    };
    vec![extent.start.to_string(), format_size(extent.len), kind(image, extent), place, at]
}

fn entry(image: &Image, extent: &Extent) -> Value {
    let mut entry = json!({ "start": extent.start, "len": extent.len, "kind": kind(image, extent) });
    match extent.place {
        Place::Data { file, offset } => {
            entry["file"] = json!(file);
            entry["offset"] = json!(offset);
        }
        Place::Zero => {}
        Place::Encoded { layer, offset } => {
            entry["layer"] = json!(layer);
            entry["offset"] = json!(offset);
        }
    }
    entry
}

fn summary(level: &Level, args: &args::Map) -> Value {
    json!({
        "path": level.path,
        "size": level.image.len(),
        "format": format(level, args.look.format_of(1)),
        "extents": level.image.map().extents().len(),
    })
}

/// What an image on the way is; the last one has not been looked at yet.
fn format(level: &Level, format: becket_image::Format) -> &'static str {
    match &level.contents {
        Some(contents) => contents.about().format,
        // What is damaged can be mapped all the same.
        None => detect(&level.image, format).map_or("damaged", |contents| contents.about().format),
    }
}
