//! Content hashing: plain BLAKE3 of every file, and chaining values of the 1 MiB leaves of every segment.
//!
//! A leaf is 1024 chunks at an aligned position, so it is a complete subtree of the file's BLAKE3 tree: its chaining
//! value can be computed alone, on any thread or on the device, and the file's hash follows from the leaves. Where a
//! segment has a single leaf, its entry in the leaf table is the file's hash itself (the root is finalised otherwise).

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

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
}
