//! Standard output: buffered, without panics, and plain text helpers.

use std::io::{self, BufWriter, Write};

use vt_bundle::printable::Printable;

/// Buffered standard output on which names of files and texts of stores do nothing to a terminal. Call [`Write::flush`]
/// before the end: dropping hides errors.
pub fn stdout() -> Printable<BufWriter<io::StdoutLock<'static>>> {
    Printable::new(BufWriter::new(io::stdout().lock()))
}

/// Prints one JSON value, indented, with a newline.
pub fn json(value: &serde_json::Value) -> io::Result<()> {
    let mut out = stdout();
    serde_json::to_writer_pretty(&mut out, value).map_err(io::Error::from)?;
    writeln!(out)?;
    out.flush()
}

/// A number of bytes for people: `512 B`, `1.5 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.prec$} {}", UNITS[unit], prec = usize::from(value < 100.0) + usize::from(value < 10.0))
}

/// A count for people: `134,515,008`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A shape for people: `[960, 576]`, and `[]` for a scalar.
pub fn shape(axes: &[u64]) -> String {
    format!("[{}]", axes.iter().map(u64::to_string).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(98 << 20), "98.0 MiB");
        assert_eq!(bytes(1000 << 20), "0.98 GiB");
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(134_515_008), "134,515,008");
        assert_eq!(shape(&[2, 3]), "[2, 3]");
    }
}
