//! Reading attributes of block devices from sysfs.
//! Never writes there.
