//! Vectors of a bundle as f32 on the device: norm weights with the family's offset, biases, scales, rotary frequencies.
//!
//! They are some thousandth of a model. Kernels read one type, and a bias of a fused product is one run of columns, whatever
//! tensors it came from. Vectors of experts, of which there are many, are read where they lie, and a table says where.

use super::super::graph::VectorRef;
use vt_bundle::Bundle;
use vt_kernels::cuda::elementwise::ElementwiseKernels;
use vt_kernels::cuda::{CudaError, CudaStream, DeviceMemory};

/// Every vector starts at a multiple of this many elements, 256 bytes.
const ALIGN: usize = 64;

/// A vector among the constants: its first element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Constant(usize);

impl Constant {
    /// Its address, of constants at `base`.
    pub(super) fn address(self, base: u64) -> u64 {
        base + 4 * self.0 as u64
    }
}

/// Where elements come from.
#[derive(Debug)]
enum Source {
    /// A vector of the bundle, with a number added to every element.
    Bundle(VectorRef, f32),
    /// Values of the host, as bits.
    Host(Vec<u32>),
}

/// The constants of a model: first collected, which gives every one its place, then filled.
#[derive(Debug, Default)]
pub(super) struct Constants {
    pieces: Vec<(usize, Source)>,
    len: usize,
}

impl Constants {
    fn place(&mut self, len: usize) -> Constant {
        let at = self.len;
        self.len = (at + len).next_multiple_of(ALIGN);
        Constant(at)
    }

    /// A vector with `offset` added.
    pub(super) fn vector(&mut self, vector: &VectorRef, offset: f32) -> Constant {
        let at = self.place(vector.len());
        self.pieces.push((at.0, Source::Bundle(*vector, offset)));
        at
    }

    /// `len` columns, zero but for the vectors that start at the columns beside them.
    pub(super) fn columns(&mut self, len: usize, vectors: &[(usize, &VectorRef)]) -> Constant {
        let at = self.place(len);
        self.pieces.extend(vectors.iter().map(|(column, v)| (at.0 + column, Source::Bundle(**v, 0.0))));
        at
    }

    /// Values of the host.
    pub(super) fn host(&mut self, values: Vec<f32>) -> Constant {
        self.words(values.into_iter().map(f32::to_bits).collect())
    }

    /// Words of the host: tables of where other things lie.
    pub(super) fn words(&mut self, words: Vec<u32>) -> Constant {
        let at = self.place(words.len());
        self.pieces.push((at.0, Source::Host(words)));
        at
    }

    /// Bytes of all of them.
    pub(super) fn bytes(&self) -> u64 {
        4 * self.len as u64
    }

    /// Fills them in at offset `at` of `memory`, which is zero there, from an image at the address `image`.
    pub(super) fn fill(
        &self,
        kernels: &ElementwiseKernels,
        stream: &CudaStream,
        (bundle, image): (&Bundle, u64),
        memory: &DeviceMemory,
        at: u64,
    ) -> Result<(), CudaError> {
        for (element, source) in &self.pieces {
            let to = at + 4 * *element as u64;
            match source {
                Source::Bundle(vector, offset) => {
                    let from = image + vector.offset(bundle);
                    kernels.widen(stream, from, vector.dtype(), *offset, memory.address() + to, vector.len())?;
                }
                Source::Host(words) => {
                    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                    memory.write(to, &bytes)?;
                }
            }
        }
        Ok(())
    }
}
