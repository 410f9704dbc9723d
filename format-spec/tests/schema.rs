//! The checked-in JSON schema is the one that the code gives.

use vt_bundle::Manifest;

/// After a change of the manifest: `VT_TEST_UPDATE=1 cargo test -p vt-bundle --test schema` writes the file anew.
#[test]
fn schema_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/manifest.schema.json");
    let current = Manifest::schema();
    if std::env::var_os("VT_TEST_UPDATE").is_some() {
        std::fs::write(path, &current).expect("schema written");
    }
    let stored = std::fs::read_to_string(path).expect("schema file");
    assert!(stored == current, "{path} is not what Manifest::schema() gives; see this test for how to update it");
}
