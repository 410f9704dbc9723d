//! Folders of files: listing, copying, comparing.

use std::collections::BTreeMap;
use std::path::Path;

/// Every file below a folder, by relative name.
///
/// # Panics
/// If the folder cannot be read.
pub fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    walk(dir, "", &mut found);
    found
}

fn walk(dir: &Path, prefix: &str, found: &mut BTreeMap<String, Vec<u8>>) {
    for entry in std::fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let entry = entry.expect("folder entry");
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            walk(&entry.path(), &format!("{name}/"), found);
        } else {
            found.insert(name, std::fs::read(entry.path()).expect("file read"));
        }
    }
}

/// Asserts that two folders hold the same files, as `diff -r` would.
///
/// # Panics
/// If they do not, naming the first difference.
pub fn assert_equal(a: &Path, b: &Path) {
    let (x, y) = (files(a), files(b));
    let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&x), names(&y), "{} and {} hold other files", a.display(), b.display());
    for (name, bytes) in &x {
        assert!(*bytes == y[name], "{name} differs between {} and {}", a.display(), b.display());
    }
}

/// Copies a folder.
///
/// # Panics
/// If that fails.
pub fn copy(from: &Path, to: &Path) {
    for (name, bytes) in files(from) {
        let path = to.join(name);
        std::fs::create_dir_all(path.parent().expect("inside")).expect("folder made");
        std::fs::write(path, bytes).expect("file written");
    }
}
