//! Files in a bundle's folder that its manifest does not list.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use vt_bundle::Bundle;
use vt_bundle::manifest::file_name;

/// Names, relative to the bundle and in order, of the files that no hash covers.
pub fn unlisted(bundle: &Bundle) -> io::Result<Vec<String>> {
    let manifest = bundle.manifest();
    let segments = manifest.image.segments.iter().chain(&manifest.cold.segments).map(|s| s.file.as_str());
    let listed: HashSet<&str> = segments
        .chain(manifest.assets.iter().map(|a| a.file.as_str()))
        .chain([file_name::MANIFEST, file_name::ID])
        .collect();
    let mut found = Vec::new();
    walk(bundle.dir(), "", &mut |name| {
        if !listed.contains(name) {
            found.push(name.to_owned());
        }
    })?;
    found.sort();
    Ok(found)
}

fn walk(dir: &Path, prefix: &str, each: &mut dyn FnMut(&str)) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        // A link to a folder is a file here: following it could leave the bundle.
        if entry.file_type()?.is_dir() {
            walk(&entry.path(), &format!("{name}/"), each)?;
        } else {
            each(&name);
        }
    }
    Ok(())
}
