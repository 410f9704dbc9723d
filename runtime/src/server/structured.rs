//! `response_format` and its relatives: what the output must look like.

use super::error::ApiError;
use super::fields::Fields;
use crate::text::Grammar;
use serde_json::Value;

/// Texts of a `choice`.
const MAX_CHOICE_TEXTS: usize = 1024;

/// Reads OpenAI's `response_format` and vLLM's `structured_outputs`.
///
/// # Errors
/// 400 naming the field.
pub fn read(fields: &Fields<'_>) -> Result<Option<Grammar>, ApiError> {
    let from_format = match fields.object("response_format")? {
        Some(format) => read_format(&Fields::within("response_format", format))?,
        None => None,
    };
    let from_outputs = match fields.object("structured_outputs")? {
        Some(outputs) => read_outputs(&Fields::within("structured_outputs", outputs))?,
        None => None,
    };
    if from_format.is_some() && from_outputs.is_some() {
        return Err(ApiError::bad_field("structured_outputs", "cannot come with response_format"));
    }
    Ok(from_format.or(from_outputs))
}

/// `{"type": "text" | "json_object" | "json_schema", ...}`.
///
/// # Errors
/// 400 naming the field.
pub fn read_format(format: &Fields<'_>) -> Result<Option<Grammar>, ApiError> {
    match format.string("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Grammar::JsonObject)),
        Some("json_schema") => {
            // The chat protocol nests the schema, the responses protocol does not.
            let schema = match format.object("json_schema")? {
                Some(nested) => {
                    let nested = Fields::within(&format.name("json_schema"), nested);
                    nested.value("schema")
                }
                None => format.value("schema"),
            };
            let schema = schema.ok_or_else(|| ApiError::bad_field(format.name("json_schema"), "has no `schema`"))?;
            json_schema(format, "json_schema", schema).map(Some)
        }
        _ => Err(ApiError::bad_field(format.name("type"), "is none of text, json_object, json_schema")),
    }
}

/// `{"json": ..., "regex": ..., "choice": ..., "grammar": ...}`, one of them.
fn read_outputs(outputs: &Fields<'_>) -> Result<Option<Grammar>, ApiError> {
    let mut grammars = Vec::new();
    if let Some(schema) = outputs.value("json") {
        grammars.push(json_schema(outputs, "json", schema)?);
    }
    if outputs.boolean("json_object")? == Some(true) {
        grammars.push(Grammar::JsonObject);
    }
    if let Some(regex) = outputs.string("regex")? {
        grammars.push(Grammar::Regex(regex.to_owned()));
    }
    if let Some(texts) = outputs.strings("choice")? {
        if texts.is_empty() || texts.len() > MAX_CHOICE_TEXTS {
            let reason = format!("expected 1 to {MAX_CHOICE_TEXTS} texts");
            return Err(ApiError::bad_field(outputs.name("choice"), reason));
        }
        grammars.push(Grammar::Choice(texts));
    }
    if let Some(grammar) = outputs.string("grammar")? {
        grammars.push(Grammar::Lark(grammar.to_owned()));
    }
    if grammars.len() > 1 {
        return Err(ApiError::bad_field("structured_outputs", "only one of its fields can be given"));
    }
    Ok(grammars.pop())
}

/// A schema as an object, or as JSON in a string.
fn json_schema(fields: &Fields<'_>, name: &str, schema: &Value) -> Result<Grammar, ApiError> {
    let parsed = match schema {
        Value::String(text) => serde_json::from_str(text)
            .map_err(|error| ApiError::bad_field(fields.name(name), format!("is not JSON: {error}")))?,
        other => other.clone(),
    };
    match parsed {
        Value::Object(_) => Ok(Grammar::JsonSchema(parsed)),
        other => Err(fields.wrong(name, "a JSON schema", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn grammar(body: Value) -> Result<Option<Grammar>, ApiError> {
        read(&Fields::new(body.as_object().unwrap()))
    }

    #[test]
    fn formats_are_read() {
        let schema = json!({"type": "object"});
        let format = |format: Value| grammar(json!({"response_format": format})).unwrap();
        assert_eq!(format(json!(null)), None);
        assert_eq!(format(json!({"type": "text"})), None);
        assert_eq!(format(json!({"type": "json_object"})), Some(Grammar::JsonObject));
        let nested = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        assert_eq!(format(nested), Some(Grammar::JsonSchema(schema.clone())));
        let outputs = |outputs: Value| grammar(json!({"structured_outputs": outputs})).unwrap();
        assert_eq!(outputs(json!({"json": schema.to_string()})), Some(Grammar::JsonSchema(schema)));
        assert_eq!(outputs(json!({"regex": "a+"})), Some(Grammar::Regex("a+".to_owned())));
        assert_eq!(outputs(json!({"choice": ["a"]})), Some(Grammar::Choice(vec!["a".to_owned()])));
    }

    #[test]
    fn broken_formats_are_named() {
        for (body, param) in [
            (json!({"response_format": "json"}), "response_format"),
            (json!({"response_format": {}}), "response_format.type"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (json!({"structured_outputs": {"regex": 1}}), "structured_outputs.regex"),
            (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
            (json!({"structured_outputs": {"json": "{"}}), "structured_outputs.json"),
            (json!({"structured_outputs": {"regex": "a", "grammar": "b"}}), "structured_outputs"),
        ] {
            assert_eq!(grammar(body).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
