//! File systems of bounded size.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system of bounded size, unmounted at the end.
#[derive(Debug)]
pub struct Tmpfs(PathBuf);

impl Tmpfs {
    /// `None`, and a line that says so, where mounting is not allowed.
    pub fn mount(dir: &Path, size: &str) -> Option<Self> {
        let option = format!("size={size}");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &option, "tmpfs"]).arg(dir).status();
        if status.is_ok_and(|s| s.success()) {
            return Some(Self(dir.to_owned()));
        }
        eprintln!("SKIPPED: mounting a tmpfs needs root");
        None
    }

    /// From now on nothing can be written to it.
    ///
    /// # Panics
    /// If it cannot be mounted anew.
    pub fn make_read_only(&self) {
        let status = Command::new("mount").args(["-o", "remount,ro"]).arg(&self.0).status();
        assert!(status.is_ok_and(|s| s.success()), "remount {}", self.0.display());
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let status = Command::new("umount").arg(&self.0).status();
        assert!(status.is_ok_and(|s| s.success()), "umount {}", self.0.display());
    }
}
