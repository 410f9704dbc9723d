//! Read-only file mappings: the one place of this crate, and for the converter, that holds `unsafe`.

use std::fs::File;
use std::io;

use memmap2::{Advice, Mmap, MmapOptions, UncheckedAdvice};

/// Maps a whole file read-only; `None` for an empty file, which cannot be mapped.
///
/// The caller must treat the bytes as untrusted: another process may change the file while it is mapped, and every
/// consumer of this crate validates or hashes what it reads. Truncation by another process while the mapping is in use
/// ends the process with SIGBUS; bundles and checkpoints are immutable by contract.
///
/// # Errors
/// What the operating system says about `fstat` or `mmap`.
pub fn map_readonly(file: &File) -> io::Result<Option<Mmap>> {
    let len = file.metadata()?.len();
    if len == 0 {
        return Ok(None);
    }
    let len = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    // SAFETY: the mapping is read-only and private to this process; the documented contract above is that files are
    // not truncated while mapped, and no reference to the bytes assumes that they stay constant.
    let map = unsafe { MmapOptions::new().len(len).map(file)? };
    Ok(Some(map))
}

/// Asks the kernel to read a range of the mapping ahead, without waiting.
pub fn will_need(map: &Mmap, offset: usize, len: usize) {
    // Advice is a hint: an error changes nothing that the caller can act on.
    let _ = map.advise_range(Advice::WillNeed, offset, len);
}

/// A page fault maps its neighbours, too, where they are in the page cache: 64 KiB (Linux, `fault_around_bytes`), or the whole
/// large folio that the page belongs to, at most what one entry of a page directory covers. What was mapped beside a range
/// goes with it: it would add up over many ranges, each of which is given back to its own ends only.
const AROUND: usize = 2 << 20;

/// A range with the pages that reading it can have mapped, within `size` bytes.
fn around(offset: usize, len: usize, size: usize) -> std::ops::Range<usize> {
    let page = rustix::param::page_size();
    let start = offset.min(size).saturating_sub(AROUND) / page * page;
    start..offset.saturating_add(len).saturating_add(AROUND).min(size)
}

/// Gives the resident pages of a range back, and those around it; a later access reads them from the file again.
pub fn release(map: &Mmap, offset: usize, len: usize) {
    let range = around(offset, len, map.len());
    let (offset, len) = (range.start, range.len());
    // SAFETY: the mapping is file-backed and read-only, so dropped pages are re-read from the file with the same bytes.
    let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, len) };
}

/// Files mapped one after the other into one contiguous, read-only range of addresses.
///
/// All files but the last must have a length that is a multiple of the page size (segments have exactly 1 GiB), so
/// that a tensor may cross from one file to the next. Dropping it unmaps everything.
#[derive(Debug)]
pub struct ContiguousMap {
    start: *mut core::ffi::c_void,
    len: usize,
}

// SAFETY: the range is read-only memory owned by this value; sharing or moving it between threads is like `&[u8]`.
unsafe impl Send for ContiguousMap {}
// SAFETY: as above, only shared reads are possible.
unsafe impl Sync for ContiguousMap {}

impl ContiguousMap {
    /// Maps `files`, given with their lengths, in order. The contract of [`map_readonly`] applies.
    ///
    /// # Errors
    /// What the operating system says about `mmap`, or `InvalidInput` if a length before the last is not a multiple of
    /// the page size or the sum does not fit the address space.
    pub fn new(files: &[(File, u64)]) -> io::Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags};
        let page = rustix::param::page_size() as u64;
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let total = files.iter().try_fold(0u64, |sum, (_, len)| sum.checked_add(*len)).ok_or_else(invalid)?;
        let total = usize::try_from(total).map_err(|_| invalid())?;
        if files.split_last().is_some_and(|(_, before)| before.iter().any(|(_, len)| !len.is_multiple_of(page))) {
            return Err(invalid());
        }
        if total == 0 {
            return Ok(Self { start: std::ptr::NonNull::dangling().as_ptr(), len: 0 });
        }
        // SAFETY: a fresh anonymous reservation at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                total,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        // From here on dropping `map` unmaps the whole reservation, whatever has been mapped over it.
        let map = Self { start, len: total };
        let mut at = 0usize;
        for (file, len) in files {
            let len = *len as usize;
            if len > 0 {
                // SAFETY: `at + len <= total`, so the target lies inside the reservation made above, which nobody
                // else knows; MAP_FIXED replaces exactly that part of it. The file's contract is `map_readonly`'s.
                unsafe {
                    rustix::mm::mmap(start.add(at), len, ProtFlags::READ, MapFlags::SHARED | MapFlags::FIXED, file, 0)?;
                }
            }
            at += len;
        }
        Ok(map)
    }

    /// The bytes of all files.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range `start .. start + len` is mapped readable until drop; for an empty map the pointer is
        // dangling but aligned, which an empty slice allows.
        unsafe { std::slice::from_raw_parts(self.start.cast::<u8>(), self.len) }
    }
}

impl ContiguousMap {
    /// Makes the pages of a range resident, and waits for them: reads them from the files where they are not in the page
    /// cache.
    pub fn populate(&self, offset: usize, len: usize) {
        let page = rustix::param::page_size();
        let start = offset.min(self.len) / page * page;
        let end = offset.saturating_add(len).min(self.len);
        if end <= start {
            return;
        }
        // SAFETY: both ranges lie inside this value's mapping, and the advice changes no byte of it.
        let there = unsafe {
            let _ = rustix::mm::madvise(self.start.add(start), end - start, rustix::mm::Advice::WillNeed);
            rustix::mm::madvise(self.start.add(start), end - start, rustix::mm::Advice::LinuxPopulateRead)
        };
        if there.is_err() {
            // Kernels before 5.14 do not know the advice: a look at every page does the same.
            let sum = self.bytes()[start..end].iter().step_by(page).fold(0u8, |sum, byte| sum ^ byte);
            std::hint::black_box(sum);
        }
    }

    /// Gives the resident pages of a range back, and those around it; a later access reads them from the files again.
    pub fn release(&self, offset: usize, len: usize) {
        let std::ops::Range { start, end } = around(offset, len, self.len);
        if end > start {
            // SAFETY: the range lies inside this value's mapping, which is read-only and file-backed: dropped pages
            // come back from the files with the same bytes. The advice is a hint, so its result is of no use.
            let _ =
                unsafe { rustix::mm::madvise(self.start.add(start), end - start, rustix::mm::Advice::LinuxDontNeed) };
        }
    }
}

impl Drop for ContiguousMap {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the range was mapped by `new` and no slice of it outlives `self`.
            let _ = unsafe { rustix::mm::munmap(self.start, self.len) };
        }
    }
}

/// Memory of the process's own, in huge pages where the system has them.
///
/// For buffers that are filled over and over: fewer entries of the translation cache, and quicker to page-lock.
#[derive(Debug)]
pub struct HugePages {
    reserved: *mut core::ffi::c_void,
    reserved_len: usize,
    start: *mut u8,
    len: usize,
}

// SAFETY: the range is owned by this value alone, like a `Box<[u8]>`.
unsafe impl Send for HugePages {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for HugePages {}

impl HugePages {
    /// What a huge page has on the processors that matter; the start of the memory is a multiple of it.
    pub const ALIGN: usize = 2 << 20;

    /// Maps and touches `len` bytes, all zero.
    ///
    /// # Errors
    /// What the operating system says about `mmap`.
    pub fn new(len: usize) -> io::Result<Self> {
        let mut memory = Self::untouched(len)?;
        memory.bytes_mut().fill(0);
        Ok(memory)
    }

    /// Maps `len` bytes, all zero, that become resident as they are touched.
    ///
    /// # Errors
    /// What the operating system says about `mmap`.
    pub fn untouched(len: usize) -> io::Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags};
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let reserved_len = len.max(1).checked_add(Self::ALIGN).ok_or_else(too_large)?;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing memory.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                reserved_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let skip = reserved.align_offset(Self::ALIGN);
        // SAFETY: `skip < ALIGN`, so the start and `len` bytes from it lie inside the mapping.
        let start = unsafe { reserved.cast::<u8>().add(skip) };
        let memory = Self { reserved, reserved_len, start, len };
        // SAFETY: the range lies inside the mapping, which is private and anonymous. The advice is a hint: without it the
        // pages are small.
        let _ = unsafe { rustix::mm::madvise(start.cast(), len, rustix::mm::Advice::LinuxHugepage) };
        Ok(memory)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped readable and writable until drop, and zero at first.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the exclusive reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    /// The start, without a reference to bytes that a device may be using.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no slice of it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.reserved, self.reserved_len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_aligned_and_zero() {
        let mut memory = HugePages::new(5 << 20).expect("memory");
        assert_eq!(memory.start() as usize % HugePages::ALIGN, 0);
        assert!(memory.bytes().iter().all(|&b| b == 0));
        memory.bytes_mut()[(5 << 20) - 1] = 7;
        assert_eq!(memory.bytes().last(), Some(&7));
        assert!(HugePages::new(usize::MAX).is_err());
    }

    /// Resident KiB of the mapping that begins at an address.
    fn resident_kib(start: usize) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("Linux");
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-")));
        let rss = lines.find_map(|line| line.strip_prefix("Rss:")).expect("a mapping has a size");
        rss.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    #[test]
    fn ranges_that_are_given_back_leave_nothing_between_them() {
        const PIECE: usize = 100 << 10;
        let mut file = tempfile::tempfile().expect("file");
        std::io::Write::write_all(&mut file, &vec![1; 100 * PIECE]).expect("written");
        let whole = ContiguousMap::new(&[(file.try_clone().expect("handle"), 100 * PIECE as u64)]).expect("mapped");
        let single = map_readonly(&file).expect("mapped").expect("not empty");
        for at in (0..100 * PIECE).step_by(PIECE) {
            let sum = |bytes: &[u8]| bytes.iter().map(|&b| b as usize).sum::<usize>();
            assert_eq!(sum(&whole.bytes()[at..at + PIECE]) + sum(&single[at..at + PIECE]), 2 * PIECE);
            whole.release(at, PIECE);
            release(&single, at, PIECE);
        }
        assert_eq!(resident_kib(whole.bytes().as_ptr() as usize), 0);
        assert_eq!(resident_kib(single.as_ptr() as usize), 0);
    }
}
