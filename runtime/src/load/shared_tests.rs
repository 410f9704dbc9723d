//! Images of devices that share the host's memory, on the fake device and, with `VT_TEST_CUDA=1`, on a real one that is told
//! that it does.

use super::tests::{Peek, cuda, image, options};
use super::upload::{IoMode, Residency, UploadOptions, load_image};
use super::{Accelerator, FakeAccelerator, Faults, HostArena, LoadError, Verify};
use crate::test_support::synthetic::{Synthetic, flip};
use std::sync::atomic::{AtomicU64, Ordering};
use vt_bundle::hash::LEAF_BYTES;
use vt_bundle::{Bundle, BundleError};

const WAYS: [Residency; 2] = [Residency::Aliased, Residency::Placed];

fn fake() -> FakeAccelerator {
    FakeAccelerator::new(Faults { shares_host_memory: true, ..Faults::default() })
}

/// Runs a test on the fake and, where told, on CUDA.
macro_rules! on_both {
    ($test:ident) => {
        $test(&fake());
        if let Some(device) = cuda() {
            $test(&device.sharing_host_memory(true));
        }
    };
}

fn nothing_is_copied<A: Peek>(device: &A) {
    let dir = Synthetic::new(7 * LEAF_BYTES + 4352).write();
    let bundle = Bundle::open(dir.path()).unwrap();
    let size = bundle.manifest().image.size;
    for residency in WAYS {
        for (verify, io) in [
            (Verify::Device, IoMode::Auto),
            (Verify::Host, IoMode::Pread),
            (Verify::Off, IoMode::Direct),
            (Verify::Device, IoMode::Mmap),
        ] {
            let start = device.ledger().totals();
            let seen = AtomicU64::new(0);
            let count = |bytes| {
                seen.fetch_add(bytes, Ordering::Relaxed);
            };
            let options = UploadOptions { io, residency, ..options() };
            let resident = load_image(device, &bundle, verify, &options, &count).unwrap();
            assert!(device.bytes(&resident.arena) == image(&bundle), "{residency:?} {verify:?} {io:?}");
            assert_eq!((resident.report.residency, resident.report.verify), (residency, verify));
            assert_eq!(seen.into_inner(), size);
            let end = device.ledger().totals();
            assert_eq!((end.allocations - start.allocations, end.shared_bytes - start.shared_bytes), (1, size));
            assert_eq!((end.copies, end.staging_bytes), (start.copies, start.staging_bytes));
            let hashed = if verify == Verify::Device { 8 } else { 0 };
            assert_eq!((end.hashed_leaves - start.hashed_leaves, end.frees), (hashed, start.frees));
            drop(resident);
            let after = device.ledger().totals();
            assert_eq!((after.frees - start.frees, after.freed_bytes - start.freed_bytes), (1, size));
        }
    }
}

#[test]
fn one_place_and_no_copy() {
    on_both!(nothing_is_copied);
}

fn damage_is_refused<A: Peek>(device: &A) {
    let size = 3 * LEAF_BYTES + 512;
    let dir = Synthetic::new(size).write();
    let bundle = Bundle::open(dir.path()).unwrap();
    let path = dir.path().join(&bundle.manifest().image.segments[0].file);
    let before = device.ledger().totals();
    for at in [0, LEAF_BYTES - 1, 2 * LEAF_BYTES + 77, size - 1] {
        flip(&path, at, 3);
        for residency in WAYS {
            for verify in [Verify::Device, Verify::Host] {
                let options = UploadOptions { residency, ..options() };
                let error = load_image(device, &bundle, verify, &options, &|_| ()).map(|_| ()).unwrap_err();
                let LoadError::Bundle(BundleError::Leaf { leaf, tensors, .. }) = error else { panic!("{error}") };
                assert_eq!(leaf, at / LEAF_BYTES);
                assert!(!tensors.is_empty());
            }
        }
        flip(&path, at, 3);
    }
    let after = device.ledger().totals();
    assert_eq!(after.allocations - before.allocations, after.frees - before.frees);
}

#[test]
fn a_flipped_bit_is_refused_and_named() {
    on_both!(damage_is_refused);
}

fn the_probe_decides<A: Peek>(device: &A) {
    let dir = Synthetic::new(40 * LEAF_BYTES).write();
    let bundle = Bundle::open(dir.path()).unwrap();
    let resident = load_image(device, &bundle, Verify::Device, &options(), &|_| ()).unwrap();
    let probe = resident.report.probe.expect("there was a choice");
    assert_eq!(probe.bytes, 16 * LEAF_BYTES);
    assert_eq!(resident.report.residency, probe.faster());
    assert!(probe.to_string().contains(resident.report.residency.name()), "{probe}");
    assert!(device.bytes(&resident.arena) == image(&bundle));
    // Told to copy, it copies.
    let start = device.ledger().totals();
    let options = UploadOptions { residency: Residency::Copied, ..options() };
    let resident = load_image(device, &bundle, Verify::Device, &options, &|_| ()).unwrap();
    assert_eq!((resident.report.residency, resident.report.probe), (Residency::Copied, None));
    assert_eq!(device.ledger().totals().copied_bytes - start.copied_bytes, 40 * LEAF_BYTES);
}

#[test]
fn the_faster_way_is_chosen_and_reported() {
    on_both!(the_probe_decides);
}

#[test]
fn an_image_too_small_to_probe_is_mapped() {
    let dir = Synthetic::new(LEAF_BYTES + 256).write();
    let bundle = Bundle::open(dir.path()).unwrap();
    let resident = load_image(&fake(), &bundle, Verify::Device, &options(), &|_| ()).unwrap();
    assert_eq!((resident.report.residency, resident.report.probe), (Residency::Aliased, None));
    assert_eq!(resident.arena.bytes().as_ptr() as usize % 256, 0);
}

#[test]
fn a_device_that_cannot_hash_leaves_it_to_the_host() {
    let dir = Synthetic::new(2 * LEAF_BYTES).write();
    let bundle = Bundle::open(dir.path()).unwrap();
    let device = FakeAccelerator::new(Faults { cannot_hash: true, shares_host_memory: true, ..Faults::default() });
    for residency in WAYS {
        let options = UploadOptions { residency, ..options() };
        let resident = load_image(&device, &bundle, Verify::Device, &options, &|_| ()).unwrap();
        assert_eq!((resident.report.verify, resident.report.notes.len()), (Verify::Host, 1));
    }
    flip(&dir.path().join(&bundle.manifest().image.segments[0].file), 5, 3);
    assert!(load_image(&device, &bundle, Verify::Device, &options(), &|_| ()).is_err());
}

#[test]
fn a_bit_that_flips_in_memory_is_refused() {
    let dir = Synthetic::new(2 * LEAF_BYTES).write();
    let bundle = Bundle::open(dir.path()).unwrap();
    let faults = Faults { flipped_byte: Some(LEAF_BYTES + 9), shares_host_memory: true, ..Faults::default() };
    let options = UploadOptions { residency: Residency::Placed, ..options() };
    let error =
        load_image(&FakeAccelerator::new(faults), &bundle, Verify::Device, &options, &|_| ()).map(|_| ()).unwrap_err();
    assert!(matches!(error, LoadError::Bundle(BundleError::Leaf { leaf: 1, .. })), "{error}");
}

#[test]
fn memory_that_does_not_fit_is_refused_before_it_is_made() {
    let dir = Synthetic::new(2 * LEAF_BYTES).write();
    let bundle = Bundle::open(dir.path()).unwrap();
    let faults = Faults { memory_bytes: LEAF_BYTES, shares_host_memory: true, ..Faults::default() };
    let device = FakeAccelerator::new(faults);
    let options = UploadOptions { residency: Residency::Placed, ..options() };
    let error = load_image(&device, &bundle, Verify::Device, &options, &|_| ()).map(|_| ()).unwrap_err();
    assert!(matches!(error, LoadError::DoesNotFit { needed, .. } if needed == 2 * LEAF_BYTES), "{error}");
    assert_eq!(device.ledger().totals().allocations, 0);
}

#[test]
fn a_file_that_ends_early_is_an_error_with_its_name() {
    let dir = Synthetic::new(3 * LEAF_BYTES).write();
    let bundle = Bundle::open(dir.path()).unwrap();
    let file = dir.path().join(&bundle.manifest().image.segments[0].file);
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(LEAF_BYTES + 9).unwrap();
    let options = UploadOptions { residency: Residency::Placed, ..options() };
    let error = load_image(&fake(), &bundle, Verify::Off, &options, &|_| ()).map(|_| ()).unwrap_err();
    assert_eq!(error.exit_code(), 6);
    assert!(error.to_string().contains(file.file_name().unwrap().to_str().unwrap()), "{error}");
}
