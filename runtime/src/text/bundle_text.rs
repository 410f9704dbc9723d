//! Everything about text that a bundle says: tokenizer, special tokens, chat template, when to stop.

use super::chat_template::{ChatInput, ChatTemplate};
use super::{Grammars, TextError, Tokenizer};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

/// The text assets of a bundle, as bytes.
#[derive(Debug, Clone, Copy)]
pub struct TextAssets<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a [u8],
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<&'a [u8]>,
    /// `chat_template.jinja`; goes before a template in the tokenizer's config.
    pub chat_template: Option<&'a [u8]>,
    /// `generation_config.json`.
    pub generation_config: Option<&'a [u8]>,
    /// `config.json`, or the manifest's model config.
    pub config: Option<&'a [u8]>,
}

/// Sampling parameters that the model's author recommends, from `generation_config.json`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Temperature; 0 where the author asks for greedy decoding.
    pub temperature: Option<f32>,
    /// Nucleus.
    pub top_p: Option<f32>,
    /// Most likely tokens; 0 is all.
    pub top_k: Option<u32>,
    /// Least probability, relative to the most likely token.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens that occurred.
    pub repetition_penalty: Option<f32>,
}

/// Tokenizer, template and stop tokens of one model.
#[derive(Debug)]
pub struct BundleText {
    tokenizer: Arc<Tokenizer>,
    chat_template: Option<ChatTemplate>,
    tool_template: Option<ChatTemplate>,
    special_tokens: BTreeMap<String, String>,
    bos: Option<u32>,
    add_bos: Option<bool>,
    stop_token_ids: BTreeSet<u32>,
    defaults: SamplingDefaults,
    grammars: OnceLock<Result<Grammars, String>>,
}

impl BundleText {
    /// Reads the assets.
    ///
    /// The stop set is the union of the end tokens of the generation config, the model config and the
    /// tokenizer, because publishers put the end of a turn in any one of them.
    ///
    /// # Errors
    /// [`TextError::Asset`] naming the asset that could not be used.
    pub fn from_assets(assets: &TextAssets<'_>) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::from_json(assets.tokenizer)?;
        let tokenizer_config = parse("tokenizer_config.json", assets.tokenizer_config)?;
        let generation_config = parse("generation_config.json", assets.generation_config)?;
        let config = parse("config.json", assets.config)?;
        // Multimodal configs keep the language model's under `text_config`.
        let text_config = config.get("text_config").unwrap_or(&Value::Null);

        let special_tokens = special_tokens(&tokenizer_config);
        let id_of = |name: &str| special_tokens.get(name).and_then(|token| tokenizer.token_to_id(token));
        let mut stop_token_ids = BTreeSet::new();
        for source in [&generation_config, &config, text_config, &tokenizer_config] {
            stop_token_ids.extend(token_ids(&source["eos_token_id"]));
        }
        stop_token_ids.extend(id_of("eos_token"));
        stop_token_ids.retain(|&id| (id as usize) < tokenizer.vocab_size());

        let bos = id_of("bos_token").or_else(|| {
            [&tokenizer_config, &generation_config, &config, text_config]
                .iter()
                .find_map(|source| token_ids(&source["bos_token_id"]).first().copied())
                .filter(|&id| (id as usize) < tokenizer.vocab_size())
        });

        let (main, tool) = template_sources(assets.chat_template, &tokenizer_config)?;
        let compile = |source: Option<String>| {
            source.map(|source| ChatTemplate::new(&source, special_tokens.clone())).transpose()
        };
        Ok(Self {
            chat_template: compile(main)?,
            tool_template: compile(tool)?,
            tokenizer: Arc::new(tokenizer),
            bos,
            add_bos: tokenizer_config["add_bos_token"].as_bool(),
            stop_token_ids,
            defaults: sampling_defaults(&generation_config),
            special_tokens,
            grammars: OnceLock::new(),
        })
    }

    /// Replaces the chat template, for a user who brings one.
    ///
    /// # Errors
    /// [`TextError::Asset`] where it does not compile.
    pub fn set_chat_template(&mut self, source: &str) -> Result<(), TextError> {
        self.chat_template = Some(ChatTemplate::new(source, self.special_tokens.clone())?);
        self.tool_template = None;
        Ok(())
    }

    /// Refuses texts that have far more tokens than a model with a context of `tokens` takes; before anybody else has the
    /// tokenizer.
    #[must_use]
    pub fn with_limit(mut self, tokens: usize) -> Self {
        if let Some(tokenizer) = Arc::get_mut(&mut self.tokenizer) {
            tokenizer.limit(tokens);
        }
        self
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The template for chats, where the model has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// The template for chats with tools.
    pub fn tool_template(&self) -> Option<&ChatTemplate> {
        self.tool_template.as_ref().or(self.chat_template.as_ref())
    }

    /// Whether the template tells the model of its tools.
    pub fn template_knows_tools(&self) -> bool {
        self.tool_template().is_some_and(|template| template.source().contains("tools"))
    }

    /// The token that begins a text, where the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Tokens that end the output.
    pub fn stop_token_ids(&self) -> &BTreeSet<u32> {
        &self.stop_token_ids
    }

    /// The author's recommended sampling.
    pub fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    /// The compiler of grammars, built when it is first needed: most servers never do.
    ///
    /// # Errors
    /// [`TextError::Grammar`] where the vocabulary cannot be used.
    pub fn grammars(&self) -> Result<&Grammars, TextError> {
        let built = self
            .grammars
            .get_or_init(|| Grammars::new(&self.tokenizer, &self.stop_token_ids).map_err(|error| error.to_string()));
        built.as_ref().map_err(|reason| TextError::Grammar(reason.clone()))
    }

    /// Tokens of a raw prompt: what the tokenizer adds is added, and a BOS exactly once where the
    /// tokenizer's config asks for one, not at all where it says no.
    ///
    /// # Errors
    /// [`TextError::Encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let mut ids = self.tokenizer.encode(text, self.add_bos != Some(false))?;
        if let (Some(bos), Some(true)) = (self.bos, self.add_bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        self.drop_second_bos(&mut ids);
        Ok(ids)
    }

    /// Renders a chat and encodes it. The template writes the special tokens, BOS included, so none are
    /// added.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`], or what the template or the tokenizer says.
    pub fn encode_chat(&self, input: &ChatInput) -> Result<Vec<u32>, TextError> {
        let rendered = self.render_chat(input)?;
        let mut ids = self.tokenizer.encode(&rendered, false)?;
        self.drop_second_bos(&mut ids);
        Ok(ids)
    }

    /// The text of a chat, as the model sees it.
    ///
    /// # Errors
    /// [`TextError::NoChatTemplate`], or what the template says.
    pub fn render_chat(&self, input: &ChatInput) -> Result<String, TextError> {
        let has_tools = input.tools.as_array().is_some_and(|tools| !tools.is_empty());
        let template = match &self.tool_template {
            Some(template) if has_tools => Some(template),
            _ => self.chat_template.as_ref(),
        };
        template.ok_or(TextError::NoChatTemplate)?.render(input)
    }

    fn drop_second_bos(&self, ids: &mut Vec<u32>) {
        if let Some(bos) = self.bos
            && ids.len() > 1
            && ids[0] == bos
            && ids[1] == bos
        {
            ids.remove(0);
        }
    }
}

fn parse(asset: &'static str, json: Option<&[u8]>) -> Result<Value, TextError> {
    let Some(json) = json else {
        return Ok(Value::Null);
    };
    serde_json::from_slice(json).map_err(|error| TextError::Asset { asset, reason: error.to_string() })
}

/// `*_token` entries of a tokenizer config, each a string or an object with its `content`.
fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    let Some(fields) = config.as_object() else {
        return BTreeMap::new();
    };
    fields
        .iter()
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, value)| {
            let token = value.as_str().or_else(|| value["content"].as_str())?;
            Some((name.clone(), token.to_owned()))
        })
        .collect()
}

/// Ids given as one number or as a list.
fn token_ids(value: &Value) -> Vec<u32> {
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(ids) => ids.iter().filter_map(one).collect(),
        other => one(other).into_iter().collect(),
    }
}

/// The template for chats and, where the publisher has one apart, the template for chats with tools.
fn template_sources(
    asset: Option<&[u8]>,
    tokenizer_config: &Value,
) -> Result<(Option<String>, Option<String>), TextError> {
    if let Some(asset) = asset {
        let source = std::str::from_utf8(asset)
            .map_err(|error| TextError::Asset { asset: "chat_template.jinja", reason: error.to_string() })?;
        return Ok((Some(source.to_owned()), None));
    }
    Ok(match &tokenizer_config["chat_template"] {
        Value::String(source) => (Some(source.clone()), None),
        Value::Array(templates) => {
            let named = |wanted: &str| {
                templates
                    .iter()
                    .find(|template| template["name"] == wanted)
                    .and_then(|template| template["template"].as_str())
                    .map(str::to_owned)
            };
            (named("default"), named("tool_use"))
        }
        _ => (None, None),
    })
}

fn sampling_defaults(config: &Value) -> SamplingDefaults {
    let float =
        |name: &str| config[name].as_f64().map(|value| value as f32).filter(|value| value.is_finite() && *value >= 0.0);
    if config["do_sample"].as_bool() == Some(false) {
        return SamplingDefaults { temperature: Some(0.0), ..SamplingDefaults::default() };
    }
    SamplingDefaults {
        temperature: float("temperature"),
        top_p: float("top_p").filter(|&p| p > 0.0 && p <= 1.0),
        top_k: config["top_k"].as_u64().and_then(|k| u32::try_from(k).ok()),
        min_p: float("min_p").filter(|&p| p <= 1.0),
        repetition_penalty: float("repetition_penalty").filter(|&penalty| penalty > 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::fake_text;
    use crate::test_support::tokenizer::{BOS, END, EOS, START, byte_tokenizer_json};
    use serde_json::json;

    fn assets<'a>(tokenizer: &'a str, tokenizer_config: &'a str) -> TextAssets<'a> {
        TextAssets {
            tokenizer: tokenizer.as_bytes(),
            tokenizer_config: Some(tokenizer_config.as_bytes()),
            chat_template: None,
            generation_config: None,
            config: None,
        }
    }

    fn hello() -> ChatInput {
        ChatInput {
            messages: json!([{"role": "user", "content": "h"}]),
            add_generation_prompt: true,
            ..ChatInput::default()
        }
    }

    #[test]
    fn c83_stop_tokens_are_the_union() {
        let stops: Vec<u32> = fake_text().stop_token_ids().iter().copied().collect();
        assert_eq!(stops, [EOS, END]);
    }

    #[test]
    fn c84_bos_comes_exactly_once() {
        let text = fake_text();
        assert_eq!(text.encode_prompt("a").unwrap(), [BOS, 97]);
        assert_eq!(text.encode_prompt("<|bos|>a").unwrap(), [BOS, 97]);
        assert_eq!(text.encode_prompt("").unwrap(), [BOS]);
        let chat = text.encode_chat(&hello()).unwrap();
        assert_eq!(chat[..2], [BOS, START]);
        assert_eq!(chat.iter().filter(|&&id| id == BOS).count(), 1);

        let tokenizer = byte_tokenizer_json();
        let without = assets(&tokenizer, r#"{"bos_token": "<|bos|>", "add_bos_token": false}"#);
        let text = BundleText::from_assets(&without).unwrap();
        assert_eq!(text.encode_prompt("a").unwrap(), [97]);
        assert_eq!(text.bos(), Some(BOS));
    }

    #[test]
    fn templates_may_be_named() {
        let tokenizer = byte_tokenizer_json();
        let config = r#"{"chat_template": [{"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools"}]}"#;
        let text = BundleText::from_assets(&assets(&tokenizer, config)).unwrap();
        assert_eq!(text.render_chat(&hello()).unwrap(), "plain");
        let mut with_tools = hello();
        with_tools.tools = json!([{"type": "function"}]);
        assert_eq!(text.render_chat(&with_tools).unwrap(), "tools");
    }

    #[test]
    fn a_model_without_a_template_says_so() {
        let tokenizer = byte_tokenizer_json();
        let mut text = BundleText::from_assets(&assets(&tokenizer, "{}")).unwrap();
        assert!(matches!(text.render_chat(&hello()), Err(TextError::NoChatTemplate)));
        text.set_chat_template("mine").unwrap();
        assert_eq!(text.render_chat(&hello()).unwrap(), "mine");
        assert!(text.set_chat_template("{% if %}").is_err());
    }

    #[test]
    fn hostile_assets_are_refused_by_name() {
        let tokenizer = byte_tokenizer_json();
        let error = BundleText::from_assets(&assets(&tokenizer, "{")).unwrap_err();
        assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
        let mut bad = assets(&tokenizer, "{}");
        bad.chat_template = Some(&[0xff]);
        let error = BundleText::from_assets(&bad).unwrap_err();
        assert!(error.to_string().contains("chat_template.jinja"), "{error}");
    }

    #[test]
    fn recommended_sampling_is_read() {
        let config = json!({"temperature": 0.6, "top_k": 20, "top_p": 7.0});
        let defaults = sampling_defaults(&config);
        assert_eq!((defaults.temperature, defaults.top_k, defaults.top_p), (Some(0.6), Some(20), None));
        let greedy = sampling_defaults(&json!({"do_sample": false, "temperature": 0.6}));
        assert_eq!(greedy.temperature, Some(0.0));
    }
}
