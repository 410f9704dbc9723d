//! Mutations: of bytes, and of JSON documents as trees, so that what is mutated still gets past the first parser.

use serde_json::Value;
use vt_tests::process::Numbers;

/// Numbers at which arithmetic goes wrong.
const EDGES: [u64; 14] =
    [0, 1, 2, 7, 15, 16, 255, 256, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, u64::MAX];

/// Words that the parsers know.
const WORDS: [&str; 22] = [
    "F32",
    "BF16",
    "F8_E4M3",
    "F8_E8M0",
    "U8",
    "I32",
    "I64",
    "BOOL",
    "weight",
    "weight_scale",
    "weight_scale_2",
    "lm_head.weight",
    "__metadata__",
    "NVFP4",
    "FP8",
    "MIXED_PRECISION",
    "../x",
    "/",
    "",
    "e2m1",
    "{expert}",
    "model.layers.0.mlp.experts.0.up_proj",
];

/// A few changes of bytes, in place or not.
pub fn bytes(numbers: &mut Numbers, data: &mut Vec<u8>) {
    for _ in 0..1 + numbers.below(4) {
        let len = data.len() as u64;
        let at = numbers.below(len.max(1)) as usize;
        match numbers.below(8) {
            0 if len > 0 => data[at] ^= 1 << numbers.below(8),
            1 if len > 0 => data[at] = numbers.below(256) as u8,
            2 => data.truncate(at),
            3 => {
                let edge = EDGES[numbers.below(EDGES.len() as u64) as usize].to_le_bytes();
                let width = 1 << numbers.below(4);
                data.iter_mut().skip(at).zip(&edge[..width]).for_each(|(to, from)| *to = *from);
            }
            4 => {
                let end = (at + numbers.below(64) as usize).min(data.len());
                let copy = data[at.min(end)..end].to_vec();
                data.splice(at..at, copy).for_each(drop);
            }
            5 => data.drain(at..(at + numbers.below(64) as usize).min(data.len())).for_each(drop),
            6 => {
                let word = WORDS[numbers.below(WORDS.len() as u64) as usize];
                data.splice(at..at, word.bytes()).for_each(drop);
            }
            _ => {
                let digits = EDGES[numbers.below(EDGES.len() as u64) as usize].to_string();
                data.splice(at..at, digits.bytes()).for_each(drop);
            }
        }
    }
}

/// A few changes somewhere in a document.
pub fn json(numbers: &mut Numbers, value: &mut Value) {
    for _ in 0..1 + numbers.below(3) {
        descend(numbers, value);
    }
}

/// Goes down at random; leaves are what is changed most.
fn descend(numbers: &mut Numbers, at: &mut Value) {
    let len = match &*at {
        Value::Array(list) => list.len(),
        Value::Object(map) => map.len(),
        _ => 0,
    };
    if len == 0 || numbers.below(12) == 0 {
        return change(numbers, at);
    }
    let index = numbers.below(len as u64) as usize;
    match at {
        Value::Array(list) => descend(numbers, &mut list[index]),
        Value::Object(map) => map.values_mut().nth(index).into_iter().for_each(|next| descend(numbers, next)),
        _ => {}
    }
}

fn change(numbers: &mut Numbers, at: &mut Value) {
    match at {
        Value::Array(list) if !list.is_empty() && numbers.below(2) == 0 => {
            let index = numbers.below(list.len() as u64) as usize;
            if numbers.below(2) == 0 {
                list.remove(index);
            } else {
                list.push(list[index].clone());
            }
        }
        Value::Object(map) if !map.is_empty() && numbers.below(2) == 0 => {
            let index = numbers.below(map.len() as u64) as usize;
            let Some(key) = map.keys().nth(index).cloned() else { return };
            if let Some(old) = map.remove(&key)
                && numbers.below(2) == 0
            {
                map.insert(WORDS[numbers.below(WORDS.len() as u64) as usize].to_owned(), old);
            }
        }
        Value::Number(n) if numbers.below(2) == 0 => {
            let near = n.as_u64().unwrap_or(0).wrapping_add(numbers.below(5)).wrapping_sub(2);
            *at = near.into();
        }
        _ => {
            *at = match numbers.below(8) {
                0 => Value::Null,
                1 => Value::Bool(numbers.below(2) == 0),
                2 => Value::from(WORDS[numbers.below(WORDS.len() as u64) as usize]),
                3 => Value::from(-1),
                4 => Value::from(0.5),
                5 => Value::Array(vec![]),
                6 => Value::Object(serde_json::Map::new()),
                _ => Value::from(EDGES[numbers.below(EDGES.len() as u64) as usize]),
            };
        }
    }
}
