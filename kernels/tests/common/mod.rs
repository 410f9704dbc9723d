//! Inputs for the tests: matrices with random planes in any encoding.

#![allow(dead_code)]

pub mod device;
pub mod random;

pub use random::Random;

use vt_bundle::encoding::{self, EncodingSpec, ScaleType, Span};
use vt_bundle::layout::{PlaneKind, TiledMatrix};
use vt_kernels::{Context, Isa, TiledWeight, Weight};

/// A matrix and planes of random codes and plausible scales.
pub struct RandomMatrix {
    pub matrix: TiledMatrix,
    planes: Vec<Vec<u8>>,
}

impl RandomMatrix {
    pub fn new(
        spec: &'static EncodingSpec,
        k: usize,
        parts: &[u64],
        group: usize,
        block: [u64; 2],
        random: &mut Random,
    ) -> Self {
        let matrix = TiledMatrix::new(spec, k as u64, parts, group as u64, block).unwrap();
        let planes = matrix
            .planes()
            .map(|plane| {
                let len = matrix.plane_bytes(plane) as usize;
                match plane {
                    PlaneKind::Code(i) => {
                        // E4M3 codes exclude the two NaN.
                        let e4m3 = spec.encoding.contains("e4m3");
                        let byte = |random: &mut Random| match (random.next() as u8, spec.codes[i].bits) {
                            (0x7F | 0xFF, 8) if e4m3 => 0x7E,
                            (byte, _) => byte,
                        };
                        (0..len).map(|_| byte(random)).collect()
                    }
                    PlaneKind::Scale(i) => scale_plane(spec.scales[i].dtype, len, random),
                }
            })
            .collect();
        Self { matrix, planes }
    }

    pub fn weight(&self) -> Weight<'_> {
        let planes: Vec<&[u8]> = self.planes.iter().map(Vec::as_slice).collect();
        Weight::Tiled(TiledWeight::new(&self.matrix, &planes).unwrap())
    }
}

fn scale_plane(dtype: ScaleType, len: usize, random: &mut Random) -> Vec<u8> {
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        let value = random.unit() * 0.1;
        match dtype {
            ScaleType::F16 => out.extend(half::f16::from_f32(value).to_le_bytes()),
            ScaleType::Bf16 => out.extend(half::bf16::from_f32(value).to_le_bytes()),
            ScaleType::F32 => out.extend((value.abs() + 0.01).to_le_bytes()),
            // Subnormals to 2: every kind of a positive E4M3.
            ScaleType::E4M3 => out.push(random.below(0x40) as u8),
            ScaleType::E8M0 => out.push(120 + random.below(12) as u8),
            ScaleType::U8 | ScaleType::I8 => out.push(random.below(64) as u8),
        }
    }
    out
}

/// An encoding under test.
pub struct Case {
    pub spec: &'static EncodingSpec,
    /// Group size; 0: the whole of K.
    pub group: usize,
    pub block: [u64; 2],
}

/// Every encoding that has a tile layout, in the groups that models use.
pub fn encodings() -> Vec<Case> {
    let named = [
        ("q4_0.ggml@1", 32),
        ("q4_1.ggml@1", 32),
        ("q5_0.ggml@1", 32),
        ("q5_1.ggml@1", 32),
        ("q8_0.ggml@1", 32),
        ("q2_k.ggml@1", 16),
        ("q3_k.ggml@1", 16),
        ("q4_k.ggml@1", 32),
        ("q5_k.ggml@1", 32),
        ("q6_k.ggml@1", 16),
        ("iq4_nl.ggml@1", 32),
        ("iq4_xs.ggml@1", 32),
        ("mxfp4.ggml@1", 32),
        ("nvfp4.ggml@1", 16),
        ("nvfp4.modelopt@1", 16),
        ("nvfp4.compressed-tensors@1", 16),
        ("nvfp4.compressed-tensors@1", 32),
        ("mxfp4@1", 32),
        ("mxfp8@1", 32),
        ("fp8.tensor.f32@1", 0),
        ("fp8.channel.bf16@1", 0),
        ("fp8.block.f32@1", 0),
        ("fp8.block.e8m0@1", 0),
        ("int4.symmetric.f16@1", 32),
        ("int4.symmetric.bf16@1", 128),
        ("int4.symmetric.f32@1", 0),
        ("int8.symmetric.bf16@1", 0),
        ("int8.symmetric.tensor.f32@1", 0),
        ("int4.zeros.f16@1", 128),
        ("int8.zeros.f32@1", 64),
        ("int4.zeros-minus-one.f16@1", 16),
        ("int8.zeros-minus-one.bf16@1", 32),
        // Groups that no strip of a fast kernel fits: the encoding's own formula.
        ("int4.symmetric.f16@1", 48),
        ("int4.zeros.bf16@1", 8),
    ];
    let mut cases = Vec::new();
    for (name, group) in named {
        let spec = encoding::find(name).unwrap_or_else(|| panic!("no encoding {name}"));
        let has_blocks = spec.scales.iter().any(|plane| plane.span == Span::Block);
        for block in if has_blocks { &[[128, 128], [5, 96], [64, 40]][..] } else { &[[0, 0]] } {
            cases.push(Case { spec, group, block: *block });
        }
    }
    cases
}

/// A context for every instruction set of this machine.
pub fn contexts() -> Vec<Context> {
    let mut contexts = Vec::new();
    for isa in Isa::ALL {
        let cx = Context::with_isa(2, isa).unwrap();
        if cx.isa() == isa {
            contexts.push(cx);
        } else {
            eprintln!("{isa:?} is not available on this machine");
        }
    }
    contexts
}

impl Case {
    /// Granularity of K.
    pub fn k_unit(&self) -> usize {
        let extents = self.spec.scales.iter().map(|plane| match plane.span {
            Span::Super(span) => span as usize,
            Span::Group if self.group > 0 => self.group,
            _ => 1,
        });
        extents.max().unwrap_or(1)
    }

    /// Whether quantised activations meet integer codes: where a strip of 32, or its halves, share scales.
    pub fn is_integer(&self, k: usize) -> bool {
        let group = self.group;
        self.spec.encoding != "e4m3" && (group == 0 || group >= k || group == 16 || group.is_multiple_of(32))
    }

    pub fn matrix(&self, k: usize, parts: &[u64], random: &mut Random) -> RandomMatrix {
        let grouped = self.spec.scales.iter().any(|plane| plane.span == Span::Group);
        let group = if grouped && self.group == 0 { k } else { self.group };
        RandomMatrix::new(self.spec, k, parts, group, self.block, random)
    }
}

/// Panics where an element differs from the reference by more than `tolerance` times the scale of its row's terms.
pub fn assert_close(what: &str, got: &[f32], expected: &[f64], magnitude: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: lengths");
    for (i, ((g, e), m)) in got.iter().zip(expected).zip(magnitude).enumerate() {
        let error = (f64::from(*g) - e).abs();
        assert!(
            error <= tolerance * m.max(1e-30),
            "{what}: element {i} is {g}, expected {e} (error {error:e}, scale {m:e})"
        );
    }
}
