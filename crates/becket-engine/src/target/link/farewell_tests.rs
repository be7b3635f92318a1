use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use super::*;

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(200)
}

/// A connection whose server has answered with these bytes.
fn answered(bytes: &[u8]) -> (OwnedFd, UnixStream) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(bytes).unwrap();
    (ours.into(), theirs)
}

fn reply(error: u32, cookie: u64) -> Vec<u8> {
    [&0x6744_6698u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

#[test]
fn a_flush_is_asked_for_and_its_answer_believed() {
    for error in [0, 5] {
        let (ours, mut theirs) = answered(&reply(error, COOKIE));
        asks(&ours, soon()).unwrap();
        let mut request = [0; Request::SIZE];
        theirs.read_exact(&mut request).unwrap();
        let request = Request::read(&request, false).unwrap();
        assert_eq!((request.command, request.cookie, request.len), (nbd::CMD_FLUSH, COOKIE, 0));
        assert_eq!(answers(&ours, soon()).unwrap(), error);
    }
}

#[test]
fn a_server_that_ends_or_says_something_else_or_nothing_has_not_flushed() {
    let (ours, theirs) = answered(&reply(0, COOKIE)[..7]);
    assert!(answers(&ours, soon()).unwrap_err().to_string().contains("does not answer"));
    drop(theirs);
    assert!(answers(&ours, soon()).is_err());
    assert!(asks(&ours, soon()).is_err());
    let (ours, _theirs) = answered(&reply(0, 1));
    assert!(answers(&ours, soon()).unwrap_err().to_string().contains("not asked"));
}
