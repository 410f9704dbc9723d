//! Metadata: keys and values, borrowed from the mapped file.
//!
//! Strings are bytes here, as in the file: a key must be UTF-8, a value need not be.

use std::collections::HashMap;

/// The scalar types and the string type, by their id in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Str,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// The type of an id.
    pub fn from_id(id: u32) -> Option<Self> {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, Str, Array, U64, I64, F64].get(id as usize).copied()
    }

    /// Bytes of a scalar; 8 for a string (its length), which is the least that it takes; 12 for an array.
    pub(crate) fn min_bytes(self) -> u64 {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | Str => 8,
            Array => 12,
        }
    }

    /// The spelling in messages.
    pub(crate) fn name(self) -> &'static str {
        use ValueType::*;
        match self {
            U8 => "u8",
            I8 => "i8",
            U16 => "u16",
            I16 => "i16",
            U32 => "u32",
            I32 => "i32",
            F32 => "f32",
            Bool => "bool",
            Str => "string",
            Array => "array",
            U64 => "u64",
            I64 => "i64",
            F64 => "f64",
        }
    }
}

/// A value.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value<'a> {
    Unsigned(ValueType, u64),
    Signed(ValueType, i64),
    Float(ValueType, f64),
    Bool(bool),
    Str(&'a [u8]),
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// An integer of any width that is not negative (writers differ in the width that they use).
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(_, v) => Some(v),
            Value::Signed(_, v) => u64::try_from(v).ok(),
            _ => None,
        }
    }

    /// A float, or an integer as a float.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::Float(_, v) => Some(v),
            Value::Unsigned(_, v) => Some(v as f64),
            Value::Signed(_, v) => Some(v as f64),
            _ => None,
        }
    }

    /// A boolean; an integer 0 or 1 counts as one.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(v) => Some(v),
            _ => self.as_u64().filter(|v| *v < 2).map(|v| v == 1),
        }
    }

    /// A string that is UTF-8.
    pub fn as_str(&self) -> Option<&'a str> {
        match *self {
            Value::Str(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// What the value is, for messages: type and, where short, content.
    pub fn describe(&self) -> String {
        match *self {
            Value::Unsigned(kind, v) => format!("{v} ({})", kind.name()),
            Value::Signed(kind, v) => format!("{v} ({})", kind.name()),
            Value::Float(kind, v) => format!("{v} ({})", kind.name()),
            Value::Bool(v) => format!("{v} (bool)"),
            Value::Str(bytes) => format!("\"{}\" (string)", super::error::printable(bytes)),
            Value::Array(array) => format!("an array of {} {}", array.len(), array.element().name()),
        }
    }
}

/// An array whose extent was checked; elements are decoded as they are asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    raw: &'a [u8],
}

impl<'a> Array<'a> {
    /// `raw` must hold exactly `len` elements; the parser has walked it.
    pub(crate) fn new(element: ValueType, len: usize, raw: &'a [u8]) -> Self {
        Self { element, len, raw }
    }

    /// The element type.
    pub fn element(&self) -> ValueType {
        self.element
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as byte strings, if it is an array of strings.
    pub fn strings(&self) -> Option<impl Iterator<Item = &'a [u8]> + use<'a>> {
        let mut rest = self.raw;
        (self.element == ValueType::Str).then(move || {
            std::iter::from_fn(move || {
                let (len, tail) = rest.split_first_chunk::<8>()?;
                let (text, tail) = tail.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
                rest = tail;
                Some(text)
            })
        })
    }

    /// The elements as integers, if it is an array of integers or booleans of any width.
    pub fn integers(&self) -> Option<impl Iterator<Item = i128> + use<'a>> {
        use ValueType::*;
        let element = self.element;
        let raw = self.raw;
        matches!(element, U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64 | Bool).then(move || {
            let width = element.min_bytes() as usize;
            raw.chunks_exact(width).map(move |bytes| {
                let mut wide = [0u8; 8];
                wide[..width].copy_from_slice(bytes);
                let unsigned = u64::from_le_bytes(wide);
                match element {
                    // Sign extension: shift the value to the top of the word and back.
                    I8 | I16 | I32 | I64 => i128::from((unsigned << (64 - 8 * width)) as i64 >> (64 - 8 * width)),
                    _ => i128::from(unsigned),
                }
            })
        })
    }

    /// The elements as floats, if it is an array of numbers.
    pub fn floats(&self) -> Option<Vec<f64>> {
        use ValueType::*;
        match self.element {
            F32 => {
                let (words, _) = self.raw.as_chunks::<4>();
                Some(words.iter().map(|w| f64::from(f32::from_le_bytes(*w))).collect())
            }
            F64 => {
                let (words, _) = self.raw.as_chunks::<8>();
                Some(words.iter().map(|w| f64::from_le_bytes(*w)).collect())
            }
            _ => Some(self.integers()?.map(|v| v as f64).collect()),
        }
    }

    /// The bytes of the elements as they stand in the file.
    pub fn raw(&self) -> &'a [u8] {
        self.raw
    }
}

/// The key-value table of one file, in file order.
#[derive(Debug, Default)]
pub struct Metadata<'a> {
    entries: Vec<(&'a str, Value<'a>)>,
    index: HashMap<&'a str, usize>,
}

impl<'a> Metadata<'a> {
    /// Adds an entry; `false` if the key is there already.
    pub(crate) fn insert(&mut self, key: &'a str, value: Value<'a>) -> bool {
        let fresh = self.index.insert(key, self.entries.len()).is_none();
        self.entries.push((key, value));
        fresh
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        self.index.get(key).map(|place| &self.entries[*place].1)
    }

    /// All entries in file order.
    pub fn entries(&self) -> &[(&'a str, Value<'a>)] {
        &self.entries
    }
}
