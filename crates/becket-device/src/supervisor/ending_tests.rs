//! When a supervisor may end that was asked to leave its devices to another one.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use rustix::net::{RecvFlags, recv};

use super::Supervisor;
use super::doubles::{ALL, Stage};
use crate::control::server;

/// A caller that gets no answer takes it that its call was not carried out, and calls the next server.
#[test]
fn its_last_call_is_answered_before_it_may_end() {
    let (mut client, theirs) = UnixStream::pair().unwrap();
    client.write_all(b"{\"method\":\"org.becket.Becket1.HandOver\"}\0").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let supervisor: Arc<OnceLock<Weak<Supervisor>>> = Arc::default();
    let answered: Arc<Mutex<Vec<bool>>> = Arc::default();
    let (known, seen) = (Arc::clone(&supervisor), Arc::clone(&answered));
    // As the loop does that ends the process.
    let stage = Stage::waking(ALL, move || {
        if known.get().and_then(Weak::upgrade).is_some_and(|supervisor| supervisor.yields()) {
            let there = recv(&client, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
            seen.lock().unwrap().push(there.is_ok_and(|(len, _)| len == 1));
        }
    });
    supervisor.set(Arc::downgrade(&stage.supervisor)).unwrap();
    server::converse(&*stage.supervisor, theirs, rustix::process::geteuid().as_raw(), &|| {});
    assert_eq!(*answered.lock().unwrap(), [true]);
}

#[test]
fn a_peer_that_reads_no_answer_does_not_keep_it() {
    let (mut client, theirs) = UnixStream::pair().unwrap();
    let stage = Stage::with(ALL);
    stage.supervisor.step_down("a test");
    let supervisor = &*stage.supervisor;
    std::thread::scope(|scope| {
        let uid = rustix::process::geteuid().as_raw();
        scope.spawn(move || server::converse(supervisor, theirs, uid, &|| {}));
        let call = b"{\"method\":\"org.varlink.service.GetInterfaceDescription\",\
            \"parameters\":{\"interface\":\"org.becket.Becket1\"}}\0";
        // Until it ends the connection.
        while client.write_all(call).is_ok() {}
    });
    assert!(stage.supervisor.yields());
}
