//! Shares of ranks against ranges written out one by one, on the fake device and, with `VT_TEST_CUDA=1`, on two real ones.

use super::tests::{Peek, cuda};
use super::upload::{IoMode, Share, UploadOptions, load_shard};
use super::{Accelerator, CudaAccelerator, FakeAccelerator, Faults, HostArena, LoadError, Verify};
use crate::test_support::synthetic::{Synthetic, flip};
use vt_bundle::hash::LEAF_BYTES;
use vt_bundle::layout::PLANE_ALIGN;
use vt_bundle::manifest::Placement;
use vt_bundle::slice::SlicePlan;
use vt_bundle::{Bundle, BundleError};

fn options() -> UploadOptions {
    UploadOptions { chunk_bytes: LEAF_BYTES, depth: 4, readers: 3, io: IoMode::Pread, ..UploadOptions::default() }
}

/// The share as its definition says: all ranges of a plane in order of the image, planes 256-aligned, `padding` between.
fn written_out(bundle: &Bundle, rank: usize, size: u64, padding: u8) -> (Vec<u8>, Vec<u64>) {
    let map = bundle.map(Placement::Image).unwrap();
    let plan = SlicePlan::new(bundle, size).unwrap();
    let (mut arena, mut taken) = (Vec::new(), Vec::new());
    for plane in plan.ranks[rank].tensors.iter().flat_map(|t| &t.planes) {
        let of = |run: &vt_bundle::slice::Run| {
            let run = *run;
            (0..run.count).map(move |i| (run.offset + i * run.stride, run.len))
        };
        let mut ranges: Vec<(u64, u64)> = plane.runs.iter().flat_map(of).collect();
        ranges.sort_unstable();
        arena.resize(arena.len().next_multiple_of(PLANE_ALIGN as usize), padding);
        for (at, len) in ranges {
            arena.extend_from_slice(&map.bytes()[at as usize..(at + len) as usize]);
            taken.extend(at..at + len);
        }
    }
    arena.resize(arena.len().next_multiple_of(PLANE_ALIGN as usize), padding);
    (arena, taken)
}

#[test]
fn ranks_hold_their_ranges_and_together_the_image() {
    let dir = Synthetic::new(0).write_layer();
    let bundle = Bundle::open(dir.path()).unwrap();
    for size in [1u32, 2, 4] {
        let mut owners = vec![0u32; bundle.manifest().image.size as usize];
        for rank in 0..size {
            let device = FakeAccelerator::new(Faults::default());
            let share = Share::new(&bundle, rank, size).unwrap();
            let resident = load_shard(&device, &bundle, &share, Verify::Device, &options(), &|_| ()).unwrap();
            let (expected, taken) = written_out(&bundle, rank as usize, u64::from(size), 0xA5);
            assert!(resident.arena.bytes() == expected, "rank {rank} of {size}");
            let totals = device.ledger().totals();
            assert_eq!((totals.allocations, totals.copied_bytes), (1, taken.len() as u64));
            assert_eq!(share.bytes(), taken.len() as u64);
            taken.iter().for_each(|&at| owners[at as usize] += 1);
        }
        let plan = SlicePlan::new(&bundle, u64::from(size)).unwrap();
        for tensor in &bundle.manifest().tensors {
            let replicated = plan.replicated.iter().any(|(name, _)| *name == tensor.name);
            for plane in &tensor.planes {
                let owners = &owners[plane.offset as usize..(plane.offset + plane.size) as usize];
                // Scales of a whole part go to every rank that has a piece of it.
                let all = replicated || plane.name == "global";
                let right = |&n: &u32| if all { n == size } else { n == 1 };
                assert!(owners.iter().all(right), "{} {} at {size}", tensor.name, plane.name);
            }
        }
    }
}

/// Loads every rank at once, one to a device.
fn ranks_at_once<A: Peek>(devices: &[A]) {
    let dir = Synthetic::new(0).write_layer();
    let bundle = Bundle::open(dir.path()).unwrap();
    let size = devices.len() as u32;
    let mut owners = vec![0u32; bundle.manifest().image.size as usize];
    let loaded: Vec<_> = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (rank, device) in (0..).zip(devices) {
            let bundle = &bundle;
            threads.push(scope.spawn(move || {
                let share = Share::new(bundle, rank, size).unwrap();
                let before = device.ledger().totals();
                let resident = load_shard(device, bundle, &share, Verify::Device, &options(), &|_| ()).unwrap();
                let after = device.ledger().totals();
                assert_eq!(after.allocations - before.allocations, 1);
                (device.bytes(&resident.arena), after.copied_bytes - before.copied_bytes)
            }));
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (rank, (arena, copied)) in loaded.into_iter().enumerate() {
        let (expected, taken) = written_out(&bundle, rank, u64::from(size), 0);
        let (other, _) = written_out(&bundle, rank, u64::from(size), 1);
        assert_eq!((copied, arena.len()), (taken.len() as u64, expected.len()), "rank {rank} of {size}");
        // Padding between planes is never written: whatever was there.
        let same = |i: usize| arena[i] == expected[i] || expected[i] != other[i];
        assert!((0..arena.len()).all(same), "rank {rank} of {size}");
        taken.iter().for_each(|&at| owners[at as usize] += 1);
    }
    for tensor in &bundle.manifest().tensors {
        for plane in &tensor.planes {
            let owners = &owners[plane.offset as usize..(plane.offset + plane.size) as usize];
            assert!(owners.iter().all(|&n| n >= 1), "{} {}: bytes that no rank has", tensor.name, plane.name);
        }
    }
}

#[test]
fn ranks_load_at_once_and_each_uploads_its_bytes_once() {
    ranks_at_once(&[0; 2].map(|_| FakeAccelerator::new(Faults::default())));
    if cuda().is_some() && vt_kernels::cuda::device_count().is_ok_and(|count| count >= 2) {
        ranks_at_once(&[0, 1].map(|index| CudaAccelerator::new(index).unwrap()));
    } else {
        eprintln!("SKIPPED on CUDA: it takes two devices");
    }
}

#[test]
fn ranks_and_degrees_that_are_not_there_are_refused() {
    let dir = Synthetic::new(0).write_layer();
    let bundle = Bundle::open(dir.path()).unwrap();
    assert!(matches!(Share::new(&bundle, 0, 3), Err(LoadError::Slice(_))));
    assert!(Share::new(&bundle, 2, 2).is_err());
}

#[test]
fn damage_beside_the_share_in_a_leaf_that_it_touches_is_refused() {
    let dir = Synthetic::new(0).write_layer();
    let bundle = Bundle::open(dir.path()).unwrap();
    let device = FakeAccelerator::new(Faults::default());
    let share = Share::new(&bundle, 0, 2).unwrap();
    // A byte of the other rank: the second half of a matrix that is cut along K.
    let (tensor, _) = bundle.tensor("model.layers.0.mlp.down_proj.weight").unwrap();
    let at = tensor.planes[0].offset + tensor.planes[0].size / 2 + 5;
    assert!(share.pieces(at..at + 1).is_empty());
    flip(&dir.path().join(&bundle.manifest().image.segments[0].file), at, 1);
    let error = load_shard(&device, &bundle, &share, Verify::Device, &options(), &|_| ()).map(|_| ()).unwrap_err();
    assert!(matches!(error, LoadError::Bundle(BundleError::Leaf { .. })), "{error}");
    let totals = device.ledger().totals();
    assert_eq!(totals.allocations, totals.frees);
}
