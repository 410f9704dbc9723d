//! A request of Anthropic's protocol as one of OpenAI's.

use crate::server::error::ApiError;
use crate::server::fields::Fields;
use serde_json::{Map, Value, json};

/// Fields whose meaning is the same under the same name.
const SAME: [&str; 5] = ["model", "stream", "temperature", "top_p", "top_k"];

/// Translates a request. With `counting`, `max_tokens` may be absent.
///
/// # Errors
/// 400 naming the field.
pub fn request(fields: &Fields<'_>, counting: bool) -> Result<Map<String, Value>, ApiError> {
    let mut chat = Map::new();
    for name in SAME {
        if let Some(value) = fields.value(name) {
            chat.insert(name.to_owned(), value.clone());
        }
    }
    for ignored in ["metadata", "thinking", "service_tier", "anthropic_version", "context_management"] {
        fields.value(ignored);
    }
    match fields.count("max_tokens", 1)? {
        Some(count) => {
            chat.insert("max_tokens".to_owned(), json!(count));
        }
        None if counting => {}
        None => return Err(ApiError::bad_field("max_tokens", "is missing")),
    }
    if let Some(stops) = fields.strings("stop_sequences")? {
        chat.insert("stop".to_owned(), json!(stops));
    }
    let mut messages = Vec::new();
    if let Some(system) = fields.value("system") {
        messages.push(json!({"role": "system", "content": blocks_text("system", system)?}));
    }
    let given = fields.array("messages")?.ok_or_else(|| ApiError::bad_field("messages", "is missing"))?;
    for (index, message) in given.iter().enumerate() {
        translate_message(&format!("messages[{index}]"), message, &mut messages)?;
    }
    if given.is_empty() {
        messages.clear();
    }
    chat.insert("messages".to_owned(), Value::Array(messages));
    if let Some(tools) = fields.array("tools")? {
        let tools = tools.iter().enumerate().map(|(index, tool)| translate_tool(index, tool));
        chat.insert("tools".to_owned(), Value::Array(tools.collect::<Result<_, _>>()?));
    }
    if let Some(choice) = fields.object("tool_choice")? {
        translate_choice(&Fields::within("tool_choice", choice), &mut chat)?;
    }
    Ok(chat)
}

fn translate_tool(index: usize, tool: &Value) -> Result<Value, ApiError> {
    let path = format!("tools[{index}]");
    let Some(tool) = tool.as_object() else {
        return Err(ApiError::bad_field(path, "expected an object"));
    };
    let fields = Fields::within(&path, tool);
    if fields.string("type")?.is_some_and(|kind| kind != "custom") {
        return Err(ApiError::bad_field(path, "only custom tools are supported"));
    }
    Ok(json!({"type": "function", "function": {
        "name": fields.value("name"),
        "description": fields.value("description"),
        "parameters": fields.value("input_schema"),
    }}))
}

fn translate_choice(choice: &Fields<'_>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let translated = match choice.string("type")? {
        Some("auto") => json!("auto"),
        Some("any") => json!("required"),
        Some("none") => json!("none"),
        Some("tool") => json!({"type": "function", "function": {"name": choice.value("name")}}),
        _ => return Err(ApiError::bad_field("tool_choice.type", "is none of auto, any, tool, none")),
    };
    chat.insert("tool_choice".to_owned(), translated);
    if let Some(disabled) = choice.boolean("disable_parallel_tool_use")? {
        chat.insert("parallel_tool_calls".to_owned(), json!(!disabled));
    }
    Ok(())
}

/// The text of a string or of text blocks.
fn blocks_text(path: &str, content: &Value) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            let texts = blocks.iter().enumerate().map(|(index, block)| {
                let text = block["text"].as_str().filter(|_| block["type"] == "text");
                text.ok_or_else(|| ApiError::bad_field(format!("{path}[{index}]"), "only text is supported"))
            });
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err(ApiError::bad_field(path, "expected a string or an array of blocks")),
    }
}

/// One message becomes one or more: results of tools are messages of their own in OpenAI's protocol.
fn translate_message(path: &str, message: &Value, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = message["role"].as_str().unwrap_or_default();
    if !matches!(role, "user" | "assistant" | "system") {
        return Err(ApiError::bad_field(format!("{path}.role"), "is none of user, assistant"));
    }
    let content = &message["content"];
    let Value::Array(blocks) = content else {
        let text = blocks_text(&format!("{path}.content"), content)?;
        out.push(json!({"role": role, "content": text}));
        return Ok(());
    };
    let (mut texts, mut calls) = (Vec::new(), Vec::new());
    for (index, block) in blocks.iter().enumerate() {
        let path = format!("{path}.content[{index}]");
        match block["type"].as_str() {
            Some("text") => match block["text"].as_str() {
                Some(text) => texts.push(text),
                None => return Err(ApiError::bad_field(path, "has no `text`")),
            },
            Some("tool_use") => calls.push(json!({
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": block["input"]},
            })),
            Some("tool_result") => {
                let text = match block.get("content") {
                    None | Some(Value::Null) => String::new(),
                    Some(content) => blocks_text(&format!("{path}.content"), content)?,
                };
                out.push(json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}));
            }
            // What the model thought is not given back to it.
            Some("thinking" | "redacted_thinking") => {}
            _ => return Err(ApiError::bad_field(path, "only text, tool_use and tool_result are supported")),
        }
    }
    if !texts.is_empty() || !calls.is_empty() {
        let mut translated = json!({"role": role, "content": texts.join("\n")});
        if !calls.is_empty() {
            translated["tool_calls"] = Value::Array(calls);
        }
        out.push(translated);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(body: &Value) -> Result<Value, ApiError> {
        request(&Fields::new(body.as_object().unwrap()), false).map(Value::Object)
    }

    #[test]
    fn requests_are_translated() {
        let body = json!({
            "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"y": 2}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"},
                    {"type": "text", "text": "c"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
        });
        let chat = translated(&body).unwrap();
        assert_eq!(
            chat["messages"],
            json!([
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "tool_calls": [{"id": "1", "type": "function",
                    "function": {"name": "f", "arguments": {"y": 2}}}]},
                {"role": "tool", "tool_call_id": "1", "content": "r"},
                {"role": "user", "content": "c"},
            ])
        );
        assert_eq!((&chat["stop"], &chat["max_tokens"]), (&json!(["x"]), &json!(5)));
        assert_eq!(chat["tools"][0]["function"]["parameters"], json!({"type": "object"}));
        assert_eq!((&chat["tool_choice"], &chat["parallel_tool_calls"]), (&json!("required"), &json!(false)));
    }

    #[test]
    fn broken_requests_are_named() {
        let user = json!([{"role": "user", "content": "a"}]);
        for (body, param) in [
            (json!({"messages": user}), "max_tokens"),
            (json!({"max_tokens": 1}), "messages"),
            (json!({"max_tokens": 1, "messages": [{"role": "tool", "content": "a"}]}), "messages[0].role"),
            (json!({"max_tokens": 1, "messages": [{"role": "user"}]}), "messages[0].content"),
            (
                json!({"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
                "messages[0].content[0]",
            ),
            (json!({"max_tokens": 1, "messages": user, "system": 5}), "system"),
            (json!({"max_tokens": 1, "messages": user, "tools": [1]}), "tools[0]"),
            (json!({"max_tokens": 1, "messages": user, "tool_choice": {"type": "x"}}), "tool_choice.type"),
        ] {
            assert_eq!(translated(&body).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
