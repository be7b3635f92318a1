//! The journal's own protocol: one datagram an entry, with fields.
//! It never waits for the journal, and never fails: an entry that it does not take is written as a line.
//!
//! <https://systemd.io/JOURNAL_NATIVE_PROTOCOL> has the format. It is few enough lines to need no crate.

use std::os::unix::net::UnixDatagram;
use std::path::Path;

/// Where the journal listens.
const SOCKET: &str = "/run/systemd/journal/socket";

/// Sends an entry; `false` if the journal did not take it at once.
pub(super) fn send(fields: &[(&str, &str)]) -> bool {
    send_to(Path::new(SOCKET), fields)
}

fn send_to(path: &Path, fields: &[(&str, &str)]) -> bool {
    let sent = UnixDatagram::unbound().and_then(|socket| {
        socket.set_nonblocking(true)?;
        socket.send_to(&entry(fields), path)
    });
    sent.is_ok()
}

/// `NAME=VALUE` lines; a value with a line break has its length in front instead.
fn entry(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut entry = Vec::new();
    for (name, value) in fields {
        entry.extend_from_slice(name.as_bytes());
        if value.contains('\n') {
            entry.push(b'\n');
            entry.extend_from_slice(&(value.len() as u64).to_le_bytes());
        } else {
            entry.push(b'=');
        }
        entry.extend_from_slice(value.as_bytes());
        entry.push(b'\n');
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_one_datagram_of_fields() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("socket");
        let journal = UnixDatagram::bind(&path).unwrap();
        assert!(send_to(&path, &[("MESSAGE", "disk: recovered"), ("PRIORITY", "6"), ("X", "a\nb=c")]));
        let mut bytes = [0; 256];
        let len = journal.recv(&mut bytes).unwrap();
        let expected = b"MESSAGE=disk: recovered\nPRIORITY=6\nX\n\x05\0\0\0\0\0\0\0a\nb=c\n";
        assert_eq!(&bytes[..len], expected);
    }

    #[test]
    fn a_journal_that_does_not_read_is_not_waited_for() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("socket");
        assert!(!send_to(&path, &[("MESSAGE", "x")]), "there is none");
        let _journal = UnixDatagram::bind(&path).unwrap();
        let taken = (0..100_000).take_while(|_| send_to(&path, &[("MESSAGE", "x")])).count();
        assert!((1..100_000).contains(&taken), "{taken}");
    }
}
