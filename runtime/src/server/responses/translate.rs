//! A request of the responses protocol as one of the chat protocol.

use crate::server::error::ApiError;
use crate::server::fields::{Fields, kind_of};
use serde_json::{Map, Value, json};

/// Fields whose meaning is the same under the same name.
const SAME: [&str; 6] = ["model", "stream", "temperature", "top_p", "parallel_tool_calls", "seed"];

/// Translates a request.
///
/// # Errors
/// 400 naming the field.
pub fn request(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    for unsupported in ["previous_response_id", "conversation", "prompt"] {
        if fields.value(unsupported).is_some() {
            let reason = "nothing is stored here; send the whole conversation as `input`";
            return Err(ApiError::bad_field(unsupported, reason));
        }
    }
    if fields.boolean("background")? == Some(true) {
        return Err(ApiError::bad_field("background", "is not supported"));
    }
    for ignored in ["include", "metadata", "reasoning", "store", "stream_options", "truncation", "user"] {
        fields.value(ignored);
    }
    let mut chat = Map::new();
    for name in SAME {
        if let Some(value) = fields.value(name) {
            chat.insert(name.to_owned(), value.clone());
        }
    }
    if let Some(count) = fields.count("max_output_tokens", 1)? {
        chat.insert("max_tokens".to_owned(), json!(count));
    }
    let mut messages = Vec::new();
    if let Some(instructions) = fields.string("instructions")? {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match fields.value("input") {
        None => return Err(ApiError::bad_field("input", "is missing")),
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                translate_item(&format!("input[{index}]"), item, &mut messages)?;
            }
        }
        Some(Value::Array(_)) => return Err(ApiError::bad_field("input", "must not be empty")),
        Some(other) => return Err(fields.wrong("input", "a string or an array of items", other)),
    }
    chat.insert("messages".to_owned(), Value::Array(messages));
    if let Some(text) = fields.object("text")?
        && let Some(format) = Fields::within("text", text).object("format")?
    {
        chat.insert("response_format".to_owned(), translate_format(format));
    }
    if let Some(tools) = fields.array("tools")? {
        let tools = tools.iter().enumerate().map(|(index, tool)| translate_tool(index, tool));
        chat.insert("tools".to_owned(), Value::Array(tools.collect::<Result<_, _>>()?));
    }
    if let Some(choice) = fields.value("tool_choice") {
        chat.insert("tool_choice".to_owned(), choice.clone());
    }
    Ok(chat)
}

/// A format without the nesting of the chat protocol.
fn translate_format(format: &Map<String, Value>) -> Value {
    let mut format = format.clone();
    if format.get("type").is_some_and(|kind| kind == "json_schema")
        && let Some(schema) = format.remove("schema")
    {
        format.insert("json_schema".to_owned(), json!({"schema": schema}));
    }
    Value::Object(format)
}

fn translate_tool(index: usize, tool: &Value) -> Result<Value, ApiError> {
    if tool["type"] != "function" {
        return Err(ApiError::bad_field(format!("tools[{index}]"), "only functions are supported"));
    }
    Ok(json!({"type": "function", "function": {
        "name": tool["name"],
        "description": tool["description"],
        "parameters": tool["parameters"],
    }}))
}

fn translate_item(path: &str, item: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    if !item.is_object() {
        return Err(ApiError::bad_field(path, format!("expected an object, found {}", kind_of(item))));
    }
    match item["type"].as_str() {
        None | Some("message") => messages.push(json!({"role": item["role"], "content": item["content"]})),
        Some("function_call") => {
            let call = json!({
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            });
            // Calls of one answer belong to one message.
            match messages.last_mut() {
                Some(last) if last["role"] == "assistant" => match last["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                },
                _ => messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]})),
            }
        }
        Some("function_call_output") => {
            let output = item["output"].clone();
            messages.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": output}));
        }
        // What the model thought is not given back to it.
        Some("reasoning") => {}
        Some(kind) => {
            let shown: String = kind.chars().take(32).collect();
            return Err(ApiError::bad_field(path, format!("`{shown}` is not supported")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(body: &Value) -> Result<Value, ApiError> {
        request(&Fields::new(body.as_object().unwrap())).map(Value::Object)
    }

    #[test]
    fn requests_are_translated() {
        let body = json!({
            "instructions": "s", "max_output_tokens": 5,
            "input": [
                {"role": "user", "content": "a"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "r"},
                {"type": "reasoning", "summary": []},
            ],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        });
        let chat = translated(&body).unwrap();
        let roles: Vec<&str> =
            chat["messages"].as_array().unwrap().iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool"]);
        assert_eq!(chat["messages"][2]["tool_calls"].as_array().unwrap().len(), 2);
        assert_eq!(chat["response_format"]["json_schema"]["schema"], json!({"type": "object"}));
        assert_eq!(chat["tools"][0]["function"]["name"], "f");
        assert_eq!(chat["max_tokens"], 5);
    }

    #[test]
    fn broken_requests_are_named() {
        for (body, param) in [
            (json!({}), "input"),
            (json!({"input": 5}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": [5]}), "input[0]"),
            (json!({"input": [{"type": "image_generation_call"}]}), "input[0]"),
            (json!({"input": "x", "previous_response_id": "resp_1"}), "previous_response_id"),
            (json!({"input": "x", "background": true}), "background"),
            (json!({"input": "x", "tools": [{"type": "web_search"}]}), "tools[0]"),
        ] {
            assert_eq!(translated(&body).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
