//! The values of one exported tensor, band of rows by band of rows.
//!
//! Axes: N rows, K columns of the Hugging Face orientation.

use std::ops::Range;

use half::f16;
use vt_bundle::Bundle;
use vt_bundle::codec::ggml::raw::{self, RawFormat};
use vt_bundle::float8::{E4M3, e8m0};
use vt_bundle::geometry::Geometry;
use vt_bundle::manifest::{Layout, Placement, Tensor};
use vt_bundle::reader::{plane_bytes, tiled_view};
use vt_bundle::tile::TILE_N;
use vt_bundle::unpack::TiledView;

use super::ExportError;
use super::items::{Item, Items};

/// Output bytes per band, about: bounds the memory of an export together with the number of threads.
const BAND_BYTES: u64 = 1 << 20;

/// The mapped planes of a bundle.
pub(super) struct Values<'a> {
    bundle: &'a Bundle,
    items: &'a Items,
    image: &'a [u8],
    cold: &'a [u8],
}

/// One tensor, ready to be decoded.
pub(super) struct Prepared<'a> {
    source: Source<'a>,
    part: usize,
    rows: u64,
    /// Elements of one row.
    columns: u64,
    row_bytes_out: u64,
    /// Multiplied into the columns, `[K]`.
    scale: Option<Vec<f32>>,
}

enum Source<'a> {
    Tiled(TiledView<'a>),
    Raw { format: &'static RawFormat, data: &'a [u8], row_bytes: usize },
    Plain { dtype: &'a str, data: &'a [u8], row_bytes: usize },
}

impl<'a> Values<'a> {
    pub(super) fn new(bundle: &'a Bundle, items: &'a Items, image: &'a [u8], cold: &'a [u8]) -> Self {
        Self { bundle, items, image, cold }
    }

    /// Finds the planes of an item and loads the scale of its columns.
    pub(super) fn prepare(&self, item: &Item) -> Result<Prepared<'a>, ExportError> {
        let mut prepared = self.locate(item)?;
        if let Some(name) = &item.pre_quant_scale {
            prepared.scale = Some(self.scale(item, name, prepared.columns)?);
        }
        Ok(prepared)
    }

    fn locate(&self, item: &Item) -> Result<Prepared<'a>, ExportError> {
        let (tensor, geometry) = self.named(&item.tensor);
        let space = match tensor.placement {
            Placement::Image => self.image,
            Placement::Cold => self.cold,
        };
        let rows = tensor.parts[item.part].rows;
        let columns = item.shape.iter().skip(1).product();
        let source = match (geometry, &tensor.layout) {
            (Geometry::Rows { row_bytes, .. }, layout) => {
                let start = (tensor.parts[item.part].row_start * row_bytes) as usize;
                let data = &plane_bytes(tensor, 0, item.expert, space)[start..start + (rows * row_bytes) as usize];
                let row_bytes = *row_bytes as usize;
                match layout {
                    Layout::GgmlRaw { ggml_type, .. } => {
                        let format = raw::by_name(ggml_type).filter(|f| {
                            (columns as usize).is_multiple_of(f.weights)
                                && columns as usize / f.weights * f.bytes == row_bytes
                        });
                        let format = format.ok_or_else(|| ExportError::Raw {
                            path: self.bundle.dir().to_owned(),
                            tensor: tensor.name.clone(),
                            found: ggml_type.clone(),
                            found_row_bytes: row_bytes as u64,
                        })?;
                        Source::Raw { format, data, row_bytes }
                    }
                    Layout::RowMajor { dtype } => Source::Plain { dtype, data, row_bytes },
                    Layout::Marlin { .. } => Source::Plain { dtype: "u8", data, row_bytes },
                }
            }
            (Geometry::Tiled(_), _) => match tiled_view(tensor, geometry, item.expert, space) {
                Some(view) => Source::Tiled(view),
                None => unreachable!("the reader has checked the size of every plane of {}", tensor.name),
            },
        };
        let row_bytes_out = item.bytes.checked_div(rows).unwrap_or(0);
        Ok(Prepared { source, part: item.part, rows, columns, row_bytes_out, scale: None })
    }

    fn named(&self, name: &str) -> (&'a Tensor, &'a Geometry) {
        self.bundle.tensor(name).expect("items are collected from the tensors of this bundle")
    }

    fn scale(&self, item: &Item, name: &str, columns: u64) -> Result<Vec<f32>, ExportError> {
        let fault = |reason: String| ExportError::PreQuantScale {
            path: self.bundle.dir().to_owned(),
            tensor: item.name.clone(),
            scale: name.to_owned(),
            reason,
        };
        let scale = self.items.find(name).ok_or_else(|| fault("is not in the bundle".into()))?;
        if scale.dtype != "F32" || scale.bytes != columns * 4 {
            return Err(fault(format!("is {} {:?}, expected {columns} floats", scale.dtype, scale.shape)));
        }
        let prepared = self.locate(scale)?;
        let bytes = prepared.bytes(0..prepared.rows);
        let (words, _) = bytes.as_chunks::<4>();
        Ok(words.iter().map(|w| f32::from_le_bytes(*w)).collect())
    }
}

impl Prepared<'_> {
    /// Runs of rows that are decoded independently; for tiled matrices each takes whole tiles.
    pub(super) fn bands(&self) -> Vec<Range<u64>> {
        let wanted = BAND_BYTES.checked_div(self.row_bytes_out).unwrap_or(1).max(1);
        let step = match self.source {
            Source::Tiled(_) => wanted.next_multiple_of(TILE_N as u64),
            _ => wanted,
        };
        (0..self.rows).step_by(step as usize).map(|first| first..(first + step).min(self.rows)).collect()
    }

    /// The output bytes of a run of rows, little-endian.
    pub(super) fn bytes(&self, rows: Range<u64>) -> Vec<u8> {
        let range = rows.start as usize..rows.end as usize;
        let count = range.len() * self.columns as usize;
        let mut values = vec![0f32; count];
        match &self.source {
            Source::Tiled(view) => view.decode_rows(self.part, range, &mut values),
            Source::Raw { format, data, row_bytes } => {
                format.decode(&data[range.start * row_bytes..range.end * row_bytes], &mut values);
            }
            Source::Plain { dtype, data, row_bytes } => {
                let bytes = &data[range.start * row_bytes..range.end * row_bytes];
                if !widen(dtype, bytes, &mut values) {
                    return bytes.to_vec();
                }
            }
        }
        if let Some(scale) = self.scale.as_ref().filter(|s| !s.is_empty()) {
            for row in values.chunks_exact_mut(scale.len()) {
                row.iter_mut().zip(scale).for_each(|(w, p)| *w *= p);
            }
        }
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }
}

/// Widens plain floating point elements to f32, exactly; `false` for a type that keeps its bytes.
fn widen(dtype: &str, bytes: &[u8], out: &mut [f32]) -> bool {
    let pairs = || bytes.as_chunks::<2>().0;
    match dtype {
        "f32" => {
            let words = bytes.as_chunks::<4>().0;
            out.iter_mut().zip(words).for_each(|(v, w)| *v = f32::from_le_bytes(*w));
        }
        // A shift keeps the payload of a signalling NaN, which a conversion would quiet.
        "bf16" => {
            out.iter_mut().zip(pairs()).for_each(|(v, w)| *v = f32::from_bits(u32::from(u16::from_le_bytes(*w)) << 16));
        }
        "f16" => out.iter_mut().zip(pairs()).for_each(|(v, w)| *v = f16::from_le_bytes(*w).to_f32()),
        "f8_e4m3" => out.iter_mut().zip(bytes).for_each(|(v, b)| *v = E4M3[*b as usize]),
        // E5M2 is the upper byte of an f16.
        "f8_e5m2" => out.iter_mut().zip(bytes).for_each(|(v, b)| *v = f16::from_bits(u16::from(*b) << 8).to_f32()),
        "f8_e8m0" => out.iter_mut().zip(bytes).for_each(|(v, b)| *v = e8m0(*b)),
        _ => return false,
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_types_widen_exactly() {
        let mut out = [0f32; 2];
        assert!(widen("bf16", &[0x80, 0x3F, 0x00, 0x80], &mut out));
        assert_eq!(out.map(f32::to_bits), [1.0f32.to_bits(), (-0.0f32).to_bits()]);
        assert!(widen("f8_e5m2", &[0x3C, 0x01], &mut out));
        assert_eq!(out, [1.0, 2f32.powi(-16)]);
        assert!(widen("f8_e8m0", &[128, 0], &mut out));
        assert_eq!(out, [2.0, 2f32.powi(-127)]);
        assert!(!widen("i32", &[0; 8], &mut out));
    }
}
