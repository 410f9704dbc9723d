//! The messages of a chat, checked and brought into the form that templates expect.

use super::error::ApiError;
use super::fields::{Fields, kind_of};
use serde_json::{Map, Value, json};

/// Messages of one chat; a template may be quadratic in them.
const MAX_MESSAGES: usize = 10_000;

/// Checks `messages` and returns them with contents as strings and the arguments of tool calls as objects.
///
/// # Errors
/// 400 naming the message and the field.
pub fn normalise(messages: &[Value]) -> Result<Value, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::bad_field("messages", "must not be empty"));
    }
    if messages.len() > MAX_MESSAGES {
        return Err(ApiError::bad_field("messages", format!("at most {MAX_MESSAGES} messages")));
    }
    messages.iter().enumerate().map(|(index, message)| normalise_one(&format!("messages[{index}]"), message)).collect()
}

fn normalise_one(path: &str, message: &Value) -> Result<Value, ApiError> {
    let Some(message) = message.as_object() else {
        return Err(ApiError::bad_field(path, format!("expected an object, found {}", kind_of(message))));
    };
    let fields = Fields::within(path, message);
    let role = fields.string("role")?.ok_or_else(|| ApiError::bad_field(fields.name("role"), "is missing"))?;
    let role = match role {
        // OpenAI's newer name; no published template knows it.
        "developer" => "system",
        "function" => "tool",
        "system" | "user" | "assistant" | "tool" => role,
        other => {
            let shown: String = other.chars().take(32).collect();
            return Err(ApiError::bad_field(
                fields.name("role"),
                format!("`{shown}` is none of system, developer, user, assistant, tool"),
            ));
        }
    };
    let mut normal = Map::new();
    for (name, value) in message {
        if !value.is_null() {
            normal.insert(name.clone(), value.clone());
        }
    }
    normal.insert("role".to_owned(), json!(role));
    let content = content_text(&fields)?;
    let calls = fields.array("tool_calls")?;
    if content.is_none() && role != "assistant" {
        return Err(ApiError::bad_field(fields.name("content"), "is missing"));
    }
    normal.insert("content".to_owned(), json!(content.unwrap_or_default()));
    match calls {
        Some(calls) if !calls.is_empty() => {
            let calls: Result<Vec<Value>, ApiError> = calls
                .iter()
                .enumerate()
                .map(|(index, call)| normalise_call(&format!("{path}.tool_calls[{index}]"), call))
                .collect();
            normal.insert("tool_calls".to_owned(), Value::Array(calls?));
        }
        // Templates ask whether the field exists, not whether it is empty.
        _ => {
            normal.remove("tool_calls");
        }
    }
    Ok(Value::Object(normal))
}

/// The text of a message: a string, or parts that are all text.
fn content_text(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let parts = match fields.value("content") {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text.clone())),
        Some(Value::Array(parts)) => parts,
        Some(other) => {
            return Err(fields.wrong("content", "a string or an array of parts", other));
        }
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let path = fields.name(&format!("content[{index}]"));
        if let Some(text) = part.as_str() {
            texts.push(text);
            continue;
        }
        match part["type"].as_str() {
            Some("text" | "input_text" | "output_text") => match part["text"].as_str() {
                Some(text) => texts.push(text),
                None => return Err(ApiError::bad_field(path, "has no `text`")),
            },
            Some("refusal") => texts.push(part["refusal"].as_str().unwrap_or_default()),
            Some(kind) => {
                let shown: String = kind.chars().take(32).collect();
                return Err(ApiError::bad_field(
                    path,
                    format!("`{shown}` is not supported: this model reads text only"),
                ));
            }
            None => return Err(ApiError::bad_field(path, "has no `type`")),
        }
    }
    Ok(Some(texts.join("\n")))
}

/// A tool call with its arguments as an object: clients send them as JSON in a string, templates print
/// them with `tojson`.
fn normalise_call(path: &str, call: &Value) -> Result<Value, ApiError> {
    let function = call
        .get("function")
        .and_then(Value::as_object)
        .ok_or_else(|| ApiError::bad_field(path, "has no `function`"))?;
    let fields = Fields::within(&format!("{path}.function"), function);
    if fields.string("name")?.is_none() {
        return Err(ApiError::bad_field(fields.name("name"), "is missing"));
    }
    let mut call = call.clone();
    if let Some(Value::String(arguments)) = fields.value("arguments") {
        let parsed: Value = if arguments.trim().is_empty() {
            json!({})
        } else {
            serde_json::from_str(arguments)
                .map_err(|error| ApiError::bad_field(fields.name("arguments"), format!("is not JSON: {error}")))?
        };
        call["function"]["arguments"] = parsed;
    }
    Ok(call)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(messages: Value) -> Result<Value, ApiError> {
        normalise(messages.as_array().unwrap())
    }

    #[test]
    fn contents_become_strings() {
        let messages = json!([
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "name": null,
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
            {"role": "assistant", "content": "c", "tool_calls": []},
        ]);
        let expected = json!([
            {"role": "system", "content": "a\nb"},
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function",
             "function": {"name": "f", "arguments": {"x": 1}}}], "content": ""},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
            {"role": "assistant", "content": "c"},
        ]);
        assert_eq!(normal(messages).unwrap(), expected);
    }

    #[test]
    fn c76_c77_broken_messages_are_named() {
        for (messages, param) in [
            (json!([]), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{}]), "messages[0].role"),
            (json!([{"role": 1, "content": ""}]), "messages[0].role"),
            (json!([{"role": "wizard", "content": ""}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 1}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0]"),
            (json!([{"role": "user", "content": [{}]}]), "messages[0].content[0]"),
            (json!([{"role": "assistant", "tool_calls": [{}]}]), "messages[0].tool_calls[0]"),
            (
                json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            let error = normal(messages).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)));
        }
    }
}
