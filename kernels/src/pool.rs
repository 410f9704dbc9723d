//! Threads for compute: persistent, forked and joined within microseconds, work divided the same way every time.
//!
//! A token of a small model is some 150 parallel regions of a few microseconds each, so waiting threads spin for a
//! while before they sleep. Division of work depends on sizes and the thread count only; no kernel of this crate lets it
//! change a result.
//!
//! This module and `simd` are the two rooms of the crate that hold `unsafe`: a persistent thread cannot be
//! lent a borrowed closure, nor two threads disjoint parts of one slice by column, without it. The interface is safe.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Pauses before a waiting worker sleeps: some tens of microseconds, longer than the serial code between two regions.
const SPINS_BEFORE_PARK: u32 = 4000;
/// Pauses before a waiting caller starts to yield its time slice, in case a worker has been preempted.
const SPINS_BEFORE_YIELD: u32 = 4000;

/// One thread's place in a parallel region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Index of the thread, `0..count`; the caller is 0.
    pub index: usize,
    /// Threads in the region.
    pub count: usize,
}

impl Worker {
    /// This thread's share of `0..total`: contiguous, sizes differing by one at most.
    pub fn share(&self, total: usize) -> Range<usize> {
        let (each, rest) = (total / self.count, total % self.count);
        let start = self.index * each + self.index.min(rest);
        start..start + each + usize::from(self.index < rest)
    }
}

/// A region's closure with its lifetime erased. Valid only while [`Pool::run`] waits.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(Worker) + Sync + 'static));

struct Shared {
    /// Incremented once per region; a worker runs the job when it sees a new value.
    epoch: AtomicU32,
    /// Workers that have not finished the present region.
    running: AtomicU32,
    /// A worker's closure panicked in the present region.
    panicked: AtomicBool,
    /// The pool is being dropped.
    closing: AtomicBool,
    /// One flag per worker: it sleeps, or is about to.
    sleeping: Box<[AtomicBool]>,
    /// Written by the caller before `epoch` is incremented, read by workers after.
    job: UnsafeCell<Option<Job>>,
}

// SAFETY: `job` is written only between regions, when no worker reads it; the release increment of `epoch` publishes it
// and the workers' release decrements of `running` end their reads before the caller writes again.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` refers to a `Sync` closure, which may be called from any thread.
unsafe impl Send for Shared {}

/// Persistent compute threads. Dropping the pool ends them.
pub struct Pool {
    shared: Arc<Shared>,
    /// Held for the length of a region, so that two callers take turns.
    region: Mutex<()>,
    handles: Vec<JoinHandle<()>>,
    threads: Vec<Thread>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

impl Pool {
    /// A pool of `threads` threads, the caller included; 0 is taken as 1.
    ///
    /// # Errors
    /// What the operating system says where it does not start a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let workers = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            running: AtomicU32::new(0),
            panicked: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            sleeping: (0..workers).map(|_| AtomicBool::new(false)).collect(),
            job: UnsafeCell::new(None),
        });
        let mut pool = Self { shared, region: Mutex::new(()), handles: Vec::new(), threads: Vec::new() };
        for index in 1..=workers {
            let shared = Arc::clone(&pool.shared);
            let worker = Worker { index, count: workers + 1 };
            let handle =
                thread::Builder::new().name(format!("compute-{index}")).spawn(move || work(&shared, worker))?;
            pool.threads.push(handle.thread().clone());
            pool.handles.push(handle);
        }
        Ok(pool)
    }

    /// Threads that a region runs on, the caller included.
    pub fn threads(&self) -> usize {
        self.shared.sleeping.len() + 1
    }

    /// Calls `body` once on every thread, and returns when all have returned.
    ///
    /// A region must not start another on the same pool: it would wait for itself.
    ///
    /// # Panics
    /// Where `body` panics on any thread, after all have returned.
    pub fn run<F: Fn(Worker) + Sync>(&self, body: F) {
        let count = self.threads();
        if count == 1 {
            return body(Worker { index: 0, count: 1 });
        }
        let guard = self.region.lock().unwrap_or_else(PoisonError::into_inner);
        let erased: *const (dyn Fn(Worker) + Sync + '_) = &body;
        // SAFETY: only the lifetime changes. The pointer is used by workers between the increment of `epoch` and their
        // decrement of `running`; this function does not return or unwind before `running` is zero.
        let job = Job(unsafe {
            std::mem::transmute::<*const (dyn Fn(Worker) + Sync + '_), *const (dyn Fn(Worker) + Sync + 'static)>(erased)
        });
        // SAFETY: `running` was zero at the end of the previous region, so no worker reads the cell now, and `guard`
        // keeps other callers out.
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.running.store(count as u32 - 1, Ordering::Relaxed);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake();
        let own = catch_unwind(AssertUnwindSafe(|| body(Worker { index: 0, count })));
        let mut spins = 0u32;
        while self.shared.running.load(Ordering::Acquire) != 0 {
            if spins < SPINS_BEFORE_YIELD {
                spins += 1;
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
        let elsewhere = self.shared.panicked.swap(false, Ordering::Relaxed);
        drop(guard);
        if let Err(payload) = own {
            resume_unwind(payload);
        }
        assert!(!elsewhere, "a compute thread panicked; its message is on standard error");
    }

    fn wake(&self) {
        for (flag, thread) in self.shared.sleeping.iter().zip(&self.threads) {
            if flag.swap(false, Ordering::SeqCst) {
                thread.unpark();
            }
        }
    }

    /// Divides `data`, rows of `width` elements, by rows: `body(first_row, rows)` once on every thread that gets any.
    ///
    /// # Panics
    /// Where `data` is not a whole number of rows.
    pub fn rows<T, F>(&self, data: &mut [T], width: usize, body: F)
    where
        T: Send,
        F: Fn(usize, &mut [T]) + Sync,
    {
        assert!(width > 0 && data.len().is_multiple_of(width), "{} elements in rows of {width}", data.len());
        let total = data.len() / width;
        let parts = Parts::new(data);
        self.run(|worker| {
            let share = worker.share(total);
            if !share.is_empty() {
                // SAFETY: shares of different workers are disjoint, so these ranges of `data` are.
                let rows = unsafe { parts.slice(share.start * width..share.end * width) };
                body(share.start, rows);
            }
        });
    }

    /// Calls `body(index, item)` for every item, each on one thread; contiguous shares in order.
    pub fn each<T, F>(&self, items: &mut [T], body: F)
    where
        T: Send,
        F: Fn(usize, &mut T) + Sync,
    {
        self.rows(items, 1, |first, share| {
            for (i, item) in share.iter_mut().enumerate() {
                body(first + i, item);
            }
        });
    }

    /// Divides the matrix `data` `[rows, stride]` by columns: `body` gets a block of whole units of `unit` columns.
    /// The last unit of a row may be short.
    ///
    /// # Panics
    /// Where `data` is shorter than `rows * stride` or `unit` is zero.
    pub fn columns<F>(&self, data: &mut [f32], stride: usize, unit: usize, body: F)
    where
        F: Fn(&mut ColumnBlock<'_>) + Sync,
    {
        assert!(unit > 0 && stride > 0, "columns of a matrix of stride {stride} in units of {unit}");
        let (rows, units) = (data.len() / stride, stride.div_ceil(unit));
        let parts = Parts::new(data);
        self.run(|worker| {
            let share = worker.share(units);
            if !share.is_empty() {
                let columns = share.start * unit..(share.end * unit).min(stride);
                body(&mut ColumnBlock { parts: &parts, rows: 0..rows, stride, columns });
            }
        });
    }

    /// Divides the matrix `data` `[rows, stride]` into blocks of `row_unit` rows by `unit` columns, and calls `body` for
    /// each, those of one thread one after the other, column by column.
    ///
    /// # Panics
    /// Where a unit or the stride is zero.
    pub fn blocks<F>(&self, data: &mut [f32], stride: usize, row_unit: usize, unit: usize, body: F)
    where
        F: Fn(Worker, &mut ColumnBlock<'_>) + Sync,
    {
        let grid = Grid::new(data, stride, row_unit, unit);
        self.run(|worker| {
            for index in worker.share(grid.len()) {
                body(worker, &mut grid.block(index));
            }
        });
    }

    /// [`Pool::blocks`], dealt to the threads like cards: for blocks whose cost grows along the rows.
    ///
    /// # Panics
    /// Where a unit or the stride is zero.
    pub fn blocks_dealt<F>(&self, data: &mut [f32], stride: usize, row_unit: usize, unit: usize, body: F)
    where
        F: Fn(Worker, &mut ColumnBlock<'_>) + Sync,
    {
        let grid = Grid::new(data, stride, row_unit, unit);
        self.run(|worker| {
            for index in (worker.index..grid.len()).step_by(worker.count) {
                body(worker, &mut grid.block(index));
            }
        });
    }
}

/// A matrix cut into blocks, numbered down the rows first.
struct Grid<'a> {
    parts: Parts<'a, f32>,
    rows: usize,
    stride: usize,
    row_unit: usize,
    unit: usize,
}

impl<'a> Grid<'a> {
    fn new(data: &'a mut [f32], stride: usize, row_unit: usize, unit: usize) -> Self {
        assert!(unit > 0 && row_unit > 0 && stride > 0, "blocks of {row_unit} x {unit} of stride {stride}");
        Self { rows: data.len() / stride, parts: Parts::new(data), stride, row_unit, unit }
    }

    fn len(&self) -> usize {
        self.rows.div_ceil(self.row_unit) * self.stride.div_ceil(self.unit)
    }

    /// Each index must be used by one thread only.
    fn block(&self, index: usize) -> ColumnBlock<'_> {
        let down = self.rows.div_ceil(self.row_unit);
        let (row, column) = (index % down * self.row_unit, index / down * self.unit);
        ColumnBlock {
            parts: &self.parts,
            rows: row..(row + self.row_unit).min(self.rows),
            stride: self.stride,
            columns: column..(column + self.unit).min(self.stride),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake();
        for handle in self.handles.drain(..) {
            // A worker catches panics of its jobs, so that joining can only fail where there is nothing left to do.
            let _ = handle.join();
        }
    }
}

/// Body of a worker thread.
fn work(shared: &Shared, worker: Worker) {
    let sleeping = &shared.sleeping[worker.index - 1];
    let mut seen = 0u32;
    loop {
        let mut spins = 0u32;
        while shared.epoch.load(Ordering::Acquire) == seen {
            if spins < SPINS_BEFORE_PARK {
                spins += 1;
                std::hint::spin_loop();
                continue;
            }
            // Either the caller sees the flag after it has incremented the epoch, or this load sees the increment.
            sleeping.store(true, Ordering::SeqCst);
            if shared.epoch.load(Ordering::SeqCst) == seen {
                thread::park();
            }
            sleeping.store(false, Ordering::SeqCst);
        }
        seen = seen.wrapping_add(1);
        if shared.closing.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the acquire load of `epoch` orders this read after the caller's write; the caller writes again only
        // after `running` has reached zero.
        let job = unsafe { *shared.job.get() };
        if let Some(Job(body)) = job {
            // SAFETY: the caller of this region waits for `running` before it lets go of the closure.
            let body = unsafe { &*body };
            if catch_unwind(AssertUnwindSafe(|| body(worker))).is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
        }
        shared.running.fetch_sub(1, Ordering::Release);
    }
}

/// A slice lent to several threads in disjoint ranges.
struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    lent: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Parts` only gives out `&mut` ranges that its users promise to be disjoint; sending those needs `T: Send`.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    fn new(data: &'a mut [T]) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len(), lent: PhantomData }
    }

    /// # Safety
    /// No two ranges that are in use at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Some rows and columns of a row-major f32 matrix, owned by one thread for the length of a region.
pub struct ColumnBlock<'a> {
    parts: &'a Parts<'a, f32>,
    rows: Range<usize>,
    stride: usize,
    columns: Range<usize>,
}

impl std::fmt::Debug for ColumnBlock<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ColumnBlock").field("rows", &self.rows).field("columns", &self.columns).finish()
    }
}

impl ColumnBlock<'_> {
    /// Columns of the block, within the matrix.
    pub fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Rows of the block, within the matrix.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Elements of `row`, counted in the matrix, from `column` on.
    ///
    /// # Panics
    /// Where they are not all in the block.
    pub fn row(&mut self, row: usize, columns: Range<usize>) -> &mut [f32] {
        assert!(
            self.rows.contains(&row) && columns.start >= self.columns.start && columns.end <= self.columns.end,
            "row {row}, columns {columns:?} of a block of rows {:?}, columns {:?}",
            self.rows,
            self.columns,
        );
        let base = row * self.stride;
        // SAFETY: blocks are disjoint by construction, and `&mut self` keeps this one's ranges from overlapping in time.
        unsafe { self.parts.slice(base + columns.start..base + columns.end) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn shares_cover_everything_once() {
        for total in 0..40 {
            for count in 1..9 {
                let mut next = 0;
                for index in 0..count {
                    let share = Worker { index, count }.share(total);
                    assert_eq!(share.start, next);
                    assert!(share.len() <= total / count + 1);
                    next = share.end;
                }
                assert_eq!(next, total);
            }
        }
    }

    #[test]
    fn every_thread_runs_every_region_once() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads).unwrap();
            let calls: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..2000 {
                pool.run(|worker| {
                    calls[worker.index].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 2000));
        }
    }

    #[test]
    fn sleeping_workers_wake() {
        let pool = Pool::new(3).unwrap();
        let calls = AtomicUsize::new(0);
        for _ in 0..5 {
            thread::sleep(std::time::Duration::from_millis(3));
            pool.run(|_| {
                calls.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(calls.into_inner(), 15);
    }

    #[test]
    fn rows_columns_and_blocks_are_disjoint_and_complete() {
        let pool = Pool::new(3).unwrap();
        let mut data = vec![0.0f32; 7 * 10];
        pool.rows(&mut data, 10, |first, rows| {
            for (i, row) in rows.chunks_mut(10).enumerate() {
                row.iter_mut().for_each(|x| *x += (first + i) as f32);
            }
        });
        pool.columns(&mut data, 10, 4, |block| {
            for r in block.rows() {
                for x in block.row(r, block.columns()) {
                    *x += 100.0;
                }
            }
        });
        pool.blocks(&mut data, 10, 2, 3, |_, block| {
            for r in block.rows() {
                for x in block.row(r, block.columns()) {
                    *x += 1000.0;
                }
            }
        });
        for (i, x) in data.iter().enumerate() {
            assert_eq!(*x, (i / 10) as f32 + 1100.0);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(2).unwrap();
        for culprit in 0..2 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|worker| assert!(worker.index != culprit, "deliberate"));
            }));
            assert!(result.is_err());
        }
        let calls = AtomicUsize::new(0);
        pool.run(|_| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(calls.into_inner(), 2);
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(2).unwrap();
        let inside = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(|_| {
                            assert!(inside.fetch_add(1, Ordering::SeqCst) < 2);
                            inside.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
    }
}
