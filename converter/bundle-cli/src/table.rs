//! Plain text tables: two spaces between columns, headings underlined by their own row.

use std::io::{self, Write};

use vt_bundle::printable::line;

/// How a column is set.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows under headings.
pub struct Table {
    headings: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(headings: &[(&'static str, Align)]) -> Self {
        Self { headings: headings.to_vec(), rows: Vec::new() }
    }

    /// Adds a row; it has one cell per heading.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.headings.len());
        self.rows.push(cells.iter().map(|cell| line(cell).into_owned()).collect());
    }

    /// Writes the table, or nothing where it has no rows.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        let widths: Vec<usize> = (0..self.headings.len())
            .map(|c| {
                self.rows.iter().map(|r| r[c].chars().count()).chain([self.headings[c].0.len()]).max().unwrap_or(0)
            })
            .collect();
        let titles: Vec<String> = self.headings.iter().map(|(title, _)| (*title).to_owned()).collect();
        for row in std::iter::once(&titles).chain(&self.rows) {
            let mut line = String::new();
            for ((cell, width), (_, align)) in row.iter().zip(&widths).zip(&self.headings) {
                let padding = " ".repeat(width - cell.chars().count());
                match align {
                    Align::Left => line.extend([cell, padding.as_str(), "  "]),
                    Align::Right => line.extend([padding.as_str(), cell, "  "]),
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&[("name", Align::Left), ("bytes", Align::Right)]);
        table.row(vec!["a".into(), "1".into()]);
        table.row(vec!["longer".into(), "1234567".into()]);
        let mut out = Vec::new();
        table.write(&mut out).expect("written");
        assert_eq!(String::from_utf8(out).expect("text"), "name      bytes\na             1\nlonger  1234567\n");
    }
}
