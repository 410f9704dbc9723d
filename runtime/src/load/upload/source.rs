//! Reading an image's bytes into staging buffers.

use super::IoMode;
use crate::load::LoadError;
use rustix::fs::{Advice, Mode, OFlags};
use rustix::io::ReadWriteFlags;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use vt_bundle::hash::SEGMENT_BYTES;
use vt_bundle::manifest::Placement;
use vt_bundle::mmap::ContiguousMap;
use vt_bundle::{Bundle, BundleError};

/// Alignment of offset, length and address for `O_DIRECT`: no file system asks for more.
const DIRECT_ALIGN: usize = 4096;
/// Bytes of one read past the page cache. With one read of that size for each of 8 to 16 readers a virtual disk was up to a third
/// faster than with 8 MiB each: more only waits in its queue.
const DIRECT_READ: usize = 512 << 10;
/// Pages that [`Source::cached_share`] looks at.
const PROBES: u64 = 256;
/// File systems behind a network, by `f_type`: NFS, SMB 1 and 2, Ceph, Lustre, AFS, 9P. A mapping there faults page by page,
/// and a failed fault ends the process.
const NETWORK: [u64; 7] = [0x6969, 0x517b, 0xfe53_4d42, 0x00c3_6400, 0x0bd0_0bd0, 0x5346_414f, 0x0102_1997];

/// The segments of an image, open for reading at any offset from any thread.
#[derive(Debug)]
pub struct Source {
    files: Vec<Segment>,
    bytes: u64,
    mode: IoMode,
    map: Option<ContiguousMap>,
    drop_cache: bool,
    note: Option<String>,
}

#[derive(Debug)]
struct Segment {
    path: PathBuf,
    size: u64,
    cached: File,
    direct: Option<File>,
}

impl Source {
    /// Opens the segments of the image and settles how they are read.
    ///
    /// # Errors
    /// [`BundleError::Io`] with the file.
    pub fn open(bundle: &Bundle, io: IoMode, drop_cache: bool) -> Result<Self, LoadError> {
        let mut files = Vec::new();
        for segment in &bundle.space(Placement::Image).segments {
            let path = bundle.dir().join(&segment.file);
            let cached = File::open(&path).map_err(|source| BundleError::Io { path: path.clone(), source })?;
            files.push(Segment { path, size: segment.size, cached, direct: None });
        }
        let bytes = bundle.space(Placement::Image).size;
        let mut source = Self { files, bytes, mode: IoMode::Pread, map: None, drop_cache, note: None };
        match io {
            IoMode::Auto if source.cached_share() < 0.5 => source.go_direct(),
            IoMode::Direct => source.go_direct(),
            IoMode::Mmap if source.network() => {
                source.note = Some("the bundle lies on a network file system: read, not mapped".to_owned());
            }
            IoMode::Mmap => {
                source.map = Some(bundle.map(Placement::Image)?);
                source.mode = IoMode::Mmap;
            }
            IoMode::Auto | IoMode::Pread => {}
        }
        Ok(source)
    }

    /// How the bytes are read: never [`IoMode::Auto`].
    pub fn mode(&self) -> IoMode {
        self.mode
    }

    /// Why it is another way than the one asked for.
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Bytes of the image.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Share of the image in the page cache, from a sample. Waits for nothing and fetches next to nothing from the disk. A file
    /// system that cannot tell counts as cached, so that it is read the ordinary way.
    pub fn cached_share(&self) -> f64 {
        // Else newer kernels begin to read ahead of every page that is not there.
        self.advise(Advice::Random);
        let step = (self.bytes / PROBES).max(DIRECT_ALIGN as u64);
        let (mut there, mut asked) = (0u64, 0u64);
        let mut at = 0;
        while at < self.bytes {
            let segment = &self.files[(at / SEGMENT_BYTES) as usize];
            let mut byte = [0u8];
            let mut buffers = [IoSliceMut::new(&mut byte)];
            match rustix::io::preadv2(&segment.cached, &mut buffers, at % SEGMENT_BYTES, ReadWriteFlags::NOWAIT) {
                Err(rustix::io::Errno::AGAIN) => {}
                _ => there += 1,
            }
            asked += 1;
            at += step;
        }
        self.advise(Advice::Normal);
        if asked == 0 { 1.0 } else { there as f64 / asked as f64 }
    }

    /// Hints how the files are read through the page cache.
    fn advise(&self, advice: Advice) {
        for segment in &self.files {
            let _ = rustix::fs::fadvise(&segment.cached, 0, None, advice);
        }
    }

    fn network(&self) -> bool {
        let is = |s: &Segment| rustix::fs::fstatfs(&s.cached).is_ok_and(|f| NETWORK.contains(&(f.f_type as u64)));
        self.files.first().is_some_and(is)
    }

    fn go_direct(&mut self) {
        for segment in &mut self.files {
            let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
            match rustix::fs::open(&segment.path, flags, Mode::empty()) {
                Ok(fd) => segment.direct = Some(File::from(fd)),
                Err(error) => {
                    let path = segment.path.display();
                    self.note = Some(format!("{path}: O_DIRECT: {error}; read through the page cache"));
                    return;
                }
            }
        }
        self.mode = IoMode::Direct;
    }

    /// Reads `to.len()` bytes from an offset of the image. They must not cross a segment; for [`IoMode::Direct`] the offset
    /// and the address of `room` are multiples of 4096, and `room` holds `len` rounded up to that.
    ///
    /// # Errors
    /// [`BundleError::Io`] with the file and the offset.
    pub fn read(&self, offset: u64, len: usize, room: &mut [u8]) -> Result<(), BundleError> {
        let segment = &self.files[(offset / SEGMENT_BYTES) as usize];
        let at = offset % SEGMENT_BYTES;
        debug_assert!(at + len as u64 <= segment.size);
        let result = match (&self.map, &segment.direct) {
            (Some(map), _) => {
                let from = offset as usize;
                // One call maps all pages; a fault each takes longer than the copy.
                map.populate(from, len);
                room[..len].copy_from_slice(&map.bytes()[from..from + len]);
                map.release(from, len);
                Ok(())
            }
            (None, Some(file)) => read_direct(file, at, len, room),
            (None, None) => segment.cached.read_exact_at(&mut room[..len], at),
        };
        result.map_err(|error| {
            let source = io::Error::new(error.kind(), format!("bytes {at} to {}: {error}", at + len as u64));
            BundleError::Io { path: segment.path.clone(), source }
        })?;
        if self.drop_cache && self.mode != IoMode::Direct {
            // A hint; dirty or locked pages stay.
            let _ = rustix::fs::fadvise(&segment.cached, at, NonZeroU64::new(len as u64), Advice::DontNeed);
        }
        Ok(())
    }
}

/// Reads whole blocks until the wanted bytes are there; the last block of a file may end early.
fn read_direct(file: &File, at: u64, len: usize, room: &mut [u8]) -> io::Result<()> {
    let whole = len.next_multiple_of(DIRECT_ALIGN).min(room.len());
    let mut done = 0;
    while done < len {
        // After a read that ended within a block, this block is read again.
        let from = done / DIRECT_ALIGN * DIRECT_ALIGN;
        match file.read_at(&mut room[from..whole.min(from + DIRECT_READ)], at + from as u64) {
            Ok(n) if from + n > done => done = from + n,
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn direct_reads_end_with_the_file() {
        let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let data: Vec<u8> = (0..3 * DIRECT_ALIGN + 100).map(|i| (i % 251) as u8).collect();
        file.write_all(&data).unwrap();
        file.as_file().sync_all().unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECT;
        let Ok(fd) = rustix::fs::open(file.path(), flags, Mode::empty()) else {
            return eprintln!("SKIPPED: this file system has no O_DIRECT");
        };
        let mut room = vec![0u8; 5 * DIRECT_ALIGN];
        let start = room.as_ptr().align_offset(DIRECT_ALIGN);
        let len = 2 * DIRECT_ALIGN + 100;
        let file = File::from(fd);
        read_direct(&file, DIRECT_ALIGN as u64, len, &mut room[start..start + 3 * DIRECT_ALIGN]).unwrap();
        assert_eq!(room[start..start + len], data[DIRECT_ALIGN..]);
        let error = read_direct(&file, DIRECT_ALIGN as u64, len + 1, &mut room[start..start + 3 * DIRECT_ALIGN]);
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
