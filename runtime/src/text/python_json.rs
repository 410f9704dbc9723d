//! JSON as Python's `json.dumps` writes it.
//!
//! Chat templates were trained on its spelling: a space after the comma and the colon, characters
//! outside ASCII as they are, floats as `repr` prints them.

use serde_json::Value;

/// Arguments of `json.dumps` that templates use.
#[derive(Debug, Clone, Default)]
pub struct DumpOptions {
    /// Spaces per level; absent means one line.
    pub indent: Option<usize>,
    /// Escape everything outside ASCII.
    pub ensure_ascii: bool,
    /// Order the keys of objects.
    pub sort_keys: bool,
    /// Separators between items and after a key; Python's defaults where absent.
    pub separators: Option<(String, String)>,
}

/// Writes `value` as `json.dumps(value, ...)` would.
pub fn dumps(value: &Value, options: &DumpOptions) -> String {
    let default_item = if options.indent.is_some() { "," } else { ", " };
    let (item, key) = match &options.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None => (default_item, ": "),
    };
    let mut writer = Writer { output: String::new(), options, item, key };
    writer.value(value, 0);
    writer.output
}

struct Writer<'a> {
    output: String,
    options: &'a DumpOptions,
    item: &'a str,
    key: &'a str,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, level: usize) {
        match value {
            Value::Null => self.output.push_str("null"),
            Value::Bool(true) => self.output.push_str("true"),
            Value::Bool(false) => self.output.push_str("false"),
            Value::Number(number) => match number.as_f64() {
                Some(float) if number.is_f64() => self.output.push_str(&float_repr(float)),
                _ => self.output.push_str(&number.to_string()),
            },
            Value::String(text) => self.string(text),
            Value::Array(items) if items.is_empty() => self.output.push_str("[]"),
            Value::Array(items) => {
                self.output.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.separate(index, level + 1);
                    self.value(item, level + 1);
                }
                self.line(level);
                self.output.push(']');
            }
            Value::Object(fields) if fields.is_empty() => self.output.push_str("{}"),
            Value::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().collect();
                if self.options.sort_keys {
                    fields.sort_by_key(|(name, _)| name.as_str());
                }
                self.output.push('{');
                for (index, (name, field)) in fields.into_iter().enumerate() {
                    self.separate(index, level + 1);
                    self.string(name);
                    self.output.push_str(self.key);
                    self.value(field, level + 1);
                }
                self.line(level);
                self.output.push('}');
            }
        }
    }

    fn separate(&mut self, index: usize, level: usize) {
        if index > 0 {
            self.output.push_str(self.item);
        }
        self.line(level);
    }

    fn line(&mut self, level: usize) {
        if let Some(indent) = self.options.indent {
            self.output.push('\n');
            self.output.extend(std::iter::repeat_n(' ', indent.saturating_mul(level)));
        }
    }

    fn string(&mut self, text: &str) {
        self.output.push('"');
        for character in text.chars() {
            match character {
                '"' => self.output.push_str("\\\""),
                '\\' => self.output.push_str("\\\\"),
                '\n' => self.output.push_str("\\n"),
                '\r' => self.output.push_str("\\r"),
                '\t' => self.output.push_str("\\t"),
                '\u{8}' => self.output.push_str("\\b"),
                '\u{c}' => self.output.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.options.ensure_ascii && !c.is_ascii()) => {
                    let mut units = [0u16; 2];
                    for unit in c.encode_utf16(&mut units) {
                        self.output.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.output.push(c),
            }
        }
        self.output.push('"');
    }
}

/// `repr` of a Python float: the shortest digits that give the number back, in positional notation
/// from 1e-4 up to 1e16.
pub(super) fn float_repr(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            "NaN"
        } else if value > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_owned();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value == 0.0 || (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Expected values from Python 3.11's `json.dumps`.
    #[test]
    fn output_agrees_with_python() {
        let value = json!({"b": [1, 2.0, true, null], "a": {"x": "\u{e9}\"\n\u{1}", "e": [], "o": {}}});
        assert_eq!(
            dumps(&value, &DumpOptions::default()),
            "{\"b\": [1, 2.0, true, null], \"a\": {\"x\": \"\u{e9}\\\"\\n\\u0001\", \"e\": [], \"o\": {}}}"
        );
        let sorted = DumpOptions { indent: Some(2), ensure_ascii: true, sort_keys: true, separators: None };
        assert_eq!(
            dumps(&json!({"b": ["\u{1f600}"], "a": 1}), &sorted),
            "{\n  \"a\": 1,\n  \"b\": [\n    \"\\ud83d\\ude00\"\n  ]\n}"
        );
        let compact = DumpOptions { separators: Some((",".to_owned(), ":".to_owned())), ..DumpOptions::default() };
        assert_eq!(dumps(&json!({"a": [1, 2]}), &compact), "{\"a\":[1,2]}");
    }

    #[test]
    fn floats_agree_with_python() {
        for (value, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (f64::INFINITY, "Infinity"),
        ] {
            assert_eq!(float_repr(value), expected);
        }
    }
}
