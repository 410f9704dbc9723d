//! Output that follows a grammar: JSON, JSON schemas, regular expressions, Lark grammars, by the
//! `llguidance` crate.
//!
//! Its trie of tokens is built from this crate's own table of token bytes, so that both agree on what a
//! token stands for. A grammar is compiled on the thread that prepares the request; the engine's thread
//! only asks which tokens may come next.

use super::{TextError, Tokenizer};
use crate::engine::constraint::{Constraint, ConstraintError};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// White space between the parts of JSON: a space, or a line's end with what indents the next line. Without
/// a bound, small models write it for ever.
const JSON_WHITESPACE: &str = r"( |\n {0,24}|\n\t{0,8})?";

/// What the output must follow.
#[derive(Debug, Clone, PartialEq)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema(Value),
    /// A regular expression that the whole output matches.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's form of Lark.
    Lark(String),
}

/// Compiles grammars for one tokenizer.
pub struct Grammars {
    factory: ParserFactory,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Grammars").finish_non_exhaustive()
    }
}

impl Grammars {
    /// Builds the trie of all tokens; takes some 100 ms for a vocabulary of 150,000.
    ///
    /// # Errors
    /// [`TextError::Grammar`] where llguidance cannot use the vocabulary.
    pub fn new(tokenizer: &Tokenizer, stop_token_ids: &BTreeSet<u32>) -> Result<Self, TextError> {
        let count = tokenizer.vocab_size() as u32;
        let mut words: Vec<Vec<u8>> = (0..count)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id);
                if tokenizer.is_special(id) {
                    // A control token is not the text that names it.
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
                } else {
                    bytes.to_vec()
                }
            })
            .collect();
        let mut stops: Vec<u32> = stop_token_ids.iter().copied().filter(|&id| id < count).collect();
        if stops.is_empty() {
            // A model without an end: the grammar ends at a token that cannot be chosen.
            words.push(Vec::new());
            stops.push(count);
        }
        let info = TokRxInfo::new(words.len() as u32, stops[0]);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&stops);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory =
            ParserFactory::new_simple(&environment).map_err(|error| TextError::Grammar(error.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self { factory })
    }

    /// Compiles a grammar for one sequence.
    ///
    /// # Errors
    /// [`TextError::Grammar`] saying what is wrong with it, or which limit it exceeds.
    pub fn compile(&self, grammar: &Grammar) -> Result<Box<dyn Constraint>, TextError> {
        let grammar = match grammar {
            Grammar::JsonObject => schema_grammar(&json!({"type": "object"})),
            Grammar::JsonSchema(schema) => schema_grammar(schema),
            Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Grammar::Choice(texts) => TopLevelGrammar::from_lark(choice_grammar(texts)),
            Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let mut matcher = Matcher::new(self.factory.create_parser(grammar));
        if let Some(error) = matcher.get_error() {
            return Err(TextError::Grammar(error));
        }
        // A grammar that nothing can satisfy shows at its first step.
        matcher.compute_mask().map_err(|error| TextError::Grammar(error.to_string()))?;
        Ok(Box::new(GrammarConstraint { matcher }))
    }
}

/// The schema with our options; a schema that brings options of its own keeps them.
fn schema_grammar(schema: &Value) -> TopLevelGrammar {
    let mut schema = schema.clone();
    if let Some(fields) = schema.as_object_mut() {
        let options = json!({"whitespace_flexible": true, "whitespace_pattern": JSON_WHITESPACE});
        fields.entry("x-guidance").or_insert(options);
    }
    TopLevelGrammar::from_json_schema(schema)
}

fn choice_grammar(texts: &[String]) -> String {
    let quoted: Vec<String> = texts.iter().map(|text| lark_string(text)).collect();
    format!("start: {}", quoted.join(" | "))
}

/// A text as a string of a Lark grammar, which is a string of JSON.
pub fn lark_string(text: &str) -> String {
    Value::from(text).to_string()
}

/// A grammar's state within a sequence.
struct GrammarConstraint {
    matcher: Matcher,
}

impl fmt::Debug for GrammarConstraint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("GrammarConstraint").finish_non_exhaustive()
    }
}

impl Constraint for GrammarConstraint {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(|error| ConstraintError(error.to_string()))?;
        let words = allowed.as_slice();
        for (chunk, logits) in logits.chunks_mut(32).enumerate() {
            let word = words.get(chunk).copied().unwrap_or(0);
            if word == u32::MAX {
                continue;
            }
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word & (1 << bit) == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.matcher.consume_token(token).map_err(|error| ConstraintError(error.to_string()))
    }

    fn is_complete(&mut self) -> bool {
        self.matcher.is_stopped()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::fake_text;
    use crate::test_support::tokenizer::{END, EOS};

    fn compile(grammar: &Grammar) -> Result<Box<dyn Constraint>, TextError> {
        let text = fake_text();
        Grammars::new(text.tokenizer(), text.stop_token_ids())?.compile(grammar)
    }

    /// Tokens that may come after `text`; an error where the text itself may not.
    fn next(grammar: &Grammar, text: &str) -> Result<Vec<u32>, ConstraintError> {
        let mut constraint = compile(grammar).unwrap();
        for byte in text.bytes() {
            let mut logits = [0.0f32; 300];
            constraint.mask(&mut logits)?;
            if logits[byte as usize] != 0.0 {
                return Err(ConstraintError(format!("{byte} is excluded")));
            }
            constraint.accept(u32::from(byte))?;
        }
        let mut logits = [0.0f32; 300];
        constraint.mask(&mut logits)?;
        Ok((0u32..).zip(logits).filter(|pair| pair.1 == 0.0).map(|pair| pair.0).collect())
    }

    #[test]
    fn schemas_shape_the_output() {
        let schema = Grammar::JsonSchema(json!({
            "type": "object",
            "properties": {"n": {"$ref": "#/$defs/number"}},
            "required": ["n"], "additionalProperties": false,
            "$defs": {"number": {"type": "integer"}}
        }));
        assert_eq!(next(&schema, "{\"n\":5}").unwrap(), [EOS, END]);
        assert!(next(&schema, "{ \"n\" : -12 }").is_ok());
        assert!(next(&schema, "{\"m\"").is_err());
        assert!(next(&schema, "{\"n\":\"").is_err());
        assert!(next(&Grammar::JsonObject, "{\"a\": [1, {\"b\": null}], \"\u{e9}\": 1e5}").is_ok());
        assert!(next(&Grammar::JsonObject, "[").is_err());
        let spaces = " ".repeat(100);
        assert!(next(&Grammar::JsonObject, &format!("{{{spaces}")).is_err());
    }

    #[test]
    fn other_grammars_shape_it_too() {
        let regex = Grammar::Regex("[0-9]{2,3}".to_owned());
        assert!(!next(&regex, "1").unwrap().contains(&EOS));
        assert!(next(&regex, "12").unwrap().contains(&EOS));
        assert_eq!(next(&regex, "123").unwrap(), [EOS, END]);
        let choice = Grammar::Choice(vec!["yes \"ok\"".to_owned(), "no".to_owned()]);
        assert_eq!(next(&choice, "").unwrap(), [u32::from(b'n'), u32::from(b'y')]);
        assert_eq!(next(&choice, "yes \"ok\"").unwrap(), [EOS, END]);
        let lark = Grammar::Lark("start: \"a\"+ \"b\"".to_owned());
        assert!(next(&lark, "aaab").is_ok());
    }

    #[test]
    fn completion_is_noticed() {
        let mut constraint = compile(&Grammar::Choice(vec!["ab".to_owned()])).unwrap();
        constraint.accept(u32::from(b'a')).unwrap();
        assert!(!constraint.is_complete());
        constraint.accept(u32::from(b'b')).unwrap();
        assert!(constraint.is_complete());
    }

    #[test]
    fn bad_grammars_are_refused() {
        for grammar in [
            Grammar::JsonSchema(json!({"type": "nonsense"})),
            Grammar::JsonSchema(json!(false)),
            Grammar::Regex("[".to_owned()),
            Grammar::Lark("start: missing".to_owned()),
            Grammar::Lark(String::new()),
        ] {
            assert!(matches!(compile(&grammar), Err(TextError::Grammar(_))), "{grammar:?}");
        }
    }
}
