//! How an upload is done.

use serde::Serialize;
use vt_bundle::hash::{LEAF_BYTES, SEGMENT_BYTES};
use vt_bundle::mmap::HugePages;

/// How the bytes of a bundle's files reach the staging buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoMode {
    /// [`IoMode::Pread`] where most of the image is in the page cache, else [`IoMode::Direct`].
    Auto,
    /// Copied out of a mapping, whose pages are given back behind the copy.
    Mmap,
    /// Read into the buffer through the page cache.
    Pread,
    /// Read into the buffer past the page cache (`O_DIRECT`).
    Direct,
}

impl IoMode {
    /// Name as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            IoMode::Auto => "auto",
            IoMode::Mmap => "mmap",
            IoMode::Pread => "pread",
            IoMode::Direct => "direct",
        }
    }
}

/// How an image becomes resident on a device that shares the host's memory. Any other device gets a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Residency {
    /// [`Residency::Aliased`] or [`Residency::Placed`], whichever a probe of the files finds faster.
    Auto,
    /// The mapped files are the arena.
    Aliased,
    /// The files are read once, past the page cache, into memory that is the arena.
    Placed,
    /// Uploaded through staging buffers, as on a device with memory of its own.
    Copied,
}

impl Residency {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Residency::Auto => "auto",
            Residency::Aliased => "aliased",
            Residency::Placed => "placed",
            Residency::Copied => "copied",
        }
    }
}

/// Sizes and ways of an upload. The defaults are the fastest measured on an H200 behind PCIe 5: between two copies the link rests
/// for some 3 us, which large copies spread; but the ring must stay within the last-level cache, so that the copy engine reads what
/// the readers wrote from there. So several readers fill one buffer: few buffers are being filled at a time, and most of the ring
/// waits for the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct UploadOptions {
    /// Bytes of a staging buffer and of most copies: a power of two, at least a leaf and at most a segment.
    pub chunk_bytes: u64,
    /// Bytes that one reader reads at once: a power of two, at least a leaf and at most a chunk.
    pub part_bytes: u64,
    /// Staging buffers.
    pub depth: usize,
    /// Threads that read.
    pub readers: usize,
    /// Where the bytes come from.
    pub io: IoMode,
    /// Drop pages from the page cache once they are read.
    pub drop_cache: bool,
    /// What a device that shares the host's memory does.
    pub residency: Residency,
}

/// Readers where nothing is said: seven for every eight processors, as copies and hashes need some too; more than sixteen fill
/// no link that there is.
pub fn default_readers() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors * 7).div_ceil(8).min(16)
}

impl Default for UploadOptions {
    fn default() -> Self {
        Self {
            chunk_bytes: 16 << 20,
            part_bytes: 2 << 20,
            depth: 6,
            readers: default_readers(),
            io: IoMode::Auto,
            drop_cache: false,
            residency: Residency::Auto,
        }
    }
}

impl UploadOptions {
    /// Touched memory for the ring of an image of that many bytes, to be made while the driver starts; see
    /// [`crate::load::Accelerator::stock`]. Less where the system has no more: buffers are then made as they are needed.
    pub fn touched(&self, image_bytes: u64) -> Vec<HugePages> {
        let options = self.checked();
        let buffers = options.buffers(image_bytes);
        (0..buffers).map_while(|_| HugePages::new(options.chunk_bytes as usize).ok()).collect()
    }

    /// Buffers that an image of that many bytes can use.
    pub(super) fn buffers(&self, image_bytes: u64) -> usize {
        usize::try_from(image_bytes.div_ceil(self.chunk_bytes)).map_or(self.depth, |chunks| chunks.min(self.depth))
    }

    /// Bytes that a reader reads at once where it shares no buffer with others: large enough that the start of a read does not
    /// count, small enough for a buffer each.
    pub(super) fn alone_bytes(&self) -> u64 {
        self.chunk_bytes.min(8 << 20)
    }

    /// The nearest options that work: chunks of whole leaves that divide a segment, at least two buffers and one reader.
    pub fn checked(mut self) -> Self {
        let whole = |bytes: u64| if bytes.is_power_of_two() { bytes } else { bytes.next_power_of_two() / 2 };
        self.chunk_bytes = whole(self.chunk_bytes.clamp(LEAF_BYTES, SEGMENT_BYTES));
        self.part_bytes = whole(self.part_bytes.clamp(LEAF_BYTES, self.chunk_bytes));
        self.depth = self.depth.clamp(2, 4096);
        self.readers = self.readers.clamp(1, 256);
        self
    }
}
