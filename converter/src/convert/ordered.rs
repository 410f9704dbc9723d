//! Work handed out in order: neighbouring pieces are in work at the same time, whatever the number of workers, so that
//! files are read and written front to back.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Runs `work` for `0 .. count` on up to `workers` threads of the current pool, each with a state of its own (its
/// buffers). `None` as soon as a piece of work says so.
///
/// # Errors
/// The error of the first piece of work, in order, that failed.
pub fn in_order<S, T: Send, E: Send>(
    workers: usize,
    count: u64,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, u64) -> Result<Option<T>, E> + Sync,
) -> Result<Option<Vec<T>>, E> {
    let next = AtomicU64::new(0);
    let stopped = AtomicBool::new(false);
    let done = Mutex::new(Vec::new());
    let failed: Mutex<Option<(u64, E)>> = Mutex::new(None);
    let worker = || {
        let mut state = state();
        let mut own = Vec::new();
        while !stopped.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                break;
            }
            match work(&mut state, index) {
                Ok(Some(result)) => own.push((index, result)),
                Ok(None) => stopped.store(true, Ordering::Relaxed),
                Err(e) => {
                    // All pieces before this one are done or in work, so the first failure is always found.
                    stopped.store(true, Ordering::Relaxed);
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    if failed.as_ref().is_none_or(|(first, _)| index < *first) {
                        *failed = Some((index, e));
                    }
                }
            }
        }
        done.lock().unwrap_or_else(PoisonError::into_inner).append(&mut own);
    };
    let workers = u64::try_from(workers.max(1)).unwrap_or(u64::MAX).min(count);
    rayon::scope(|scope| (0..workers).for_each(|_| scope.spawn(|_| worker())));
    if let Some((_, e)) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(e);
    }
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    if (done.len() as u64) < count {
        return Ok(None);
    }
    done.sort_unstable_by_key(|(index, _)| *index);
    Ok(Some(done.into_iter().map(|(_, result)| result).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order_and_the_first_error_wins() {
        for workers in [0, 1, 4] {
            let squares = in_order(workers, 100, || (), |(), i| Ok::<_, u64>(Some(i * i)));
            assert_eq!(squares, Ok(Some((0..100).map(|i| i * i).collect())));
            let failed = in_order(workers, 100, || (), |(), i| if i >= 7 { Err(i) } else { Ok(Some(i)) });
            assert_eq!(failed, Err(7));
            let stopped = in_order(workers, 100, || (), |(), i| Ok::<_, u64>((i < 50).then_some(i)));
            assert_eq!(stopped, Ok(None));
            assert_eq!(in_order(workers, 0, || (), |(), i| Ok::<_, u64>(Some(i))), Ok(Some(vec![])));
        }
    }
}
