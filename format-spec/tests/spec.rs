//! SPEC.md and the code agree on every encoding: names, planes, element types, spans.

use std::collections::BTreeMap;

use vt_bundle::codec::{self, Codec};
use vt_bundle::encoding::{EncodingSpec, Span};

/// A row of the table of section 6, in words: encoding, code planes, scale planes.
type Row = (String, String, String);

/// The rows of the table by decode name, with `T` written out.
fn documented() -> BTreeMap<String, Row> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/SPEC.md")).expect("SPEC.md");
    let section = text.split("\n## 6. ").nth(1).and_then(|s| s.split("\n## 7. ").next()).expect("section 6");
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for line in section.lines().filter(|l| l.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(|c| c.trim()).collect();
        let (decode, encoding) = (cells[1].trim_matches('`'), cells[2].trim_matches('`').to_owned());
        let scales = match cells[4].strip_prefix("as `") {
            Some(other) => rows[&format!("{}.ggml@1", other.trim_matches('`'))].2.clone(),
            None => cells[4].to_owned(),
        };
        let types = match decode {
            d if !d.contains(".T@") => &[""][..],
            d if d.starts_with("fp8.block") => &["f32", "bf16", "f16", "e8m0"],
            _ => &["f32", "bf16", "f16"],
        };
        for t in types {
            let decode = decode.replace(".T@", &format!(".{t}@"));
            let scales = scales.replace("(T,", &format!("({t},"));
            rows.insert(decode, (encoding.clone(), cells[3].to_owned(), scales));
        }
    }
    rows
}

fn described(spec: &EncodingSpec) -> Row {
    let codes = spec.codes.iter().map(|c| format!("{} ({}, {})", c.name, c.bits, c.shift));
    let scales = spec.scales.iter().map(|s| {
        let span = match s.span {
            Span::Group => "group".to_owned(),
            Span::Super(n) => format!("super {n}"),
            Span::Channel => "channel".to_owned(),
            Span::Part => "part".to_owned(),
            Span::Block => "block".to_owned(),
        };
        format!("{} ({}, {span})", s.name, s.dtype.name())
    });
    let joined = |list: Vec<String>| list.join(", ");
    (spec.encoding.to_owned(), joined(codes.collect()), joined(scales.collect()))
}

#[test]
fn every_encoding_is_documented_as_it_is() {
    let documented = documented();
    let codecs: Vec<&dyn Codec> = codec::hf::CODECS.iter().chain(codec::ggml::CODECS).copied().collect();
    let known: BTreeMap<String, Row> =
        codecs.iter().map(|c| (c.spec().decode.to_owned(), described(c.spec()))).collect();
    let names = |rows: &BTreeMap<String, Row>| rows.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&documented), names(&known));
    for (decode, row) in &documented {
        assert_eq!(row, &known[decode], "{decode}");
    }
}

#[test]
fn every_codec_is_documented() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/SPEC.md")).expect("SPEC.md");
    let section = text.split("\n## 9. ").nth(1).and_then(|s| s.split("\n## 10. ").next()).expect("section 9");
    for codec in codec::hf::CODECS.iter().chain(codec::ggml::CODECS) {
        // Codecs that differ in the type of their scales are documented once.
        let name = codec.name();
        let any_type = [".f32", ".bf16", ".f16", ".e8m0"].iter().fold(name.to_owned(), |n, t| n.replace(t, ".T"));
        let base = any_type.replace(".zeros", "");
        let found = [name, &any_type, &base].iter().any(|n| section.contains(&format!("`{n}`")));
        assert!(found || name.ends_with(".ggml@1"), "{name} is not in section 9");
    }
}
