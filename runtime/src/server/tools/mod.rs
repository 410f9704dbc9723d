//! Tools: what a model may call, how it is told so, and how its calls are found in its text.

mod dialect;
mod parser;

pub use dialect::Dialect;
pub use parser::{Part, ToolParser};

use super::error::ApiError;
use super::fields::Fields;
use crate::text::chat_template::ChatInput;
use crate::text::{BundleText, Grammar};
use serde_json::{Value, json};

/// Tools of one request.
const MAX_TOOLS: usize = 256;

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments.
    pub parameters: Value,
    /// OpenAI's object, as templates expect it.
    pub definition: Value,
}

/// Whether the model calls, and what.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// It does not.
    None,
    /// As it likes.
    #[default]
    Auto,
    /// It must call something.
    Required,
    /// It must call this.
    Named(String),
}

/// The tools of a request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ToolSet {
    tools: Vec<Tool>,
    choice: ToolChoice,
    /// Whether several calls may come at once.
    parallel: bool,
}

impl ToolSet {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's chat protocol.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let tools = fields.array("tools")?.map_or(&[][..], Vec::as_slice);
        let tools = tools
            .iter()
            .enumerate()
            .map(|(index, tool)| read_tool(&format!("tools[{index}]"), tool))
            .collect::<Result<Vec<_>, _>>()?;
        let choice = match fields.value("tool_choice") {
            None => ToolChoice::Auto,
            Some(Value::String(choice)) => match choice.as_str() {
                "none" => ToolChoice::None,
                "auto" => ToolChoice::Auto,
                "required" => ToolChoice::Required,
                _ => return Err(ApiError::bad_field("tool_choice", "is none of none, auto, required")),
            },
            Some(choice) => {
                let name = choice.pointer("/function/name").or_else(|| choice.get("name"));
                let name = name.and_then(Value::as_str);
                let name = name.ok_or_else(|| ApiError::bad_field("tool_choice", "names no function"))?;
                ToolChoice::Named(name.to_owned())
            }
        };
        let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        Self::new(tools, choice, parallel)
    }

    /// Tools from whichever protocol.
    ///
    /// # Errors
    /// 400 where the choice names a tool that is not there, or there are too many.
    pub fn new(tools: Vec<Tool>, choice: ToolChoice, parallel: bool) -> Result<Self, ApiError> {
        if tools.len() > MAX_TOOLS {
            return Err(ApiError::bad_field("tools", format!("at most {MAX_TOOLS} tools")));
        }
        match &choice {
            ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == *name) => {
                return Err(ApiError::bad_field("tool_choice", "names a function that is not in tools"));
            }
            ToolChoice::Required if tools.is_empty() => {
                return Err(ApiError::bad_field("tool_choice", "needs tools"));
            }
            _ => {}
        }
        Ok(Self { tools, choice, parallel })
    }

    /// Whether the model may call anything.
    pub fn is_active(&self) -> bool {
        !self.tools.is_empty() && self.choice != ToolChoice::None
    }

    /// Tells the model of its tools: through the template where that knows of tools, else in the system
    /// message.
    pub fn describe(&self, text: &BundleText, input: &mut ChatInput) {
        if !self.is_active() {
            return;
        }
        let definitions: Vec<Value> = self.tools.iter().map(|tool| tool.definition.clone()).collect();
        if text.template_knows_tools() {
            input.tools = Value::Array(definitions);
        } else {
            add_to_system(&mut input.messages, &dialect::instructions(&definitions));
        }
    }

    /// The grammar that makes the model call, where it must.
    pub fn grammar(&self, dialect: Dialect) -> Option<Grammar> {
        let tools: Vec<&Tool> = match &self.choice {
            ToolChoice::Required => self.tools.iter().collect(),
            ToolChoice::Named(name) => self.tools.iter().filter(|tool| tool.name == *name).collect(),
            ToolChoice::None | ToolChoice::Auto => return None,
        };
        // A named function is called once, as OpenAI does.
        let several = self.parallel && self.choice == ToolChoice::Required;
        Some(dialect.grammar(&tools, several))
    }

    /// A parser for one choice's text, where there may be calls in it.
    pub fn parser(&self, dialect: Dialect) -> Option<ToolParser> {
        let names = self.tools.iter().map(|tool| tool.name.clone()).collect();
        self.is_active().then(|| ToolParser::new(dialect, names, self.parallel))
    }
}

fn read_tool(path: &str, tool: &Value) -> Result<Tool, ApiError> {
    let bad = |what: &str| ApiError::bad_field(path, what);
    if tool["type"].as_str().is_some_and(|kind| kind != "function") {
        return Err(bad("only tools of type `function` are supported"));
    }
    let function = tool.get("function").and_then(Value::as_object).ok_or_else(|| bad("has no `function`"))?;
    let fields = Fields::within(&format!("{path}.function"), function);
    let name = fields.string("name")?.ok_or_else(|| bad("has no `function.name`"))?;
    let parameters = fields.object("parameters")?;
    Tool::new(path, name, fields.string("description")?, parameters.cloned().map(Value::Object))
}

impl Tool {
    /// A tool by its parts.
    ///
    /// # Errors
    /// 400 where the name is not one.
    pub fn new(path: &str, name: &str, description: Option<&str>, parameters: Option<Value>) -> Result<Self, ApiError> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
        if name.is_empty() || name.len() > 128 || !name.chars().all(is_name) {
            return Err(ApiError::bad_field(path, "the name must be 1 to 128 letters, digits, _, -, . or :"));
        }
        let parameters = parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}}));
        let function = json!({
            "name": name,
            "description": description.unwrap_or_default(),
            "parameters": parameters,
        });
        Ok(Self { name: name.to_owned(), parameters, definition: json!({"type": "function", "function": function}) })
    }
}

/// Adds a text to the system message, or makes one.
fn add_to_system(messages: &mut Value, text: &str) {
    let Some(messages) = messages.as_array_mut() else {
        return;
    };
    match messages.first_mut() {
        Some(first) if first["role"] == "system" => {
            let content = first["content"].as_str().unwrap_or_default();
            first["content"] = json!(format!("{content}\n\n{text}"));
        }
        _ => messages.insert(0, json!({"role": "system", "content": text})),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &Value) -> Result<ToolSet, ApiError> {
        ToolSet::read(&Fields::new(body.as_object().unwrap()))
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn choices_are_read() {
        let with = |choice: Value| read(&json!({"tools": [tool("f"), tool("g")], "tool_choice": choice}));
        assert!(with(json!(null)).unwrap().is_active());
        assert!(!with(json!("none")).unwrap().is_active());
        assert!(with(json!("auto")).unwrap().grammar(Dialect::Hermes).is_none());
        assert!(with(json!("required")).unwrap().grammar(Dialect::Hermes).is_some());
        let named = with(json!({"type": "function", "function": {"name": "g"}})).unwrap();
        assert_eq!(named.choice, ToolChoice::Named("g".to_owned()));
        assert!(!read(&json!({})).unwrap().is_active());
        assert!(!read(&json!({"tools": []})).unwrap().is_active());
    }

    #[test]
    fn broken_tools_are_named() {
        for (body, param) in [
            (json!({"tools": 1}), "tools"),
            (json!({"tools": [1]}), "tools[0]"),
            (json!({"tools": [{"type": "code_interpreter"}]}), "tools[0]"),
            (json!({"tools": [{"function": {}}]}), "tools[0]"),
            (json!({"tools": [tool("a b")]}), "tools[0]"),
            (json!({"tools": [{"function": {"name": "f", "parameters": 1}}]}), "tools[0].function.parameters"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tool_choice": "sometimes"}), "tool_choice"),
            (json!({"tool_choice": {}}), "tool_choice"),
            (json!({"tools": [tool("f")], "tool_choice": {"function": {"name": "g"}}}), "tool_choice"),
        ] {
            assert_eq!(read(&body).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
