//! Which modules an entry of an exclusion or target list names.

use std::collections::HashSet;

use regex::{Regex, RegexBuilder};

/// Compiled size of a regular expression, at most: patterns come from files of unknown authors.
const MAX_REGEX_BYTES: usize = 1 << 20;

/// A list of entries: module paths, globs, or (compressed-tensors) `re:` and a regular expression.
#[derive(Clone, Debug, Default)]
pub(crate) struct PatternSet {
    /// Module paths, which match themselves only. Lists of every module of a large model are common.
    exact: HashSet<String>,
    patterns: Vec<Pattern>,
}

#[derive(Clone, Debug)]
enum Pattern {
    /// `*` matches any run of characters, dots included; the text between stars.
    Glob(Vec<String>),
    /// Matches from the start of the path, as Python's `re.match`.
    Regex(Regex),
}

impl PatternSet {
    pub(crate) fn extend<'a>(&mut self, entries: impl IntoIterator<Item = &'a str>) {
        for entry in entries {
            if let Some(expression) = entry.strip_prefix("re:") {
                // One that cannot be compiled (look-around, for one) matches nothing: a warning at most is lost.
                let regex = RegexBuilder::new(&format!("^(?:{expression})")).size_limit(MAX_REGEX_BYTES).build();
                self.patterns.extend(regex.map(Pattern::Regex));
            } else if entry.contains('*') {
                self.patterns.push(Pattern::Glob(entry.split('*').map(str::to_owned).collect()));
            } else {
                self.exact.insert(entry.to_owned());
            }
        }
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.exact.extend(other.exact);
        self.patterns.extend(other.patterns);
    }

    /// Whether an entry matches the module path.
    pub(crate) fn matches(&self, module: &str) -> bool {
        self.exact.contains(module)
            || self.patterns.iter().any(|p| match p {
                Pattern::Glob(pieces) => glob(pieces, module),
                Pattern::Regex(regex) => regex.is_match(module),
            })
    }
}

/// Whether `text` is the pieces in order with anything between them. Taking the earliest place for each piece is enough,
/// since a star may take up whatever is left.
fn glob(pieces: &[String], text: &str) -> bool {
    let [first, middle @ .., last] = pieces else { return pieces.first().is_some_and(|p| p == text) };
    let Some(mut rest) = text.strip_prefix(first.as_str()) else { return false };
    for piece in middle {
        match rest.find(piece.as_str()) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_glob_and_regex() {
        let cases = [
            ("lm_head", "lm_head", true),
            ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", false),
            ("model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", true),
            ("model.layers.0.self_attn.*", "model.layers.0.self_attn", false),
            ("*.gate", "model.layers.3.mlp.gate", true),
            ("*layers.*.mlp.gate", "model.layers.3.mlp.gate", true),
            ("a*a", "a", false),
            ("*", "anything.at.all", true),
            ("re:.*lm_head", "model.lm_head", true),
            ("re:model.layers.[01].*proj$", "model.layers.1.q_proj", true),
            ("re:model.layers.[01].*proj$", "x.model.layers.1.q_proj", false),
            ("re:^(?!x)", "y", false),
        ];
        for (entry, module, expected) in cases {
            let mut set = PatternSet::default();
            set.extend([entry]);
            assert_eq!(set.matches(module), expected, "{entry} on {module}");
        }
    }
}
