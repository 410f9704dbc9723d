//! How an image is cut into copies.

use vt_bundle::hash::LEAF_BYTES;

/// Bytes of one copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// First byte within the image.
    pub(super) offset: u64,
    /// Bytes.
    pub(super) len: u64,
}

/// Cuts `bytes` bytes into chunks of at most `largest`, a power of two of leaves. Each starts at a multiple of its length rounded
/// up to leaves, so that none crosses a segment. They grow from one leaf at the start, so that the first copy begins early, and
/// shrink towards the end, so that little is left to do once the last byte has been read.
pub(super) fn chunks(bytes: u64, largest: u64) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let mut offset = 0;
    while offset < bytes {
        let left = bytes - offset;
        let mut len = largest;
        while len > LEAF_BYTES && (len > offset || len > left / 2 || !offset.is_multiple_of(len)) {
            len /= 2;
        }
        let len = len.min(left);
        chunks.push(Chunk { offset, len });
        offset += len;
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_everything_once_and_are_aligned() {
        for largest in [1, 2, 8, 64].map(|leaves| leaves * LEAF_BYTES) {
            for bytes in
                [0, 1, LEAF_BYTES, 5 * LEAF_BYTES + 256, 77 * LEAF_BYTES, 3 * largest, 1000 * LEAF_BYTES + 4096]
            {
                let chunks = chunks(bytes, largest);
                let end = chunks.iter().fold(0, |at, chunk| {
                    assert_eq!(chunk.offset, at);
                    assert!(chunk.len > 0 && chunk.len <= largest);
                    let size = chunk.len.next_multiple_of(LEAF_BYTES);
                    assert!(size.is_power_of_two() && at.is_multiple_of(size), "{chunk:?}");
                    at + chunk.len
                });
                assert_eq!(end, bytes);
            }
        }
    }

    #[test]
    fn chunks_are_small_at_both_ends_only() {
        let leaves: Vec<u64> = chunks(50 * LEAF_BYTES + 9, 8 * LEAF_BYTES).iter().map(|c| c.len / LEAF_BYTES).collect();
        assert_eq!(leaves, [1, 1, 2, 4, 8, 8, 8, 8, 4, 2, 2, 1, 1, 0]);
    }
}
