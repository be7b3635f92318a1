//! Device nodes and partitions of block devices.
//! Never decides which devices there should be.
