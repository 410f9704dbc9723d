//! Typed access to a configuration, with errors that name the key.

use super::ConfigError;
use serde_json::Value;

/// Largest size that a key may have: keeps every product of three within `u64`.
const MAX_SIZE: u64 = 1 << 21;

/// A configuration and the architecture that it belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConfigReader<'a> {
    architecture: &'a str,
    config: &'a Value,
}

impl<'a> ConfigReader<'a> {
    pub(super) fn new(architecture: &'a str, config: &'a Value) -> Self {
        Self { architecture, config }
    }

    /// The same reader over an object within the configuration.
    pub(super) fn within(&self, config: &'a Value) -> Self {
        Self { architecture: self.architecture, config }
    }

    pub(super) fn architecture(&self) -> &'a str {
        self.architecture
    }

    /// The value of a key; `null` counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.config.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// A required size, 1 to [`MAX_SIZE`].
    pub(super) fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.optional_size(key)?.ok_or_else(|| self.wrong(key, "a positive number"))
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(size @ 1..=MAX_SIZE) => Ok(Some(size as usize)),
            _ => Err(self.wrong(key, &format!("a whole number from 1 to {MAX_SIZE}"))),
        }
    }

    /// A positive, finite number.
    pub(super) fn optional_positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
            _ => Err(self.wrong(key, "a positive number")),
        }
    }

    pub(super) fn positive(&self, key: &str) -> Result<f64, ConfigError> {
        self.optional_positive(key)?.ok_or_else(|| self.wrong(key, "a positive number"))
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    pub(super) fn optional_text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    pub(super) fn optional_list(&self, key: &str) -> Result<Option<&'a [Value]>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => Err(self.wrong(key, "a list")),
        }
    }

    fn found(&self, key: &str) -> String {
        self.get(key).map_or_else(|| "missing".to_owned(), Value::to_string)
    }

    /// The key has a value that makes no sense.
    pub(super) fn wrong(&self, key: &str, expected: &str) -> ConfigError {
        ConfigError::Key {
            architecture: self.architecture.to_owned(),
            key: key.to_owned(),
            found: self.found(key),
            expected: expected.to_owned(),
        }
    }

    /// The key has a value that makes sense, but that there is no code for.
    pub(super) fn unsupported(&self, key: &str, expected: &str) -> ConfigError {
        ConfigError::Unsupported {
            architecture: self.architecture.to_owned(),
            key: key.to_owned(),
            found: self.found(key),
            expected: expected.to_owned(),
        }
    }
}
