//! What the end-to-end tests share: the binaries under test, fixtures, and running programs.
//!
//! The tests use `vt-convert`, `vt-bundle` and `vt-run` as a user would: as programs. They are looked for in
//! `VT_TEST_BIN_DIR`, and otherwise in the build folder of the tests, release or debug, whichever was built last.
//! Failures in here are faults of the test setup and panic with what to do.

pub mod binaries;
pub mod disks;
pub mod fixtures;
pub mod folders;
pub mod process;
pub mod servers;
