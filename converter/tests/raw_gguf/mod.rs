//! GGUF files written field by field, valid or not.

// Each test file uses its own part of this.
#![allow(dead_code)]

/// Bytes of a file in the making.
#[derive(Clone, Default)]
pub struct Raw(pub Vec<u8>);

impl Raw {
    /// Magic, version and counts.
    pub fn header(version: u32, tensors: u64, keys: u64) -> Self {
        let mut raw = Raw(b"GGUF".to_vec());
        raw.0.extend(version.to_le_bytes());
        raw.0.extend(tensors.to_le_bytes());
        raw.0.extend(keys.to_le_bytes());
        raw
    }

    pub fn u32(mut self, v: u32) -> Self {
        self.0.extend(v.to_le_bytes());
        self
    }

    pub fn u64(mut self, v: u64) -> Self {
        self.0.extend(v.to_le_bytes());
        self
    }

    /// A string with its length.
    pub fn str(self, v: &[u8]) -> Self {
        let mut raw = self.u64(v.len() as u64);
        raw.0.extend(v);
        raw
    }

    /// A tensor info.
    pub fn info(mut self, name: &[u8], ne: &[u64], kind: u32, offset: u64) -> Self {
        self = self.str(name).u32(ne.len() as u32);
        for d in ne {
            self = self.u64(*d);
        }
        self.u32(kind).u64(offset)
    }

    /// Pads to 32 and adds zeros as data.
    pub fn data(mut self, len: usize) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(32) + len, 0);
        self.0
    }
}

/// Metadata by key, encoded; a later entry of a key replaces the earlier one.
#[derive(Clone, Default)]
pub struct Keys(Vec<(String, Vec<u8>)>);

impl Keys {
    fn set(mut self, key: &str, value: Raw) -> Self {
        self.0.retain(|(k, _)| k != key);
        self.0.push((key.into(), value.0));
        self
    }

    pub fn u32(self, key: &str, v: u32) -> Self {
        self.set(key, Raw::default().u32(4).u32(v))
    }

    pub fn f32(self, key: &str, v: f32) -> Self {
        self.set(key, Raw::default().u32(6).u32(v.to_bits()))
    }

    pub fn bool(self, key: &str, v: bool) -> Self {
        let mut raw = Raw::default().u32(7);
        raw.0.push(v.into());
        self.set(key, raw)
    }

    pub fn str(self, key: &str, v: &str) -> Self {
        self.set(key, Raw::default().u32(8).str(v.as_bytes()))
    }

    pub fn strs<T: AsRef<[u8]>>(self, key: &str, v: &[T]) -> Self {
        let head = Raw::default().u32(9).u32(8).u64(v.len() as u64);
        self.set(key, v.iter().fold(head, |raw, s| raw.str(s.as_ref())))
    }

    pub fn i32s(self, key: &str, v: &[i32]) -> Self {
        let head = Raw::default().u32(9).u32(5).u64(v.len() as u64);
        self.set(key, v.iter().fold(head, |raw, n| raw.u32(*n as u32)))
    }

    pub fn f32s(self, key: &str, v: &[f32]) -> Self {
        let head = Raw::default().u32(9).u32(6).u64(v.len() as u64);
        self.set(key, v.iter().fold(head, |raw, n| raw.u32(n.to_bits())))
    }

    pub fn without(mut self, key: &str) -> Self {
        self.0.retain(|(k, _)| k != key);
        self
    }

    /// A file with these keys and F32 tensors of zeros: (name, ne).
    pub fn file(&self, tensors: &[(&str, &[u64])]) -> Vec<u8> {
        let mut raw = Raw::header(3, tensors.len() as u64, self.0.len() as u64);
        for (key, value) in &self.0 {
            raw = raw.str(key.as_bytes());
            raw.0.extend(value);
        }
        let mut offset = 0;
        for (name, ne) in tensors {
            raw = raw.info(name.as_bytes(), ne, 0, offset);
            offset = (offset + 4 * ne.iter().product::<u64>()).next_multiple_of(32);
        }
        raw.data(offset as usize)
    }
}
