//! Outputs that would land in the folder of their own input.
//!
//! No hash covers a file that is in a bundle's folder and not in its manifest, and one with the name of the bundle's own would
//! replace it while it is read.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::error::BundleError;

/// Whether `path`, which need not exist, is the folder `folder` or would be made inside it. Links count as what they point at;
/// folders are compared by device and inode, so that a second mount of one is the same folder.
pub fn lies_in(path: &Path, folder: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    let Some(folder) = identity(folder) else { return false };
    let is_within = |place: &Path| place.ancestors().any(|ancestor| identity(ancestor) == Some(folder));
    // An absolute path needs no place to begin at.
    let mut place = std::env::current_dir().unwrap_or_default();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                place.pop();
            }
            Component::CurDir => {}
            // An absolute one replaces what was there.
            component => place = real(&place.join(component)),
        }
        // Also a folder that the rest of the path leaves again: making the path would make it.
        if !place.exists() && is_within(&place) {
            return true;
        }
    }
    is_within(&place)
}

/// The path without links, as far as it exists.
fn real(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Refuses an output inside the folder of the bundle that it is made of.
///
/// # Errors
/// [`BundleError::OutputInside`].
pub fn refuse_inside(output: &Path, bundle: &Path) -> Result<(), BundleError> {
    if lies_in(output, bundle) {
        return Err(BundleError::OutputInside { output: output.to_owned(), bundle: bundle.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_folder_is_the_folder() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let bundle = root.join("n");
        fs::create_dir_all(bundle.join("sub")).unwrap();
        fs::create_dir(root.join("other")).unwrap();
        std::os::unix::fs::symlink(&bundle, root.join("link")).unwrap();
        std::os::unix::fs::symlink("../n/sub", root.join("other/deep")).unwrap();
        for inside in [
            "n",
            "n/",
            "n/.",
            "n/sub",
            "n/new",
            "n/new/deeper",
            "other/../n",
            "link",
            "link/new",
            "other/deep",
            "other/deep/new",
            "other/deep/..",
            "n/new/..",
            "n/new/../../elsewhere",
        ] {
            assert!(lies_in(&root.join(inside), &bundle), "{inside}");
            assert!(lies_in(&root.join(inside), &root.join("link")), "{inside}");
        }
        for outside in ["", "n2", "new", "new/n", "other", "other/n", "n/..", "n/sub/../../other", "link/../new"] {
            // `link/..` is the folder that holds what the link points at.
            assert!(!lies_in(&root.join(outside), &bundle), "{outside}");
        }
        assert!(!lies_in(&bundle, &root.join("nothing")));
        assert!(refuse_inside(&bundle, &bundle).unwrap_err().to_string().contains("choose another"));
    }

    #[test]
    fn relative_paths_begin_where_the_process_is() {
        let here = std::env::current_dir().unwrap();
        assert!(lies_in(Path::new("."), &here) && lies_in(Path::new(""), &here));
        assert!(lies_in(Path::new("no-such-folder/x"), &here) && !lies_in(Path::new(".."), &here));
    }
}
