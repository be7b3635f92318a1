//! Device nodes that stay behind where nothing else removes them: in the `/dev` of a container, for example.
//! It never removes the node of a device that is there.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use becket_transport::node;
use tracing::warn;

use crate::contract::shape;
use crate::record::device::Device;

/// This process's mount namespace, by its inode number.
pub(crate) fn namespace() -> Option<u64> {
    std::fs::metadata("/proc/self/ns/mnt").ok().map(|found| found.ino())
}

/// Removes the nodes of a device that is gone, here and where they were made.
pub(crate) fn remove(device: &Device) {
    let info = &device.info;
    let own = shape::of(info.transport).node_goes.then_some(&info.device);
    let mut nodes = own.into_iter().chain(info.partitions.iter().map(|part| &part.device)).peekable();
    if nodes.peek().is_none() {
        return;
    }
    let elsewhere = device.nodes_in.filter(|made| namespace() != Some(*made)).map(roots);
    for path in nodes {
        let mut removed = vec![node::remove_stale(path)];
        for root in elsewhere.iter().flatten() {
            // Processes of one mount namespace may have different roots.
            removed.push(node::remove_stale_below(root, path));
        }
        for error in removed.into_iter().filter_map(Result::err) {
            warn!("{} stays, and may lead to another disk later: {error}", path.display());
        }
    }
}

/// The roots of the processes in a mount namespace. Where there is none, its nodes are gone with it.
fn roots(namespace: u64) -> Vec<PathBuf> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let of_it = processes.filter(|process| {
        process.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok())
            && std::fs::metadata(process.path().join("ns/mnt")).is_ok_and(|found| found.ino() == namespace)
    });
    of_it.map(|process| Path::new(&process.path()).join("root")).collect()
}
