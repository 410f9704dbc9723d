//! How models write calls.

use super::Tool;
use crate::text::Grammar;
use crate::text::grammar::lark_string;
use serde_json::{Value, json};

/// A way of writing calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several in a row, between other text:
    /// Hermes, Qwen, and models that were told of their tools by [`instructions`].
    Hermes,
    /// `{"name": ..., "parameters": {...}}` as the whole answer: Llama 3.
    Llama3,
}

/// Opens a call in the Hermes dialect.
pub const OPEN: &str = "<tool_call>";
/// Closes it.
pub const CLOSE: &str = "</tool_call>";

impl Dialect {
    /// The dialect that a chat template teaches.
    pub fn of_template(source: &str) -> Self {
        if !source.contains(OPEN) && (source.contains("<|python_tag|>") || source.contains("ipython")) {
            Self::Llama3
        } else {
            Self::Hermes
        }
    }

    /// Name of the field that holds the arguments.
    pub fn arguments_field(self) -> &'static str {
        match self {
            Self::Hermes => "arguments",
            Self::Llama3 => "parameters",
        }
    }

    /// A grammar of calls to `tools`: one, or with `several` one or more.
    pub fn grammar(self, tools: &[&Tool], several: bool) -> Grammar {
        let calls: Vec<Value> = tools
            .iter()
            .map(|tool| {
                json!({
                    "type": "object",
                    "properties": {"name": {"const": tool.name}, self.arguments_field(): tool.parameters},
                    "required": ["name", self.arguments_field()],
                    "additionalProperties": false,
                })
            })
            .collect();
        let mut schema = match <[Value; 1]>::try_from(calls) {
            Ok([call]) => call,
            Err(calls) => json!({"anyOf": calls}),
        };
        hoist_definitions(&mut schema, tools);
        // One line: white space between the parts would only delay the call.
        schema["x-guidance"] = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        match self {
            Self::Llama3 => Grammar::JsonSchema(schema),
            Self::Hermes => {
                let (open, close) = (lark_string(&format!("{OPEN}\n")), lark_string(&format!("\n{CLOSE}")));
                let start = if several { r#"call ("\n" call)*"# } else { "call" };
                Grammar::Lark(format!("start: {start}\ncall: {open} body {close}\nbody: %json {schema}\n"))
            }
        }
    }
}

/// References in a tool's schema point to the root of the schema, so its definitions move there. Of two
/// definitions with one name the first stays; tools that share a name share a definition, as a rule.
fn hoist_definitions(schema: &mut Value, tools: &[&Tool]) {
    for key in ["$defs", "definitions"] {
        for tool in tools {
            let Some(definitions) = tool.parameters.get(key).and_then(Value::as_object) else {
                continue;
            };
            if schema.get(key).is_none() {
                schema[key] = json!({});
            }
            if let Some(root) = schema[key].as_object_mut() {
                for (name, definition) in definitions {
                    root.entry(name.clone()).or_insert_with(|| definition.clone());
                }
            }
        }
    }
}

/// Tells a model of its tools whose template does not.
pub fn instructions(definitions: &[Value]) -> String {
    let lines: Vec<String> = definitions.iter().map(Value::to_string).collect();
    format!(
        "You can call functions. These are their signatures, one JSON object a line:\n{}\n\
         To call one, write its name and arguments as JSON between tags, and nothing else:\n\
         {OPEN}\n{{\"name\": \"NAME\", \"arguments\": {{\"ARGUMENT\": \"VALUE\"}}}}\n{CLOSE}",
        lines.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::fake_text;
    use crate::text::Grammars;

    #[test]
    fn templates_tell_their_dialect() {
        assert_eq!(Dialect::of_template("... '<tool_call>\\n' ..."), Dialect::Hermes);
        assert_eq!(Dialect::of_template("... ipython ..."), Dialect::Llama3);
        assert_eq!(Dialect::of_template("plain"), Dialect::Hermes);
    }

    /// Whether the grammar takes the whole of `text` as one answer.
    fn accepts(grammar: &Grammar, text: &str) -> bool {
        let assets = fake_text();
        let grammars = Grammars::new(assets.tokenizer(), assets.stop_token_ids()).unwrap();
        let mut constraint = grammars.compile(grammar).unwrap();
        for byte in text.bytes() {
            let mut logits = [0.0f32; 260];
            if constraint.mask(&mut logits).is_err() || logits[byte as usize] != 0.0 {
                return false;
            }
            constraint.accept(u32::from(byte)).unwrap();
        }
        let mut logits = [0.0f32; 260];
        constraint.is_complete() || (constraint.mask(&mut logits).is_ok() && logits[257] == 0.0)
    }

    #[test]
    fn forced_calls_have_the_right_shape() {
        let parameters = json!({
            "type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"],
            "additionalProperties": false, "$defs": {"X": {"type": "integer"}}
        });
        let f = Tool::new("", "f", None, Some(parameters)).unwrap();
        let g = Tool::new("", "g", None, None).unwrap();
        let one = Dialect::Hermes.grammar(&[&f], false);
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 5}}\n</tool_call>";
        assert!(accepts(&one, call));
        assert!(!accepts(&one, &call.replace("5", "\"5\"")));
        assert!(!accepts(&one, &format!("{call}\n{call}")));
        let both = Dialect::Hermes.grammar(&[&f, &g], true);
        assert!(accepts(&both, &format!("{call}\n{}", call.replace("\"f\"", "\"g\""))));
        assert!(!accepts(&both, &call.replace("\"f\"", "\"h\"")));
        let llama = Dialect::Llama3.grammar(&[&f, &g], true);
        assert!(accepts(&llama, "{\"name\": \"f\", \"parameters\": {\"x\": 5}}"));
    }
}
