//! What waits in a socket to be sent (`SO_MEMINFO`, sock_diag(7)).

use std::io;
use std::os::fd::AsFd;

use crate::socket_option;

/// How many bytes of the kernel's memory they take, as two figures: which of them counts depends on the
/// socket's family. They change when the other end takes something.
///
/// # Errors
/// The descriptor is not a socket.
pub fn of(socket: impl AsFd) -> io::Result<[u32; 2]> {
    let found = socket_option::read(socket, libc::SO_MEMINFO, [0u32; libc::SK_MEMINFO_DROPS as usize + 1])?;
    Ok([found[libc::SK_MEMINFO_WMEM_ALLOC as usize], found[libc::SK_MEMINFO_WMEM_QUEUED as usize]])
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn changes_when_something_is_taken(mut one: impl Write + AsFd, mut other: impl Read) {
        while one.write(&[1; 4096]).is_ok() {}
        let full = of(&one).unwrap();
        assert_eq!(of(&one).unwrap(), full);
        other.read_exact(&mut [0; 64 << 10]).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert_ne!(of(&one).unwrap(), full);
    }

    #[test]
    fn it_changes_when_something_is_taken() {
        let (one, other) = UnixStream::pair().unwrap();
        one.set_nonblocking(true).unwrap();
        changes_when_something_is_taken(one, other);
        assert!(of(std::fs::File::open("/dev/null").unwrap()).is_err());
    }

    #[test]
    fn it_changes_over_tcp() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        one.set_nonblocking(true).unwrap();
        let mut all = 0;
        while let Ok(sent) = (&one).write(&[1; 4096]) {
            all += sent;
        }
        std::thread::sleep(std::time::Duration::from_millis(300));
        let full = of(&one).unwrap();
        std::io::copy(&mut (&mut other).take(all as u64), &mut std::io::sink()).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert_ne!(of(&one).unwrap(), full);
    }
}
