//! `vt-bundle diff`: what differs between two bundles.
//!
//! Manifests are compared member by member, with tensors and files matched by name; then the bytes on the disk: planes of
//! tensors that both bundles have, padding, and assets. `--quick` trusts the hashes instead of reading the bytes.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use rayon::prelude::*;
use serde_json::{Map, Value, json};
use vt_bundle::manifest::{Placement, Tensor};
use vt_bundle::mmap::ContiguousMap;
use vt_bundle::reader::plane_bytes;
use vt_bundle::{Bundle, BundleError};

use crate::failure::{Failure, Outcome};
use crate::output;

/// Arguments of `diff`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the first bundle
    a: PathBuf,
    /// Folder of the second bundle
    b: PathBuf,
    /// Trust the hashes in the manifests: read weights only where they differ
    #[arg(long, env = "VT_QUICK")]
    quick: bool,
    /// Print JSON
    #[arg(long, env = "VT_JSON")]
    json: bool,
}

/// One difference: where, and what each side has.
struct Difference {
    place: String,
    a: Value,
    b: Value,
}

/// Prints every difference.
pub fn run(args: &Args) -> Result<Outcome, Failure> {
    let (a, b) = (Side::open(&args.a)?, Side::open(&args.b)?);
    let mut found = Vec::new();
    manifests(&a, &b, &mut found)?;
    if !args.quick || a.bundle.id() != b.bundle.id() {
        tensors(&a, &b, args.quick, &mut found);
    }
    if !args.quick {
        padding(&a, &b, &mut found);
        assets(&a, &b, &mut found)?;
    }
    if args.json {
        let list: Vec<Value> = found.iter().map(|d| json!({ "where": d.place, "a": d.a, "b": d.b })).collect();
        output::json(&json!({ "equal": found.is_empty(), "differences": list }))?;
    } else {
        let mut out = output::stdout();
        for d in &found {
            writeln!(out, "{}: {} | {}", d.place, short(&d.a), short(&d.b))?;
        }
        match found.len() {
            0 => writeln!(out, "equal: {}", a.bundle.id())?,
            n => writeln!(out, "{n} difference{}", if n == 1 { "" } else { "s" })?,
        }
        out.flush()?;
    }
    Ok(if found.is_empty() { Outcome::Clean } else { Outcome::Findings })
}

/// One of the two bundles.
struct Side {
    bundle: Bundle,
    image: ContiguousMap,
    cold: ContiguousMap,
}

impl Side {
    fn open(dir: &std::path::Path) -> Result<Self, Failure> {
        let bundle = Bundle::open(dir)?;
        let (image, cold) = (bundle.map(Placement::Image)?, bundle.map(Placement::Cold)?);
        Ok(Self { bundle, image, cold })
    }

    fn space(&self, placement: Placement) -> &[u8] {
        match placement {
            Placement::Image => self.image.bytes(),
            Placement::Cold => self.cold.bytes(),
        }
    }
}

fn as_value(value: &impl serde::Serialize) -> Result<Value, Failure> {
    serde_json::to_value(value).map_err(|e| Failure::Other(format!("manifest: {e}"), 3))
}

/// Everything in the manifests apart from the tensors.
fn manifests(a: &Side, b: &Side, found: &mut Vec<Difference>) -> Result<(), Failure> {
    let stripped = |side: &Side| -> Result<Value, Failure> {
        let mut value = as_value(side.bundle.manifest())?;
        if let Some(object) = value.as_object_mut() {
            object.remove("tensors");
        }
        Ok(value)
    };
    values("", &stripped(a)?, &stripped(b)?, found);
    Ok(())
}

/// Compares JSON values; arrays of things with a name are matched by name.
fn values(place: &str, a: &Value, b: &Value, found: &mut Vec<Difference>) {
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => objects(place, x, y, found),
        (Value::Array(x), Value::Array(y)) => match (named(x), named(y)) {
            (Some(x), Some(y)) => objects(place, &x, &y, found),
            _ if x.len() == y.len() => {
                for (i, (x, y)) in x.iter().zip(y).enumerate() {
                    values(&format!("{place}/{i}"), x, y, found);
                }
            }
            _ => found.push(Difference { place: place.to_owned(), a: a.clone(), b: b.clone() }),
        },
        _ if a != b => found.push(Difference { place: place.to_owned(), a: a.clone(), b: b.clone() }),
        _ => {}
    }
}

fn objects(place: &str, a: &Map<String, Value>, b: &Map<String, Value>, found: &mut Vec<Difference>) {
    let only_b = b.keys().filter(|k| !a.contains_key(*k));
    for key in a.keys().chain(only_b) {
        let place = if place.is_empty() { key.clone() } else { format!("{place}/{key}") };
        values(&place, a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null), found);
    }
}

/// A list of objects by what names them; `None` if something has no name or a name comes twice.
fn named(list: &[Value]) -> Option<Map<String, Value>> {
    let mut map = Map::new();
    for item in list {
        let name = ["name", "file", "decode", "layer"].iter().find_map(|key| item.get(key))?;
        let name = name.as_str().map_or_else(|| name.to_string(), str::to_owned);
        if map.insert(name, item.clone()).is_some() {
            return None;
        }
    }
    Some(map)
}

fn tensors(a: &Side, b: &Side, quick: bool, found: &mut Vec<Difference>) {
    let list = |side: &Side| -> BTreeMap<String, Tensor> {
        side.bundle.manifest().tensors.iter().map(|t| (t.name.clone(), t.clone())).collect()
    };
    let (in_a, in_b) = (list(a), list(b));
    let same_hashes = a.bundle.manifest().image.segments == b.bundle.manifest().image.segments
        && a.bundle.manifest().cold.segments == b.bundle.manifest().cold.segments;
    let mut moved = Vec::new();
    let mut pairs = Vec::new();
    for (name, x) in &in_a {
        let place = format!("tensor {name}");
        let Some(y) = in_b.get(name) else {
            found.push(Difference { place, a: json!("present"), b: Value::Null });
            continue;
        };
        values(&place, &description(x), &description(y), found);
        if (&x.planes, &x.experts) != (&y.planes, &y.experts) {
            moved.push(name.clone());
        }
        let sizes = |t: &Tensor| -> Vec<_> { t.planes.iter().map(|p| (p.name.clone(), p.size)).collect() };
        if sizes(x) == sizes(y) && x.expert_count() == y.expert_count() && !(quick && same_hashes && x == y) {
            pairs.push((x, y));
        }
    }
    for name in in_b.keys().filter(|n| !in_a.contains_key(*n)) {
        found.push(Difference { place: format!("tensor {name}"), a: Value::Null, b: json!("present") });
    }
    if let Some(first) = moved.first() {
        let place = format!("place in the image of {} tensors, the first {first}", moved.len());
        found.push(Difference { place, a: offsets(&in_a[first]), b: offsets(&in_b[first]) });
    }
    let planes: Vec<Vec<Difference>> = pairs.par_iter().map(|(x, y)| contents(a, b, x, y)).collect();
    found.extend(planes.into_iter().flatten());
}

/// What a tensor is, without where it lies.
fn description(tensor: &Tensor) -> Value {
    let mut value = serde_json::to_value(tensor).unwrap_or_default();
    if let Some(planes) = value.get_mut("planes").and_then(Value::as_array_mut) {
        for plane in planes.iter_mut().filter_map(Value::as_object_mut) {
            plane.remove("offset");
        }
    }
    if let Some(experts) = value.get_mut("experts").and_then(Value::as_object_mut) {
        for key in ["record_offset", "offsets", "record_hashes"] {
            experts.remove(key);
        }
    }
    value
}

fn offsets(tensor: &Tensor) -> Value {
    json!(tensor.planes.iter().map(|p| p.offset).collect::<Vec<_>>())
}

/// Planes of one tensor, byte by byte.
fn contents(a: &Side, b: &Side, x: &Tensor, y: &Tensor) -> Vec<Difference> {
    let mut found = Vec::new();
    for expert in 0..x.expert_count() {
        for (index, plane) in x.planes.iter().enumerate() {
            let p = plane_bytes(x, index, expert, a.space(x.placement));
            let q = plane_bytes(y, index, expert, b.space(y.placement));
            if p == q {
                continue;
            }
            let differing = p.iter().zip(q).filter(|(p, q)| p != q).count();
            let first = p.iter().zip(q).position(|(p, q)| p != q).unwrap_or(0);
            let of = x.experts.as_ref().map(|_| format!(" expert {expert}")).unwrap_or_default();
            let place = format!(
                "tensor {}{of} plane {}: {differing} of {} bytes, the first at {first}",
                x.name, plane.name, plane.size
            );
            found.push(Difference { place, a: json!(p[first]), b: json!(q[first]) });
        }
    }
    found
}

/// What lies between the planes, where both bundles have it in the same places.
fn padding(a: &Side, b: &Side, found: &mut Vec<Difference>) {
    for (space, placement) in [("image", Placement::Image), ("cold segments", Placement::Cold)] {
        let gaps = a.bundle.gaps(placement);
        if gaps != b.bundle.gaps(placement) {
            continue;
        }
        for gap in gaps {
            let range = gap.start as usize..gap.end as usize;
            if a.space(placement)[range.clone()] != b.space(placement)[range] {
                let place = format!("padding of the {space}, bytes {} to {}", gap.start, gap.end);
                found.push(Difference { place, a: json!("one content"), b: json!("another") });
            }
        }
    }
}

/// The contents of assets that both manifests describe alike; others have been reported.
fn assets(a: &Side, b: &Side, found: &mut Vec<Difference>) -> Result<(), Failure> {
    for asset in &a.bundle.manifest().assets {
        if !b.bundle.manifest().assets.contains(asset) {
            continue;
        }
        let hash = |side: &Side| {
            let path = side.bundle.dir().join(&asset.file);
            let mut hasher = blake3::Hasher::new();
            std::fs::File::open(&path)
                .and_then(|file| hasher.update_reader(file).map(|h| h.finalize().to_hex().to_string()))
                .map_err(|source| Failure::Bundle(BundleError::Io { path: path.clone(), source }))
        };
        let (x, y) = (hash(a)?, hash(b)?);
        if x != y {
            found.push(Difference { place: format!("content of {}", asset.file), a: json!(x), b: json!(y) });
        }
    }
    Ok(())
}

/// A value in one line of bounded length.
fn short(value: &Value) -> String {
    const WIDTH: usize = 80;
    let text = match value {
        Value::Null => "absent".to_owned(),
        Value::String(s) => s.clone(),
        other => other.to_string(),
    };
    if text.chars().count() <= WIDTH {
        return text;
    }
    text.chars().take(WIDTH).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_lists_and_places_are_paths() {
        let a = json!({ "x": { "y": 1 }, "files": [{ "name": "p", "size": 1 }, { "name": "q", "size": 2 }] });
        let b = json!({ "x": { "y": 2 }, "files": [{ "name": "q", "size": 3 }] });
        let mut found = Vec::new();
        values("", &a, &b, &mut found);
        let places: Vec<_> = found.iter().map(|d| d.place.as_str()).collect();
        assert_eq!(places, ["x/y", "files/p", "files/q/size"]);
        assert_eq!(short(&found[1].b), "absent");
    }
}
