//! Work on several threads, with the results in order.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Like [`parallel`], but after the deadline only the first item is begun: so each merge makes some progress, however
/// little time there is.
pub fn parallel_until<T: Sync, R: Send>(
    deadline: Option<Instant>,
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> Vec<Option<R>> {
    let is_expired = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
    let is_first = |item: &T| items.first().is_some_and(|first| std::ptr::eq(first, item));
    parallel(threads, items, |item| (is_first(item) || !is_expired()).then(|| work(item)))
}

/// Apply `work` to each item on `threads` threads. The results are in the order of the items.
pub fn parallel<T: Sync, R: Send>(threads: usize, items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    if threads <= 1 || items.len() <= 1 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut results = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return results };
            results.push((index, work(item)));
        }
    };
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        // If no more threads can be created, fewer do the work.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, worker).ok();
        let workers: Vec<_> = (1..threads.min(items.len())).map_while(spawn).collect();
        let mut results = worker();
        for worker in workers {
            match worker.join() {
                Ok(more) => results.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|&(index, _)| index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_item_is_done_even_without_time() {
        let deadline = Some(Instant::now());
        for threads in [1, 2] {
            assert_eq!(parallel_until(deadline, threads, &[3, 4, 5], |&item| item), [Some(3), None, None]);
            assert_eq!(parallel_until(None, threads, &[3, 4], |&item| item), [Some(3), Some(4)]);
        }
    }
}
