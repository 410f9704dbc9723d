//! The GGUF container: any bytes are a header or an error, and what a header promises holds.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vt_convert::dequant::ggml::check_blocks;
use vt_convert::gguf::container::parse;
use vt_convert::gguf::value::Value;

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = parse("fuzz.gguf", bytes) else { return };
    for (key, value) in header.metadata.entries() {
        let _ = (key.len(), value.describe(), value.as_u64(), value.as_f64(), value.as_str());
        if let Value::Array(array) = value {
            if let Some(strings) = array.strings() {
                assert_eq!(strings.count(), array.len());
            }
            if let Some(integers) = array.integers() {
                assert_eq!(integers.count(), array.len());
            }
        }
    }
    for tensor in &header.tensors {
        let start = usize::try_from(header.data_start + tensor.offset).expect("within the file");
        let data = &bytes[start..start + usize::try_from(tensor.len).expect("within the file")];
        let _ = check_blocks(tensor.kind.id, data);
    }
});
