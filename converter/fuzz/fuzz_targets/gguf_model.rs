//! A whole GGUF model: names, configuration, tokenizer and catalog from any metadata.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vt_convert::gguf::{catalog, open};

fuzz_target!(|bytes: &[u8]| {
    // One file per process; opening wants a path because models are mapped.
    let path = std::env::temp_dir().join(format!("vt-fuzz-{}.gguf", std::process::id()));
    std::fs::write(&path, bytes).expect("a writable temporary folder");
    if let Ok((checkpoint, metadata)) = open(&path) {
        let _ = catalog(&checkpoint, &metadata);
    }
});
