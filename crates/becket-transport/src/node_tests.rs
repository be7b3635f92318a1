//! Nodes in a scratch directory; partitions are tested with the loop devices that have them.
//! Nothing here touches `/dev`.

use super::*;

/// Makes and removes nodes under a scratch directory, which takes root.
#[test]
fn nodes_are_made_replaced_and_refused() {
    if !becket_testkit::require_root("node_ensure") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sub/node");
    let (ours, other) = (rustix::fs::makedev(7, 250), rustix::fs::makedev(7, 251));
    assert!(ensure_block(&path, ours).unwrap(), "made, with its directory");
    assert!(!ensure_block(&path, ours).unwrap(), "there");
    assert!(ensure_block(&path, other).unwrap(), "another device's node is replaced");
    assert_eq!(fs::metadata(&path).unwrap().rdev(), other);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o660);

    let file = directory.path().join("file");
    fs::write(&file, "somebody's data").unwrap();
    let error = ensure_block(&file, ours).unwrap_err();
    assert!(matches!(error, Error::NotANode { .. }), "{error}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "somebody's data");
}

#[test]
fn a_disk_that_is_not_there_has_no_partitions() {
    assert_eq!(partitions("no-such-disk"), []);
    assert_eq!(diskseq("no-such-disk"), None);
    let error = await_partitions("no-such-disk", &[], Duration::ZERO).unwrap_err();
    assert_eq!(error.kind(), crate::ErrorKind::NotFound);
}
