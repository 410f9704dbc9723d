//! Experts that are checked one at a time where they are resident, on the fake device and, with `VT_TEST_CUDA=1`, on a real one.

use super::tests::{cuda, image};
use super::upload::verify_expert;
use super::{Accelerator, FakeAccelerator, Faults, LoadError, Piece};
use crate::test_support::synthetic::{Synthetic, flip};
use vt_bundle::hash::LEAF_BYTES;
use vt_bundle::{Bundle, BundleError};

const EXPERTS: u64 = 5;

/// The image of a bundle in the memory of a device, unchecked.
fn resident<A: Accelerator>(device: &A, bundle: &Bundle) -> A::Memory {
    let image = image(bundle);
    let memory = device.allocate(image.len() as u64).unwrap();
    let mut buffer = device.buffer(image.len(), false).unwrap();
    buffer.as_mut().copy_from_slice(&image);
    let copy = device.copy(buffer, &[Piece { from: 0, len: image.len(), to: 0 }], &memory).unwrap();
    device.wait(copy).unwrap();
    memory
}

/// The experts whose records are refused.
fn corrupt<A: Accelerator>(device: &A, bundle: &Bundle) -> Vec<u64> {
    let memory = resident(device, bundle);
    let hashes = bundle.expert_hashes().unwrap();
    let refused = |expert: &u64| {
        let both = [0, 1].map(|tensor| verify_expert(device, bundle, &hashes, &memory, tensor, *expert));
        for error in both.iter().filter_map(|result| result.as_ref().err()) {
            let LoadError::Bundle(BundleError::Record { expert: named, .. }) = error else { panic!("{error}") };
            assert_eq!((named, error.exit_code()), (expert, 4));
        }
        assert_eq!(both[0].is_ok(), both[1].is_ok(), "two tensors of one record");
        both[0].is_err()
    };
    (0..EXPERTS).filter(refused).collect()
}

fn one_at_a_time<A: Accelerator>(device: &A) {
    // A part of a leaf, a leaf, and several; records start anywhere in a leaf of the image.
    for record in [4608, LEAF_BYTES, 2 * LEAF_BYTES + 1536] {
        let dir = Synthetic::new(0).write_experts(EXPERTS, record);
        let bundle = Bundle::open(dir.path()).unwrap();
        assert_eq!(corrupt(device, &bundle), [0; 0], "{record} bytes");
        let experts = bundle.tensor_at(0).0.experts.as_ref().unwrap();
        let file = dir.path().join(&bundle.manifest().image.segments[0].file);
        let last = experts.record_start(3) + record - 1;
        flip(&file, experts.record_start(1), 0);
        flip(&file, last, 7);
        // Between two records: nobody's.
        flip(&file, last + 1, 3);
        assert_eq!(corrupt(device, &bundle), [1, 3], "{record} bytes");
    }
}

#[test]
fn a_corrupt_expert_is_found_alone() {
    one_at_a_time(&FakeAccelerator::new(Faults::default()));
    if let Some(device) = cuda() {
        one_at_a_time(&device);
    }
}

#[test]
#[should_panic(expected = "has no expert 5")]
fn an_expert_that_is_not_there_is_a_mistake_of_the_caller() {
    let dir = Synthetic::new(0).write_experts(EXPERTS, 4608);
    let (bundle, device) = (Bundle::open(dir.path()).unwrap(), FakeAccelerator::new(Faults::default()));
    let memory = resident(&device, &bundle);
    let _ = verify_expert(&device, &bundle, &bundle.expert_hashes().unwrap(), &memory, 0, EXPERTS);
}
