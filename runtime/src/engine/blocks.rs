//! Which blocks of the key/value cache belong to whom, and what is worth keeping in those that are free.
//!
//! A block whose positions are all computed is known by a hash of everything that its keys and values
//! depend on: the salt and all tokens up to its end. A block keeps its hash when it is freed, and the
//! next sequence with the same beginning takes it over. Free blocks wait in the order in which they were
//! freed; the oldest is overwritten first.

use super::request::CacheSalt;
use std::collections::HashMap;

/// Hash of a chain of blocks: BLAKE3 over the parent's hash and the block's tokens. A collision would
/// give one user another's context, so it is as long as a cryptographic hash must be.
pub type BlockHash = [u8; 32];

/// Hash of the block of `tokens` that follows the chain `parent`; a chain starts with its salt.
pub fn chain_hash(parent: Option<&BlockHash>, salt: &CacheSalt, tokens: &[u32]) -> BlockHash {
    let mut hasher = blake3::Hasher::new_keyed(parent.unwrap_or(salt.as_bytes()));
    // Distinguishes a salt from a parent of the same bytes.
    hasher.update(&[u8::from(parent.is_some())]);
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// No block; the end of a list.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Block {
    references: u32,
    hash: Option<BlockHash>,
    /// Neighbours in the list of free blocks.
    previous: u32,
    next: u32,
}

/// All blocks of one cache.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    by_hash: HashMap<BlockHash, u32>,
    /// Oldest and newest free block.
    first_free: u32,
    last_free: u32,
    free: usize,
}

impl BlockPool {
    /// A pool of `count` free blocks.
    pub fn new(count: usize) -> Self {
        // Block numbers are u32 in block tables, and NONE is not a number.
        let count = count.min(NONE as usize);
        let mut pool = Self {
            blocks: vec![Block { references: 0, hash: None, previous: NONE, next: NONE }; count],
            // Twice, so that it never grows: what removals leave is cleared in place while at most half is in use.
            by_hash: HashMap::with_capacity(2 * count),
            first_free: NONE,
            last_free: NONE,
            free: 0,
        };
        for block in 0..count as u32 {
            pool.append_free(block);
        }
        pool
    }

    /// Blocks in all.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the pool has no blocks at all.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks that no sequence uses, cached ones among them.
    pub fn free(&self) -> usize {
        self.free
    }

    /// Takes `count` blocks, or none where there are fewer.
    pub fn allocate(&mut self, count: usize, table: &mut Vec<u32>) -> bool {
        if count > self.free {
            return false;
        }
        for _ in 0..count {
            let block = self.first_free;
            self.unlink(block);
            if let Some(hash) = self.blocks[block as usize].hash.take() {
                self.by_hash.remove(&hash);
            }
            self.blocks[block as usize].references = 1;
            table.push(block);
        }
        true
    }

    /// The block known by `hash`.
    pub fn find(&self, hash: &BlockHash) -> Option<u32> {
        self.by_hash.get(hash).copied()
    }

    /// Whether `block` is free: a cached one that taking over would remove from the free blocks.
    pub fn is_free(&self, block: u32) -> bool {
        self.blocks[block as usize].references == 0
    }

    /// Takes a share of a cached block.
    pub fn share(&mut self, block: u32) {
        if self.is_free(block) {
            self.unlink(block);
        }
        self.blocks[block as usize].references += 1;
    }

    /// Makes a computed block known by `hash`. Of two blocks with the same content the first stays known.
    pub fn register(&mut self, block: u32, hash: BlockHash) {
        if self.blocks[block as usize].hash.is_none() && !self.by_hash.contains_key(&hash) {
            self.blocks[block as usize].hash = Some(hash);
            self.by_hash.insert(hash, block);
        }
    }

    /// Gives up one share of each block of a sequence. The end of a sequence is overwritten before its
    /// beginning, which more sequences can use.
    pub fn release(&mut self, table: &mut Vec<u32>) {
        while let Some(block) = table.pop() {
            let entry = &mut self.blocks[block as usize];
            entry.references = entry.references.saturating_sub(1);
            if entry.references == 0 {
                self.append_free(block);
            }
        }
    }

    fn append_free(&mut self, block: u32) {
        self.blocks[block as usize].previous = self.last_free;
        self.blocks[block as usize].next = NONE;
        match self.last_free {
            NONE => self.first_free = block,
            last => self.blocks[last as usize].next = block,
        }
        self.last_free = block;
        self.free += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Block { previous, next, .. } = self.blocks[block as usize];
        match previous {
            NONE => self.first_free = next,
            previous => self.blocks[previous as usize].next = next,
        }
        match next {
            NONE => self.last_free = previous,
            next => self.blocks[next as usize].previous = previous,
        }
        self.free -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash(number: u8) -> BlockHash {
        [number; 32]
    }

    #[test]
    fn freed_blocks_are_found_until_overwritten() {
        let mut pool = BlockPool::new(3);
        let mut table = Vec::new();
        assert!(pool.allocate(2, &mut table));
        pool.register(table[0], hash(1));
        pool.register(table[1], hash(2));
        let first = table[0];
        pool.release(&mut table);
        assert_eq!(pool.free(), 3);
        assert_eq!(pool.find(&hash(1)), Some(first));

        // Taken over: no longer among the free ones, and not to be overwritten.
        pool.share(first);
        let mut other = Vec::new();
        assert!(!pool.allocate(3, &mut other));
        assert!(pool.allocate(2, &mut other));
        assert!(!other.contains(&first));
        assert_eq!(pool.find(&hash(1)), Some(first));
        assert_eq!(pool.find(&hash(2)), None);
    }

    #[test]
    fn the_end_of_a_sequence_is_overwritten_first() {
        let mut pool = BlockPool::new(2);
        let mut table = Vec::new();
        pool.allocate(2, &mut table);
        pool.register(table[0], hash(1));
        pool.register(table[1], hash(2));
        pool.release(&mut table);
        pool.allocate(1, &mut table);
        assert!(pool.find(&hash(1)).is_some());
        assert!(pool.find(&hash(2)).is_none());
    }

    #[test]
    fn the_table_of_hashes_never_grows() {
        let mut pool = BlockPool::new(300);
        let capacity = pool.by_hash.capacity();
        let mut table = Vec::new();
        for number in 0..20_000u32 {
            assert!(pool.allocate(1, &mut table));
            let hash = chain_hash(None, &CacheSalt::from_secret(b"a"), &[number]);
            pool.register(table[0], hash);
            pool.release(&mut table);
            // Less for a while, by what removals left.
            assert!(pool.by_hash.capacity() <= capacity, "{number}");
        }
        assert_eq!(pool.by_hash.len(), 300);
    }

    #[test]
    fn shared_blocks_need_every_release() {
        let mut pool = BlockPool::new(1);
        let mut table = Vec::new();
        pool.allocate(1, &mut table);
        let mut second = table.clone();
        pool.share(table[0]);
        pool.release(&mut table);
        assert_eq!(pool.free(), 0);
        pool.release(&mut second);
        assert_eq!(pool.free(), 1);
    }

    #[test]
    fn chains_differ_by_salt_parent_and_tokens() {
        let (a, b) = (CacheSalt::from_secret(b"a"), CacheSalt::from_secret(b"b"));
        let root = chain_hash(None, &a, &[1, 2]);
        assert_eq!(root, chain_hash(None, &a, &[1, 2]));
        let others = [
            chain_hash(None, &b, &[1, 2]),
            chain_hash(None, &a, &[2, 1]),
            chain_hash(Some(&root), &a, &[1, 2]),
            chain_hash(Some(a.as_bytes()), &a, &[1, 2]),
        ];
        assert!(others.iter().all(|other| *other != root));
    }

    proptest! {
        /// Whatever sequences come and go, no block is in two unshared tables and none is lost.
        #[test]
        fn blocks_are_conserved(operations in proptest::collection::vec((0usize..4, 0usize..6), 0..80)) {
            let mut pool = BlockPool::new(16);
            let mut tables: Vec<Vec<u32>> = vec![Vec::new(); 4];
            let mut counter = 0u8;
            for (owner, count) in operations {
                if count == 0 {
                    pool.release(&mut tables[owner]);
                } else {
                    let before = tables[owner].len();
                    if pool.allocate(count, &mut tables[owner]) {
                        for &block in &tables[owner][before..] {
                            counter = counter.wrapping_add(1);
                            pool.register(block, hash(counter));
                        }
                    }
                }
                let used: Vec<u32> = tables.concat();
                let mut distinct = used.clone();
                distinct.sort_unstable();
                distinct.dedup();
                prop_assert_eq!(distinct.len(), used.len());
                prop_assert_eq!(pool.free() + used.len(), 16);
            }
        }
    }
}
