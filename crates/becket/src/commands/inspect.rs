//! `becket inspect IMAGE`: what is inside, and inside what is inside, as a tree.
//! Never attaches or changes anything.

use super::{common, fetched};
use crate::{args, failure::Failure, ui::Ui, units::format_size};
use becket_image::{End, Error, Format, Inspected, LayerError};
use std::collections::BTreeMap;

/// What is said of a file that can only be decoded from its start.
const IN_ONE_PIECE: &str = "compressed as one piece: attach, ls, cat and others decode it into the store";

pub(crate) fn run(ui: &Ui, args: &args::Inspect) -> Result<u8, Failure> {
    let (path, asked) = (&args.look.path, &args.look.options);
    let local = fetched::as_it_is(path, asked, "inspect")?;
    let (mut stream, mut unread) = (false, None);
    let walk = match common::look_at(&local, asked, asked.format) {
        // What becket does not read is named all the same, and the command that converts it.
        Err(
            error @ Error::Layer {
                source: LayerError::Foreign { .. } | LayerError::Sequential { .. }, ..
            },
        ) => {
            stream = becket_fetch::decodes(&error);
            common::look_at(&local, asked, Format::Raw)
        }
        // So is a container that it reads, but not all of them.
        Err(error @ Error::Layer { source: LayerError::Unsupported(_), .. }) => {
            unread = Some(error.to_string());
            common::look_at(&local, asked, Format::Raw)
        }
        walk => walk,
    };
    let walk = walk.map_err(|error| common::image_failure("inspect", &args.look.path, error))?;
    let (index, level) =
        walk.named().map_err(|error| common::image_failure("inspect", &args.look.path, error))?;
    if walk.end != End::Image {
        let error = Error::NotAnImage { path: args.look.path.clone(), what: "a directory" };
        return Err(common::image_failure("inspect", &args.look.path, error)
            .hint("see what is in it: becket ls PATH"));
    }
    let format = if unread.is_some() { Format::Auto } else { args.look.format_of(index + 1) };
    let mut reported = becket_image::inspect(&level.image, &level.path, format);
    if let Some(unread) = unread {
        reported.problems = vec![unread];
    }
    if stream && index == 0 {
        reported.problems.clear();
        reported.about.notes.push(IN_ONE_PIECE.to_owned());
    }
    if ui.json {
        ui.document(&BTreeMap::from([("image", reported)]))?;
        return Ok(0);
    }
    let mut lines = Vec::new();
    tree(&reported, "", "", &mut lines);
    ui.lines(lines)?;
    Ok(0)
}

/// Adds the lines of an image: its own behind `first`, all others behind `rest`.
fn tree(image: &Inspected, first: &str, rest: &str, lines: &mut Vec<String>) {
    lines.push(format!("{first}{}", line(image)));
    let more = if image.children.is_empty() { "   " } else { "│  " };
    lines.extend(image.problems.iter().map(|problem| format!("{rest}{more}! {problem}")));
    let last = image.children.len().saturating_sub(1);
    for (index, child) in image.children.iter().enumerate() {
        let (own, below) = if index == last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        tree(child, &format!("{rest}{own}"), &format!("{rest}{below}"), lines);
    }
}

/// An image in one line.
fn line(image: &Inspected) -> String {
    let about = &image.about;
    let mut words = vec![image.name.clone(), about.format.to_owned(), format_size(image.size)];
    let text = |text: &String| becket_image::shown(text.as_bytes());
    if let Some(stored) = &image.stored {
        words.push(format!("in {} ({})", stored.format, stored.notes.join(", ")));
    }
    words.extend(image.partition_type_name.map(|name| format!("({name})")));
    words.extend(image.partition_label.as_ref().map(|label| format!("\"{label}\"")));
    words.extend(about.label.as_ref().map(|label| format!("label {}", text(label))));
    words.extend(about.uuid.as_ref().map(|uuid| format!("UUID {}", text(uuid))));
    words.extend(about.compression.map(|compression| format!("compressed with {compression}")));
    words.extend(about.notes.iter().cloned());
    if image.encoded > 0 {
        words.push(format!("{} % stored compressed", image.encoded.saturating_mul(100) / image.size.max(1)));
    } else if image.extents > 1 {
        words.push(format!("in {} pieces", image.extents));
    }
    words.join("  ")
}
