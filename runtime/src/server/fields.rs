//! Reading the fields of a request: `null` is absent, unknown fields are left alone, and whatever is wrong
//! is said with the name of the field.

use super::error::ApiError;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// Parses a body that must be a JSON object.
///
/// # Errors
/// 400 with the place where the JSON breaks.
pub fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => {
            Err(ApiError::bad_request(format!("the request body must be a JSON object, not {}", kind_of(&other))))
        }
        Err(error) => Err(ApiError::bad_request(format!("the request body is not valid JSON: {error}"))),
    }
}

/// The kind of a JSON value, for messages.
pub fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The fields of one object, and which of them were asked for.
#[derive(Debug)]
pub struct Fields<'a> {
    fields: &'a Map<String, Value>,
    /// Path of the object, with a dot at its end where there is one.
    path: String,
    asked: RefCell<BTreeSet<String>>,
}

impl<'a> Fields<'a> {
    /// The fields of a request.
    pub fn new(fields: &'a Map<String, Value>) -> Self {
        Self::within("", fields)
    }

    /// The fields of an object inside a request, at `path`.
    pub fn within(path: &str, fields: &'a Map<String, Value>) -> Self {
        Self {
            fields,
            path: if path.is_empty() { String::new() } else { format!("{path}.") },
            asked: RefCell::default(),
        }
    }

    /// Full name of a field.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// A field's value, unless it is absent or null.
    pub fn value(&self, field: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(field.to_owned());
        self.fields.get(field).filter(|value| !value.is_null())
    }

    /// Fields that nobody asked for.
    pub fn unknown(&self) -> Vec<&'a str> {
        let asked = self.asked.borrow();
        self.fields.keys().map(String::as_str).filter(|name| !asked.contains(*name)).collect()
    }

    /// The error that `field` should have been something else.
    pub fn wrong(&self, field: &str, expected: &str, found: &Value) -> ApiError {
        ApiError::bad_field(self.name(field), format!("expected {expected}, found {}", kind_of(found)))
    }

    /// A boolean.
    ///
    /// # Errors
    /// 400 where the field is something else.
    pub fn boolean(&self, field: &str) -> Result<Option<bool>, ApiError> {
        self.value(field).map(|value| value.as_bool().ok_or_else(|| self.wrong(field, "a boolean", value))).transpose()
    }

    /// A string.
    ///
    /// # Errors
    /// 400 where the field is something else.
    pub fn string(&self, field: &str) -> Result<Option<&'a str>, ApiError> {
        self.value(field).map(|value| value.as_str().ok_or_else(|| self.wrong(field, "a string", value))).transpose()
    }

    /// An object.
    ///
    /// # Errors
    /// 400 where the field is something else.
    pub fn object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.value(field)
            .map(|value| value.as_object().ok_or_else(|| self.wrong(field, "an object", value)))
            .transpose()
    }

    /// An array.
    ///
    /// # Errors
    /// 400 where the field is something else.
    pub fn array(&self, field: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.value(field).map(|value| value.as_array().ok_or_else(|| self.wrong(field, "an array", value))).transpose()
    }

    /// A number within `range`.
    ///
    /// # Errors
    /// 400 where the field is something else or outside.
    pub fn number(&self, field: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        let Some(number) = value.as_f64() else {
            return Err(self.wrong(field, "a number", value));
        };
        let number = number as f32;
        if range.contains(&number) {
            Ok(Some(number))
        } else {
            let (least, most) = (range.start(), range.end());
            // The least positive number is how a range says that 0 is not in it.
            let message = match *least == f32::MIN_POSITIVE {
                true => format!("{number} is not above 0 and at most {most}"),
                false => format!("{number} is not between {least} and {most}"),
            };
            Err(ApiError::bad_field(self.name(field), message))
        }
    }

    /// A whole number within `range`. Floats without a fraction are accepted: some clients have no
    /// integers.
    ///
    /// # Errors
    /// 400 where the field is something else or outside.
    pub fn integer(&self, field: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        let Some(number) = whole_number(value) else {
            return Err(match value.as_f64() {
                Some(number) => {
                    ApiError::bad_field(self.name(field), format!("{number} is not a whole number in range"))
                }
                None => self.wrong(field, "a whole number", value),
            });
        };
        if range.contains(&number) {
            Ok(Some(number))
        } else {
            let (start, end) = (range.start(), range.end());
            Err(ApiError::bad_field(
                self.name(field),
                if *end == i64::MAX {
                    format!("{number} is less than {start}")
                } else {
                    format!("{number} is not between {start} and {end}")
                },
            ))
        }
    }

    /// A count of tokens: a whole number from `least` up.
    ///
    /// # Errors
    /// 400 where the field is something else or less.
    pub fn count(&self, field: &str, least: i64) -> Result<Option<usize>, ApiError> {
        let number = self.integer(field, least..=i64::MAX)?;
        Ok(number.map(|number| usize::try_from(number).unwrap_or(usize::MAX)))
    }

    /// A string or an array of strings.
    ///
    /// # Errors
    /// 400 where the field, or one of its items, is something else.
    pub fn strings(&self, field: &str) -> Result<Option<Vec<String>>, ApiError> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        match value {
            Value::String(text) => Ok(Some(vec![text.clone()])),
            Value::Array(items) => items
                .iter()
                .map(|item| item.as_str().map(str::to_owned).ok_or_else(|| self.wrong(field, "strings only", item)))
                .collect::<Result<_, _>>()
                .map(Some),
            other => Err(self.wrong(field, "a string or an array of strings", other)),
        }
    }

    /// An array of token ids.
    ///
    /// # Errors
    /// 400 where the field, or one of its items, is something else.
    pub fn token_ids(&self, field: &str) -> Result<Option<Vec<u32>>, ApiError> {
        let Some(items) = self.array(field)? else {
            return Ok(None);
        };
        items
            .iter()
            .map(|item| token_id(item).ok_or_else(|| self.wrong(field, "token ids only", item)))
            .collect::<Result<_, _>>()
            .map(Some)
    }
}

/// A token id, where `value` is one.
pub fn token_id(value: &Value) -> Option<u32> {
    whole_number(value).and_then(|number| u32::try_from(number).ok())
}

/// A whole number in an i64; unsigned numbers beyond it keep their bits, for seeds.
fn whole_number(value: &Value) -> Option<i64> {
    if let Some(number) = value.as_i64() {
        return Some(number);
    }
    if let Some(number) = value.as_u64() {
        return Some(number as i64);
    }
    /// Largest magnitude up to which every whole number is a float.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number = value.as_f64()?;
    (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap()
    }

    #[test]
    fn c77_bodies_that_are_not_objects_are_refused() {
        for (body, expected) in [
            (&b"{\"a\": 1"[..], "EOF"),
            (b"", "EOF"),
            (b"[1]", "an array"),
            (b"{\"a\": \"\xff\"}", "valid JSON"),
            (b"nonsense", "valid JSON"),
        ] {
            let error = parse_object(body).unwrap_err();
            assert_eq!(error.status, 400);
            assert!(error.message.contains(expected), "{}", error.message);
        }
        // Deeper than any honest request; the parser gives up instead of overflowing the stack.
        let deep = "[".repeat(100_000);
        assert!(parse_object(deep.as_bytes()).is_err());
    }

    #[test]
    fn c77_wrong_types_and_ranges_name_the_field() {
        let map = object(json!({
            "temperature": "hot", "top_p": 2, "max_tokens": -1, "n": 1.5, "stop": [1],
            "stream": 1, "ids": [1, -1], "big": 1e300, "null": null, "other": 1
        }));
        let fields = Fields::new(&map);
        let errors = [
            fields.number("temperature", 0.0..=2.0).unwrap_err(),
            fields.number("top_p", 0.0..=1.0).unwrap_err(),
            fields.count("max_tokens", 1).unwrap_err(),
            fields.integer("n", 1..=8).unwrap_err(),
            fields.strings("stop").unwrap_err(),
            fields.boolean("stream").unwrap_err(),
            fields.token_ids("ids").unwrap_err(),
            fields.integer("big", 0..=i64::MAX).unwrap_err(),
        ];
        let params: Vec<_> = errors.iter().filter_map(|error| error.param.as_deref()).collect();
        let expected = ["temperature", "top_p", "max_tokens", "n", "stop", "stream", "ids", "big"];
        assert_eq!(params, expected);
        assert_eq!(fields.boolean("null").unwrap(), None);
        assert_eq!(fields.boolean("missing").unwrap(), None);
        assert_eq!(fields.unknown(), ["other"]);
    }

    #[test]
    fn numbers_are_read_generously() {
        let map = object(json!({"a": 3.0, "b": 18446744073709551615u64, "c": 5}));
        let fields = Fields::within("outer", &map);
        assert_eq!(fields.integer("a", 0..=9).unwrap(), Some(3));
        assert_eq!(fields.integer("b", i64::MIN..=i64::MAX).unwrap(), Some(-1));
        let error = fields.number("c", f32::MIN_POSITIVE..=1.0).unwrap_err();
        assert_eq!(error.message, "outer.c: 5 is not above 0 and at most 1");
        let error = fields.integer("c", 0..=4).unwrap_err();
        assert_eq!(error.message, "outer.c: 5 is not between 0 and 4");
    }
}
