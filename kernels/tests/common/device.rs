//! A device for tests that compare it with the CPU.

use half::bf16;
use std::ops::Deref;
use std::sync::Arc;
use vt_kernels::cuda::gemm::Gemm;
use vt_kernels::cuda::{CudaContext, CudaStream, DeviceMemory};

/// Byte that fills results before a launch: as bf16, f32 and E4M3 it is no number that an operator gives.
pub const POISON: u8 = 0xFF;

/// Whether fewer and smaller cases are wanted (`VT_TEST_SMALL=1`): under a checker that makes each of them a thousand times slower.
pub fn small() -> bool {
    std::env::var_os("VT_TEST_SMALL").is_some_and(|v| v == "1")
}

pub struct Device {
    pub context: Arc<CudaContext>,
    pub stream: CudaStream,
}

impl Device {
    /// `None`, which skips the test, unless the run asks for a device.
    pub fn open() -> Option<Self> {
        if std::env::var_os("VT_TEST_CUDA").is_none_or(|v| v != "1") {
            eprintln!("SKIPPED: VT_TEST_CUDA=1 runs this on a device");
            return None;
        }
        let context = CudaContext::new(0).unwrap();
        let stream = CudaStream::new(&context).unwrap();
        Some(Self { context, stream })
    }

    pub fn bytes(&self, bytes: &[u8]) -> DeviceMemory {
        let memory = DeviceMemory::new(&self.context, bytes.len() as u64, "test").unwrap();
        memory.write(0, bytes).unwrap();
        memory
    }

    pub fn poisoned(&self, bytes: usize) -> DeviceMemory {
        self.bytes(&vec![POISON; bytes])
    }

    pub fn floats(&self, values: &[f32]) -> DeviceMemory {
        self.bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn halves(&self, values: &[f32]) -> DeviceMemory {
        self.bytes(&values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn words(&self, values: &[u32]) -> DeviceMemory {
        self.bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn read(&self, memory: &DeviceMemory) -> Vec<u8> {
        self.stream.synchronize().unwrap();
        let mut bytes = vec![0; memory.len() as usize];
        memory.read(0, &mut bytes).unwrap();
        bytes
    }

    pub fn read_floats(&self, memory: &DeviceMemory) -> Vec<f32> {
        self.read(memory).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub fn read_halves(&self, memory: &DeviceMemory) -> Vec<f32> {
        self.read(memory).as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
    }

    pub fn read_words(&self, memory: &DeviceMemory) -> Vec<u32> {
        self.read(memory).as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }
}

/// A device with the kernels of products.
pub struct Products {
    device: Device,
    pub gemm: Gemm,
}

impl Products {
    /// As [`Device::open`].
    pub fn open() -> Option<Self> {
        let device = Device::open()?;
        let gemm = Gemm::new(&device.context).unwrap();
        Some(Self { device, gemm })
    }
}

impl Deref for Products {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

/// Values as bf16 holds them.
pub fn rounded(values: Vec<f32>) -> Vec<f32> {
    values.into_iter().map(|v| bf16::from_f32(v).to_f32()).collect()
}
