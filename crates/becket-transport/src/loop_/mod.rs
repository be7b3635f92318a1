//! The kernel's loop driver.
//! Never keeps a server running: once configured, the kernel does the I/O.
