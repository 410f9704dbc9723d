//! The tokenizer and the texts around it, rebuilt from the metadata as Hugging Face's files.
//!
//! `tokenizer.json` is in the form of the `tokenizers` library, `tokenizer_config.json` and `generation_config.json` in that of
//! `transformers`, the chat template is `chat_template.jinja`. What tokens a text gives is to be what llama.cpp gives with
//! special tokens parsed; where a vocabulary cannot be expressed that way, opening the model fails and says why.

mod bpe;
mod json;
mod pre;
mod spm;
mod unigram;
mod vocabulary;
mod wordpiece;

use serde_json::{Map, Value as Json, json};

use super::error::{GgufError, printable};
use super::keys::Keys;
use super::value::Value;
use vocabulary::{MODEL, PRE, TOKENS, Vocabulary, tokenizer_error};

/// The rebuilt files: name and bytes.
pub(super) type Assets = Vec<(String, Vec<u8>)>;

/// What is added around a text, and how spaces are treated; the defaults are those of llama.cpp for each kind.
struct Habits {
    add_bos: bool,
    add_eos: bool,
    space_prefix: bool,
    one_space: bool,
}

/// Rebuilds the files. `rows`: rows of the token embedding. A model without a tokenizer gives the chat template at most, and a
/// warning.
///
/// # Errors
/// [`GgufError::Tokenizer`] where the metadata contradict themselves, or a vocabulary cannot be rebuilt exactly.
pub(super) fn rebuild(keys: &Keys<'_, '_>, rows: u64, warnings: &mut Vec<String>) -> Result<Assets, GgufError> {
    let mut assets = templates(keys)?;
    let model = match keys.any(MODEL, "a UTF-8 string", Value::as_str)? {
        Some("none" | "no_vocab") => None,
        other => other,
    };
    let Some(model) = model else {
        if keys.metadata.get(TOKENS).is_some() {
            let found = "missing, although there are tokens".into();
            return Err(tokenizer_error(keys, MODEL, found, "gpt2, llama, bert or t5"));
        }
        warnings.push("no tokenizer in the metadata: the bundle will have none".into());
        return Ok(assets);
    };
    let vocabulary = Vocabulary::read(keys, rows)?;
    let pre = match model {
        "gpt2" => Some(pre_tokenizer(keys)?),
        _ => None,
    };
    let habits = habits(keys, model, pre)?;
    let parts = match (model, pre) {
        ("gpt2", Some(pre)) => bpe::parts(keys, &vocabulary, pre)?,
        ("llama", _) => spm::parts(keys, &vocabulary, habits.space_prefix)?,
        ("bert", _) => wordpiece::parts(keys, &vocabulary)?,
        ("t5", _) => unigram::parts(keys, &vocabulary, habits.space_prefix, habits.one_space)?,
        _ => {
            let found = format!("the tokenizer \"{}\"", printable(model.as_bytes()));
            return Err(tokenizer_error(keys, MODEL, found, "gpt2, llama, bert or t5: this kind cannot be rebuilt"));
        }
    };
    let post_processor = post_processor(keys, model, &vocabulary, &habits)?;
    let added = json::added_tokens(&vocabulary, strips_right(keys)?);
    let tokenizer = json::Tokenizer::new(parts, added, post_processor);
    assets.push(("tokenizer.json".into(), to_bytes(&tokenizer)));
    assets.push(("tokenizer_config.json".into(), to_bytes(&tokenizer_config(&vocabulary, &habits))));
    assets.push(("generation_config.json".into(), to_bytes(&generation_config(keys, &vocabulary)?)));
    Ok(assets)
}

fn to_bytes(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("keys are strings and writing to memory does not fail")
}

fn pre_tokenizer(keys: &Keys<'_, '_>) -> Result<&'static pre::PreTokenizer, GgufError> {
    let expected = "the name of the rule that cuts text into words; convert the model again with a current llama.cpp";
    let name = keys
        .any(PRE, "a UTF-8 string", Value::as_str)?
        .ok_or_else(|| tokenizer_error(keys, PRE, "missing: the tokens of a text cannot be known".into(), expected))?;
    pre::find(name).ok_or_else(|| {
        let found = format!("the unknown pre-tokenizer \"{}\"", printable(name.as_bytes()));
        tokenizer_error(keys, PRE, found, "a name that this version knows (a newer vt may know it)")
    })
}

fn habits(keys: &Keys<'_, '_>, model: &str, pre: Option<&pre::PreTokenizer>) -> Result<Habits, GgufError> {
    let flag = |key| keys.any(key, "a boolean", Value::as_bool);
    let bos = matches!(model, "llama" | "bert") || pre.is_some_and(|p| p.add_bos);
    Ok(Habits {
        add_bos: flag("tokenizer.ggml.add_bos_token")?.unwrap_or(bos),
        add_eos: flag("tokenizer.ggml.add_eos_token")?.unwrap_or(model == "t5"),
        space_prefix: flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(matches!(model, "llama" | "t5")),
        one_space: flag("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false),
    })
}

fn post_processor(
    keys: &Keys<'_, '_>,
    model: &str,
    vocabulary: &Vocabulary<'_>,
    habits: &Habits,
) -> Result<Json, GgufError> {
    let token = |name: &'static str, key: &'static str| {
        vocabulary.id(name).map(|id| (&*vocabulary.tokens[id as usize], id)).ok_or_else(|| {
            tokenizer_error(keys, key, "missing, although it is to be added to every text".into(), "a token id")
        })
    };
    if model == "bert" {
        // llama.cpp adds both whatever the flags say.
        let first = token("bos", "tokenizer.ggml.bos_token_id")
            .or_else(|e| token("cls", "tokenizer.ggml.cls_token_id").map_err(|_| e))?;
        return Ok(json::template(Some(first), Some(token("sep", "tokenizer.ggml.seperator_token_id")?)));
    }
    let before = habits.add_bos.then(|| token("bos", "tokenizer.ggml.bos_token_id")).transpose()?;
    let after = habits.add_eos.then(|| token("eos", "tokenizer.ggml.eos_token_id")).transpose()?;
    Ok(json::template(before, after))
}

/// Phi-3's special tokens swallow the white space after them; the metadata say so nowhere, llama.cpp goes by the model's name.
fn strips_right(keys: &Keys<'_, '_>) -> Result<impl Fn(&str) -> bool, GgufError> {
    let name = keys.any("general.name", "a string", |v| match v {
        Value::Str(raw) => Some(String::from_utf8_lossy(raw).to_lowercase()),
        _ => None,
    })?;
    let phi3 = name.is_some_and(|n| n.contains("phi-3") || n.contains("phi3"));
    Ok(move |text: &str| phi3 && !matches!(text, "<unk>" | "<s>" | "<|endoftext|>"))
}

/// Chat templates: the default one, and named ones in a folder of their own.
fn templates(keys: &Keys<'_, '_>) -> Result<Assets, GgufError> {
    const DEFAULT: &str = "tokenizer.chat_template";
    let mut assets = Assets::new();
    for (key, value) in keys.metadata.entries() {
        let Some(rest) = key.strip_prefix(DEFAULT) else { continue };
        let file = match rest.strip_prefix('.') {
            None if rest.is_empty() => "chat_template.jinja".to_owned(),
            // A name from the file becomes part of a path: letters, digits, `_` and `-` only.
            Some(name) if !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b)) => {
                format!("additional_chat_templates/{name}.jinja")
            }
            _ => continue,
        };
        if let Value::Array(_) = value {
            // `tokenizer.chat_templates` lists the names; its entries have keys of their own.
            continue;
        }
        let text = value.as_str().ok_or_else(|| keys.wrong(key, value, "a UTF-8 string"))?;
        assets.push((file, text.as_bytes().to_vec()));
    }
    Ok(assets)
}

fn tokenizer_config(vocabulary: &Vocabulary<'_>, habits: &Habits) -> Json {
    let mut config = Map::new();
    config.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
    for (name, key) in [
        ("bos", "bos_token"),
        ("eos", "eos_token"),
        ("unknown", "unk_token"),
        ("pad", "pad_token"),
        ("sep", "sep_token"),
        ("cls", "cls_token"),
        ("mask", "mask_token"),
    ] {
        if let Some(text) = vocabulary.special_text(name) {
            config.insert(key.into(), json!(text));
        }
    }
    config.insert("add_bos_token".into(), json!(habits.add_bos));
    config.insert("add_eos_token".into(), json!(habits.add_eos));
    config.insert("clean_up_tokenization_spaces".into(), json!(false));
    Json::Object(config)
}

fn generation_config(keys: &Keys<'_, '_>, vocabulary: &Vocabulary<'_>) -> Result<Json, GgufError> {
    let mut config = Map::new();
    if let Some(id) = vocabulary.id("bos") {
        config.insert("bos_token_id".into(), json!(id));
    }
    let ends = vocabulary.end_ids();
    if !ends.is_empty() {
        config.insert("eos_token_id".into(), json!(ends));
    }
    if let Some(id) = vocabulary.id("pad") {
        config.insert("pad_token_id".into(), json!(id));
    }
    for (key, name) in [
        ("general.sampling.temp", "temperature"),
        ("general.sampling.top_p", "top_p"),
        ("general.sampling.min_p", "min_p"),
        ("general.sampling.penalty_repeat", "repetition_penalty"),
    ] {
        if let Some(value) = keys.any(key, "a finite number", |v| v.as_f64().filter(|v| v.is_finite()))? {
            config.insert(name.into(), super::config::short(value));
        }
    }
    if let Some(k) = keys.any("general.sampling.top_k", "an integer", Value::as_u64)? {
        config.insert("top_k".into(), json!(k));
    }
    if let Some(ids) = keys.integers("tokenizer.ggml.suppress_tokens")? {
        let tokens = vocabulary.tokens.len() as i128;
        let ids: Vec<u64> = ids.into_iter().filter(|id| (0..tokens).contains(id)).map(|id| id as u64).collect();
        config.insert("suppress_tokens".into(), json!(ids));
    }
    Ok(Json::Object(config))
}
