//! Whether a device shows exactly the bytes of an image.
//! It reads both once, from the beginning, and stops at the first difference, or when neither responds any
//! more.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use becket_image::{Opened, ReadAt};
use becket_transport::aside::begun;

use crate::contract::{DeviceInfo, Error, ErrorKind};

/// Called with how many bytes of how many have been compared.
pub type Progress<'a> = dyn FnMut(u64, u64) + 'a;

const PIECE: usize = 1 << 20;
/// Longest that one piece may take.
const ANSWER: Duration = Duration::from_secs(10);

/// How an image is not what the device shows at this moment, which must be read-only.
pub(super) fn difference(
    info: &DeviceInfo,
    opened: &Opened,
    progress: &mut Progress<'_>,
) -> Result<Option<String>, Error> {
    let len = opened.map.len();
    if len != info.size {
        return Ok(Some(format!("has {len} bytes instead of {}", info.size)));
    }
    let range = opened.map.single_range();
    let source = range.and_then(|(source, offset, _)| Some((opened.sources.get(source as usize)?, offset)));
    let (Some((source, offset)), Ok(device)) = (source, File::open(&info.device)) else {
        return Ok(Some("cannot be compared with it".to_owned()));
    };
    let copy = source.reader().map_err(Error::io("read", &opened.path))?;
    let silent = || Error::Failed {
        kind: ErrorKind::Timeout,
        message: format!(
            "{} is in use, and cannot be compared with {}: one of them gave no byte for {} s",
            info.device.display(),
            opened.path.display(),
            ANSWER.as_secs()
        ),
        hint: Some(
            "end its users first, then nothing is compared; or try again when both can be read".to_owned(),
        ),
    };
    // Aside: the image that the device is to lose may be one that does not answer.
    let (tell, reported) = channel();
    let compared = begun(move || {
        first_difference((&device, 0), (&*copy, offset), len, &mut |done, all| {
            // Who listened may have given up.
            let _ = tell.send((done, all));
        })
    });
    loop {
        match reported.recv_timeout(ANSWER) {
            Ok((done, all)) => progress(done, all),
            Err(RecvTimeoutError::Timeout) => return Err(silent()),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    match compared.recv().map_err(|_| silent())? {
        Ok(at) => Ok(at.map(|at| format!("differs from it at byte {at}"))),
        Err((of_device, error)) => {
            let path: &Path = if of_device { &info.device } else { &opened.path };
            Err(Error::io("read", path)(error))
        }
    }
}

/// Where two files first differ, each from an offset on, within `len` bytes. An error says whether the first
/// file failed.
fn first_difference(
    (a, a_at): (&File, u64),
    (b, b_at): (&dyn ReadAt, u64),
    len: u64,
    progress: &mut Progress<'_>,
) -> Result<Option<u64>, (bool, std::io::Error)> {
    let mut pieces = (vec![0; PIECE], vec![0; PIECE]);
    let mut done = 0;
    while done < len {
        progress(done, len);
        let piece = usize::try_from(len - done).map_or(PIECE, |left| left.min(PIECE));
        let (ours, theirs) = (&mut pieces.0[..piece], &mut pieces.1[..piece]);
        a.read_exact_at(ours, a_at + done).map_err(|error| (true, error))?;
        b.read_at(theirs, b_at + done).map_err(|error| (false, error))?;
        if let Some(at) = ours.iter().zip(&*theirs).position(|(ours, theirs)| ours != theirs) {
            return Ok(Some(done + at as u64));
        }
        done += piece as u64;
    }
    progress(len, len);
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_found_wherever_it_is() {
        let len = 2 * PIECE as u64 + 512;
        let file = |offset: u64, at: Option<u64>| {
            let file = tempfile::tempfile().unwrap();
            file.set_len(offset + len).unwrap();
            at.inspect(|at| file.write_all_at(b"x", offset + at).unwrap());
            file
        };
        let plain = file(0, None);
        let differ = |at| {
            let mut reported = Vec::new();
            let other = file(4096, at);
            let found = first_difference((&plain, 0), (&other, 4096), len, &mut |done, all| {
                reported.push((done, all))
            });
            assert!(reported.is_sorted() && reported.iter().all(|(_, all)| *all == len), "{reported:?}");
            (found.unwrap(), reported.last().copied())
        };
        assert_eq!(differ(None), (None, Some((len, len))));
        for at in [0, PIECE as u64 - 1, PIECE as u64, len - 1] {
            assert_eq!(differ(Some(at)).0, Some(at));
        }
        let short = tempfile::tempfile().unwrap();
        assert!(first_difference((&plain, 0), (&short, 0), len, &mut |_, _| {}).is_err_and(|(a, _)| !a));
    }
}
