//! Commands to `/dev/ublk-control`.
//! Never touches the data path.
