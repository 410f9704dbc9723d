//! What every operator needs: threads and the instruction set to use.

use crate::pool::Pool;

/// Instruction sets that kernels are written for, from the least to the most capable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, on any machine.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, VBMI and VNNI (Ice Lake, Zen 4 and later).
    Avx512,
}

impl Isa {
    /// All of them, the least capable first.
    pub const ALL: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    /// The most capable one that this machine has.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Portable)
    }

    /// Whether this machine has it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let avx2 =
            || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        match self {
            Isa::Portable => true,
            Isa::Avx2 => avx2(),
            Isa::Avx512 => {
                avx2()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vbmi")
                    && is_x86_feature_detected!("avx512vnni")
            }
        }
    }

    /// Whether this machine has it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Isa::Portable
    }
}

/// Threads and instruction set of one engine. Two contexts of one process share nothing.
#[derive(Debug)]
pub struct Context {
    pool: Pool,
    isa: Isa,
}

impl Context {
    /// A context of `threads` threads, the caller included, with the best instruction set of the machine.
    ///
    /// # Errors
    /// What the operating system says where it does not start a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::with_isa(threads, Isa::detect())
    }

    /// A context with a given instruction set, or the best available one below it.
    ///
    /// # Errors
    /// What the operating system says where it does not start a thread.
    pub fn with_isa(threads: usize, isa: Isa) -> std::io::Result<Self> {
        let isa = Isa::ALL.into_iter().rev().find(|i| *i <= isa && i.is_available()).unwrap_or(Isa::Portable);
        Ok(Self { pool: Pool::new(threads)?, isa })
    }

    /// The threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The instruction set in use; always available on this machine.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}
