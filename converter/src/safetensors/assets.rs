//! What the bundle carries beside the weights: tokenizer, chat template, generation defaults.

use serde_json::Value;

use crate::source::SourceFile;

/// Files that become assets as they are.
const VERBATIM: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
];

/// Collects the assets of a checkpoint from its small files.
///
/// The chat template is `chat_template.jinja`, else the one in `chat_template.json`, else the one in
/// `tokenizer_config.json` (a string, or a list of named templates of which `default` counts).
pub(crate) fn collect(files: &[SourceFile], warnings: &mut Vec<String>) -> Vec<(String, Vec<u8>)> {
    let find = |name: &str| files.iter().find(|f| f.name == name);
    let mut assets: Vec<(String, Vec<u8>)> =
        VERBATIM.iter().filter_map(|name| Some((name.to_string(), find(name)?.bytes().to_vec()))).collect();
    if find("tokenizer.json").is_none() {
        warnings.push("there is no tokenizer.json: the bundle can be served only with token ids".into());
    }
    if find("chat_template.jinja").is_none() {
        let template = ["chat_template.json", "tokenizer_config.json"].into_iter().find_map(|name| {
            let value: Value = serde_json::from_slice(find(name)?.bytes()).ok()?;
            template_of(&value)
        });
        if let Some(template) = template {
            assets.push(("chat_template.jinja".into(), template.into_bytes()));
        }
    }
    assets
}

fn template_of(config: &Value) -> Option<String> {
    match config.get("chat_template")? {
        Value::String(template) => Some(template.clone()),
        Value::Array(named) => {
            let is_default = |t: &&Value| t.get("name").and_then(Value::as_str) == Some("default");
            let chosen = named.iter().find(is_default).or(named.first())?;
            Some(chosen.get("template")?.as_str()?.to_owned())
        }
        _ => None,
    }
}
