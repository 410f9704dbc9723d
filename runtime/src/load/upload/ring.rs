//! The ring of staging buffers.

use crate::load::{Accelerator, LoadError};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Fewest buffers with which reading and copying overlap.
const LEAST: usize = 2;

/// Staging buffers, made ahead by [`Ring::prepare`] or when they are first needed.
pub(super) struct Ring<'a, A: Accelerator> {
    accelerator: &'a A,
    buffer_bytes: usize,
    state: Mutex<State<A>>,
    changed: Condvar,
}

struct State<A: Accelerator> {
    /// Buffers that nobody holds, oldest copy first.
    slots: VecDeque<Slot<A>>,
    /// Buffers that exist or are being made.
    made: usize,
    /// Buffers that there should be.
    depth: usize,
    pinned: bool,
    /// Nobody gets a buffer any more: the load has failed, or nothing is left to read.
    closed: bool,
    failure: Option<LoadError>,
    warning: Option<String>,
}

enum Slot<A: Accelerator> {
    Idle(A::Buffer),
    Busy(A::Copy),
}

impl<'a, A: Accelerator> Ring<'a, A> {
    pub(super) fn new(accelerator: &'a A, buffer_bytes: usize, depth: usize) -> Self {
        let slots = VecDeque::with_capacity(depth);
        let state = State { slots, made: 0, depth, pinned: true, closed: false, failure: None, warning: None };
        Self { accelerator, buffer_bytes, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<A>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer that no copy reads, waiting for the oldest copy where there is none. `None` once the ring is closed.
    pub(super) fn acquire(&self) -> Result<Option<A::Buffer>, LoadError> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return Ok(None);
            }
            if matches!(state.slots.front(), Some(Slot::Busy(_))) && state.made < state.depth {
                return self.make(state);
            }
            match state.slots.pop_front() {
                Some(Slot::Idle(buffer)) => return Ok(Some(buffer)),
                Some(Slot::Busy(copy)) => {
                    drop(state);
                    return self.accelerator.wait(copy).map(Some);
                }
                None if state.made < state.depth => return self.make(state),
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Makes the buffers that there should be, until the ring is closed.
    pub(super) fn prepare(&self) -> Result<(), LoadError> {
        loop {
            let state = self.lock();
            if state.closed || state.made >= state.depth {
                return Ok(());
            }
            match self.make(state)? {
                Some(buffer) => self.idle(buffer),
                None => return Ok(()),
            }
        }
    }

    /// Waits for all copies. Buffers stay locked: to unlock one takes the driver as long as a copy, and would hold up copies
    /// that are being submitted.
    pub(super) fn drain(&self) -> Result<(), LoadError> {
        let slots = std::mem::take(&mut self.lock().slots);
        for slot in slots {
            self.idle(match slot {
                Slot::Idle(buffer) => buffer,
                Slot::Busy(copy) => self.accelerator.wait(copy)?,
            });
        }
        Ok(())
    }

    /// Makes one more buffer. Where pinning fails, the ring stays as small as it is; where that is too small, ordinary memory
    /// fills it up. The warning is given once.
    fn make(&self, mut state: MutexGuard<'_, State<A>>) -> Result<Option<A::Buffer>, LoadError> {
        state.made += 1;
        let pinned = state.pinned;
        drop(state);
        let error = match self.accelerator.buffer(self.buffer_bytes, pinned) {
            Err(error) if pinned => error,
            other => return other.map(Some),
        };
        let mut state = self.lock();
        state.made -= 1;
        if state.pinned {
            let pinned = state.made;
            let enough = pinned >= LEAST;
            state.pinned = enough;
            state.depth = if enough { pinned } else { LEAST * 2 };
            let instead =
                if enough { "a ring of that size is used" } else { "ordinary memory is used, which is slower" };
            state.warning = Some(format!("{error}; {pinned} buffers are page-locked, {instead}"));
        } else if state.depth > LEAST * 2 {
            state.depth = LEAST * 2;
        }
        drop(state);
        self.changed.notify_all();
        self.acquire()
    }

    /// Gives a buffer back that is the source of a copy.
    pub(super) fn busy(&self, copy: A::Copy) {
        self.lock().slots.push_back(Slot::Busy(copy));
        self.changed.notify_one();
    }

    /// Gives a buffer back unused.
    pub(super) fn idle(&self, buffer: A::Buffer) {
        self.lock().slots.push_front(Slot::Idle(buffer));
        self.changed.notify_one();
    }

    /// Ends every wait for a buffer.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Remembers the first failure and closes the ring.
    pub(super) fn fail(&self, error: LoadError) {
        self.lock().failure.get_or_insert(error);
        self.close();
    }

    /// The first failure, once.
    pub(super) fn failure(&self) -> Option<LoadError> {
        self.lock().failure.take()
    }

    /// Waits for all copies; gives what to warn of.
    pub(super) fn finish(self) -> Result<Option<String>, LoadError> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        for slot in state.slots {
            if let Slot::Busy(copy) = slot {
                self.accelerator.wait(copy)?;
            }
        }
        Ok(state.warning)
    }
}
