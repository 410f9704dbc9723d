//! Rates of hashing and packing on one thread, for an expert of Qwen3-30B-A3B and for a wide dense matrix in NVFP4.

use std::time::Instant;

use vt_bundle::codec::MatrixShape;
use vt_bundle::codec::hf::nvfp4;
use vt_bundle::hash::{LEAF_BYTES, leaf_digest};
use vt_bundle::layout::{PlaneKind, TiledMatrix};
use vt_bundle::pack::{PartFormat, PartSource, pack_tiled};
use vt_bundle::row_order::RowOrder;

/// Bytes packed at once, as the converter does.
const WINDOW: usize = 8 << 20;

/// Shape and inputs of a part.
type Part = (MatrixShape, [Vec<u8>; 3]);

/// The best of several runs, in bytes a nanosecond (GB/s).
fn rate(bytes: usize, mut run: impl FnMut()) -> f64 {
    let seconds = (0..7).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    bytes as f64 / seconds.fold(f64::INFINITY, f64::min) / 1e9
}

fn main() {
    for (name, n, k) in [("expert gate_up_proj", [768, 768], 2048), ("dense gate_up_proj", [25600, 25600], 5120)] {
        let parts: Vec<Part> = n
            .iter()
            .map(|&n| {
                let bytes = |len: usize| (0..len).map(|i| (i * 31 + i / 77) as u8 & 0x7E).collect();
                let shape = MatrixShape { n, k, group_size: 16, block: [0, 0] };
                (shape, [bytes(n * k / 2), bytes(n * k / 16), bytes(4)])
            })
            .collect();
        let source = |(shape, inputs): &'static Part| PartSource {
            format: PartFormat { codec: &nvfp4::MODELOPT, shape: *shape, row_order: RowOrder::Same },
            inputs: inputs.iter().map(Vec::as_slice).collect(),
            all_zero: false,
        };
        // Lives as long as the program.
        let parts: &'static [Part] = Vec::leak(parts);
        let sources: Vec<PartSource<'_>> = parts.iter().map(source).collect();
        let rows = n.map(|n| n as u64);
        let matrix = TiledMatrix::new(&nvfp4::MODELOPT_SPEC, k as u64, &rows, 16, [0, 0]).expect("valid geometry");
        let mut out = vec![0u8; WINDOW];
        for plane in [PlaneKind::Code(0), PlaneKind::Scale(0)] {
            let len = matrix.plane_bytes(plane) as usize;
            let rate = rate(len, || {
                for start in (0..len).step_by(WINDOW) {
                    let out = &mut out[..WINDOW.min(len - start)];
                    pack_tiled(&matrix, &sources, plane, start as u64, out);
                }
            });
            println!("{name:20} {:8} {rate:6.2} GB/s", matrix.plane_name(plane));
        }
    }
    let leaf = vec![0xA5u8; LEAF_BYTES as usize];
    let hash = rate(64 << 20, || {
        for i in 0..64 {
            std::hint::black_box(leaf_digest(&leaf, i * LEAF_BYTES, 64 << 20));
        }
    });
    println!("{:20} {:8} {hash:6.2} GB/s", "leaves", "blake3");
}
