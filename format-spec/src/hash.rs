//! Content hashing: plain BLAKE3 of every file, and chaining values of the 1 MiB leaves of every segment.
//!
//! A leaf is 1024 chunks at an aligned position, so it is a complete subtree of the file's BLAKE3 tree: its chaining
//! value can be computed alone, on any thread or on the device, and the file's hash follows from the leaves. Where a
//! segment has a single leaf, its entry in the leaf table is the file's hash itself (the root is finalised otherwise).

use std::collections::BTreeMap;
use std::ops::Range;

use blake3::hazmat::{HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root};

/// Bytes of a segment, all but the last of an image.
pub const SEGMENT_BYTES: u64 = 1 << 30;
/// Bytes of a leaf, all but the last of a segment.
pub const LEAF_BYTES: u64 = 1 << 20;

/// A leaf's chaining value, or a hash.
pub type Digest = [u8; 32];

/// Leaves of a segment of that many bytes.
pub const fn leaf_count(segment_bytes: u64) -> u64 {
    segment_bytes.div_ceil(LEAF_BYTES)
}

/// The entry of the leaf table for one leaf.
///
/// `offset` is the leaf's first byte within its segment, a multiple of [`LEAF_BYTES`]; `segment_bytes` is the length of
/// the whole segment.
pub fn leaf_digest(leaf: &[u8], offset: u64, segment_bytes: u64) -> Digest {
    if segment_bytes <= LEAF_BYTES {
        return *blake3::hash(leaf).as_bytes();
    }
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(offset);
    hasher.update(leaf);
    hasher.finalize_non_root()
}

/// The BLAKE3 of a segment from its leaves, equal to `b3sum` of the file; `None` without leaves.
pub fn segment_digest(leaves: &[Digest]) -> Option<Digest> {
    match leaves {
        [] => None,
        [only] => Some(*only),
        _ => {
            let (left, right) = leaves.split_at(left_len(leaves.len()));
            Some(*merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash).as_bytes())
        }
    }
}

/// BLAKE3 gives the left subtree the largest power of two of leaves that leaves something for the right.
fn left_len(leaves: usize) -> usize {
    leaves.div_ceil(2).next_power_of_two()
}

fn subtree(leaves: &[Digest]) -> Digest {
    match leaves {
        [only] => *only,
        _ => {
            let (left, right) = leaves.split_at(left_len(leaves.len()));
            merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

/// Nodes of the BLAKE3 tree over some bytes, by their first byte: the end, and the chaining value of a node below the
/// root or the hash of the root.
pub type TreeNodes = BTreeMap<u64, (u64, Digest)>;

/// Adds the nodes of the tree over `total` bytes that cover `start .. start + bytes.len()`, as few as there can be.
///
/// Both ends must be multiples of a chunk (1024 bytes) or the end of the whole. Ranges can be added in any order; once
/// they cover the whole, [`tree_digest`] gives its hash.
pub fn add_tree_nodes(total: u64, start: u64, bytes: &[u8], nodes: &mut TreeNodes) {
    add_below(0..total, total, start, bytes, nodes);
}

fn add_below(node: Range<u64>, total: u64, start: u64, bytes: &[u8], nodes: &mut TreeNodes) {
    let end = start + bytes.len() as u64;
    if node.end <= start || node.start >= end {
        return;
    }
    if node.start < start || node.end > end {
        let (left, right) = children(&node);
        add_below(left, total, start, bytes, nodes);
        return add_below(right, total, start, bytes, nodes);
    }
    let own = &bytes[(node.start - start) as usize..(node.end - start) as usize];
    let digest = if own.len() as u64 == total {
        *blake3::hash(own).as_bytes()
    } else {
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(node.start);
        hasher.update(own);
        hasher.finalize_non_root()
    };
    nodes.insert(node.start, (node.end, digest));
}

fn children(node: &Range<u64>) -> (Range<u64>, Range<u64>) {
    let middle = node.start + left_subtree_len(node.end - node.start);
    (node.start..middle, middle..node.end)
}

/// The BLAKE3 of `total` bytes from nodes that cover them; `None` where one is missing.
pub fn tree_digest(total: u64, nodes: &TreeNodes) -> Option<Digest> {
    digest_below(0..total, total, nodes)
}

fn digest_below(node: Range<u64>, total: u64, nodes: &TreeNodes) -> Option<Digest> {
    match nodes.get(&node.start) {
        Some((end, digest)) if *end == node.end => return Some(*digest),
        // A smaller node may begin where this one does; without any there is nothing to find.
        None => return None,
        _ => {}
    }
    let is_root = node.end - node.start == total;
    let (left, right) = children(&node);
    let (left, right) = (digest_below(left, total, nodes)?, digest_below(right, total, nodes)?);
    Some(if is_root {
        *merge_subtrees_root(&left, &right, Mode::Hash).as_bytes()
    } else {
        merge_subtrees_non_root(&left, &right, Mode::Hash)
    })
}

/// Hexadecimal form of a digest.
pub fn to_hex(digest: &Digest) -> String {
    blake3::Hash::from_bytes(*digest).to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_give_the_hash_of_the_file() {
        let leaf = LEAF_BYTES as usize;
        for len in [1, 1000, leaf - 1, leaf, leaf + 1, 2 * leaf, 3 * leaf + 5, 5 * leaf, 7 * leaf - 3, 8 * leaf] {
            let data: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let leaves: Vec<Digest> = data
                .chunks(leaf)
                .enumerate()
                .map(|(i, bytes)| leaf_digest(bytes, (i * leaf) as u64, len as u64))
                .collect();
            assert_eq!(leaves.len() as u64, leaf_count(len as u64));
            assert_eq!(segment_digest(&leaves), Some(*blake3::hash(&data).as_bytes()), "{len} bytes");
        }
        assert_eq!(segment_digest(&[]), None);
    }

    #[test]
    fn nodes_of_ranges_give_the_hash_of_the_whole() {
        for (len, step) in
            [(1, 4096), (5000, 1024), (70_000, 4096), (70_000, 7 * 1024), (1 << 17, 3 << 10), (9001, 9001)]
        {
            let data: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let mut nodes = TreeNodes::new();
            // The first range last: no order is assumed.
            for (i, bytes) in data.chunks(step).enumerate().skip(1).chain(data.chunks(step).enumerate().take(1)) {
                let complete = tree_digest(len as u64, &nodes).is_some();
                assert!(!complete, "{len} bytes in steps of {step}");
                add_tree_nodes(len as u64, (i * step) as u64, bytes, &mut nodes);
            }
            assert_eq!(tree_digest(len as u64, &nodes), Some(*blake3::hash(&data).as_bytes()), "{len} by {step}");
        }
    }
}
