//! Layouts, and replies that no kernel would send.
//! Nothing here needs a device-mapper.

use std::mem::offset_of;
use std::os::fd::AsFd;

use super::*;

#[test]
fn structures_and_numbers_are_those_of_c() {
    assert_eq!(size_of::<DmIoctl>(), 312);
    assert_eq!(offset_of!(DmIoctl, data_start), 16);
    assert_eq!(offset_of!(DmIoctl, flags), 28);
    assert_eq!(offset_of!(DmIoctl, event_nr), 32);
    assert_eq!(offset_of!(DmIoctl, dev), 40);
    assert_eq!(offset_of!(DmIoctl, name), 48);
    assert_eq!(offset_of!(DmIoctl, uuid), 176);
    assert_eq!(offset_of!(DmIoctl, data), 305);
    assert_eq!(size_of::<DmTargetSpec>(), 40);
    assert_eq!(offset_of!(DmTargetSpec, status), 16);
    assert_eq!(offset_of!(DmTargetSpec, next), 20);
    assert_eq!(offset_of!(DmTargetSpec, target_type), 24);
    // No byte of padding, which `bytes_of` stands on.
    assert_eq!(12 + 7 * 4 + 8 + DM_NAME_LEN + DM_UUID_LEN + 7, size_of::<DmIoctl>());
    assert_eq!(8 + 8 + 4 + 4 + DM_MAX_TYPE_NAME, size_of::<DmTargetSpec>());
    if cfg!(target_arch = "x86_64") {
        assert_eq!([DM_VERSION, DM_DEV_CREATE, DM_DEV_REMOVE], [0xc138_fd00, 0xc138_fd03, 0xc138_fd04]);
        assert_eq!([DM_DEV_SUSPEND, DM_DEV_STATUS], [0xc138_fd06, 0xc138_fd07]);
        assert_eq!([DM_TABLE_LOAD, DM_TABLE_STATUS], [0xc138_fd09, 0xc138_fd0c]);
        assert_eq!([DM_LIST_DEVICES, DM_LIST_VERSIONS], [0xc138_fd02, 0xc138_fd0d]);
    }
}

fn sample() -> Vec<Target> {
    let line = |start, len, kind: &str, params: &str| Target {
        start,
        len,
        kind: kind.to_owned(),
        params: params.to_owned(),
    };
    vec![
        line(0, 8, "linear", "7:0 2048"),
        line(8, 1, "zero", ""),
        line(9, 7, "linear", "259:1048575 99999999999"),
    ]
}

/// As the kernel writes a table: distances from the first line on.
fn as_reply(mut body: Vec<u8>) -> Vec<u8> {
    let mut at = 0;
    while at < body.len() {
        let next = offset_of!(DmTargetSpec, next) + at;
        let step = u32::from_ne_bytes(body[next..next + 4].try_into().unwrap()) as usize;
        at += step;
        body[next..next + 4].copy_from_slice(&(at as u32).to_ne_bytes());
    }
    body
}

#[test]
fn a_table_is_read_as_it_was_written() {
    let written = write_table(&sample()).unwrap();
    assert_eq!(written.len() % 8, 0);
    let first: DmTargetSpec = spec_of(&written).unwrap();
    assert_eq!(first.next as usize, (40 + "7:0 2048".len() + 1).next_multiple_of(8));
    assert_eq!(read_table(&as_reply(written), 3).unwrap(), sample());
    assert_eq!(read_table(&[], 0).unwrap(), []);
}

#[test]
fn what_does_not_fit_into_a_field_is_refused() {
    let mut call = Call::new().unwrap();
    assert!(set_text(&mut call.head.name, &"x".repeat(DM_NAME_LEN)).is_err(), "no room for the NUL");
    assert!(set_text(&mut call.head.name, "a\0b").is_err());
    set_text(&mut call.head.name, &"x".repeat(DM_NAME_LEN - 1)).unwrap();
    set_text(&mut call.head.name, "ab").unwrap();
    assert_eq!(call.head.name[..4], [b'a', b'b', 0, 0], "nothing of the old name is left");
    let wrong = |kind: &str, params: &str| {
        write_table(&[Target { start: 0, len: 1, kind: kind.to_owned(), params: params.to_owned() }])
    };
    assert!(wrong("sixteen-letters-", "").is_err());
    assert!(wrong("linear", "7:0\0 1").is_err());
}

/// Entries of `dm_name_list`: number, distance to the next, name.
fn device_list(entries: &[(&str, u32)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, next) in entries {
        let start = body.len();
        body.extend_from_slice(&7u64.to_ne_bytes());
        body.extend_from_slice(&next.to_ne_bytes());
        body.extend_from_slice(name.as_bytes());
        body.push(0);
        body.resize(start + (body.len() - start).next_multiple_of(8) + 8, 0);
    }
    body
}

#[test]
fn lists_are_walked_to_their_end_and_no_further() {
    let read = |body: &[u8]| names(body, 12, 8);
    assert_eq!(read(&device_list(&[("one", 24), ("two", 0), ("hidden", 0)])).unwrap(), ["one", "two"]);
    assert_eq!(read(&device_list(&[("", 0)])).unwrap(), [""; 0]);
    assert_eq!(read(&[]).unwrap(), [""; 0]);
    for (what, next) in [("past the end", 1 << 20), ("into its own head", 8), ("back", u32::MAX)] {
        assert!(read(&device_list(&[("one", next), ("two", 0)])).is_err(), "{what}");
    }
    assert!(read(&device_list(&[("\u{e4}", 0)])[..13]).is_err(), "half a letter");
}

/// Whatever byte of a reply is wrong: an error or another table, never a panic, never more lines than the
/// count.
#[test]
fn no_reply_is_believed() {
    let table = as_reply(write_table(&sample()).unwrap());
    let list = device_list(&[("one", 24), ("two", 24), ("three", 0)]);
    for at in 0..table.len() {
        for value in [0, 1, 7, 40, 0x7f, 0x80, 0xff] {
            let mut wrong = table.clone();
            wrong[at] = value;
            if let Ok(read) = read_table(&wrong, 3) {
                assert!(read.len() <= 3);
            }
        }
        let _ = read_table(&table[..at], 3);
    }
    assert!(read_table(&table, 4).is_err(), "a line that is counted and not there");
    for at in 0..list.len() {
        for value in 0..=255 {
            let mut wrong = list.clone();
            wrong[at] = value;
            if let Ok(read) = names(&wrong, 12, 8) {
                assert!(read.len() <= 8);
            }
        }
        let _ = names(&list[..at], 12, 8);
    }
}

#[test]
fn device_numbers_go_both_ways() {
    assert_eq!(decode(0x0801), (8, 1));
    for minor in [0, 255, 256, 0xf_ffff] {
        assert_eq!(decode(encode_minor(minor)).1, minor);
    }
}

#[test]
fn errors_are_the_kernels_own() -> io::Result<()> {
    let null = std::fs::File::open("/dev/null")?;
    for result in [
        version(null.as_fd()).map(drop),
        status(null.as_fd(), "x").map(drop),
        table(null.as_fd(), "x").map(drop),
        device_names(null.as_fd()).map(drop),
    ] {
        assert_eq!(result.map_err(|error| error.raw_os_error()), Err(Some(libc::ENOTTY)));
    }
    Ok(())
}
