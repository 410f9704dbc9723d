//! The shape of a `tokenizer.json` of the Hugging Face `tokenizers` library (0.20 and later), as far as it is written here.

use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};

use super::vocabulary::{Kind, Vocabulary};

/// The whole file.
#[derive(Serialize)]
pub(super) struct Tokenizer<'v> {
    version: &'static str,
    truncation: (),
    padding: (),
    added_tokens: Vec<AddedToken<'v>>,
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
    model: Model<'v>,
}

/// The parts that differ between kinds of tokenizers.
pub(super) struct Parts<'v> {
    pub(super) normalizer: Json,
    pub(super) pre_tokenizer: Json,
    pub(super) decoder: Json,
    pub(super) model: Model<'v>,
}

impl<'v> Tokenizer<'v> {
    pub(super) fn new(parts: Parts<'v>, added_tokens: Vec<AddedToken<'v>>, post_processor: Json) -> Self {
        let Parts { normalizer, pre_tokenizer, decoder, model } = parts;
        let version = "1.0";
        Self {
            version,
            truncation: (),
            padding: (),
            added_tokens,
            normalizer,
            pre_tokenizer,
            post_processor,
            decoder,
            model,
        }
    }
}

/// A token that is matched in the text before anything else.
#[derive(Serialize)]
pub(super) struct AddedToken<'v> {
    id: u32,
    content: &'v str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

/// Added tokens: control tokens and unknown, and with `special` false those that are text to the user.
///
/// `strips_right` says which of them swallow the white space after them.
pub(super) fn added_tokens<'v>(
    vocabulary: &'v Vocabulary<'_>,
    strips_right: impl Fn(&str) -> bool,
) -> Vec<AddedToken<'v>> {
    let tokens = vocabulary.tokens.iter().zip(&vocabulary.kinds).zip(0u32..);
    tokens
        .filter(|((_, kind), _)| matches!(kind, Kind::Control | Kind::Unknown | Kind::UserDefined))
        .map(|((text, kind), id)| AddedToken {
            id,
            content: text,
            single_word: false,
            lstrip: false,
            rstrip: strips_right(text),
            normalized: false,
            special: *kind != Kind::UserDefined,
        })
        .collect()
}

/// The model.
#[derive(Serialize)]
#[serde(tag = "type")]
pub(super) enum Model<'v> {
    #[serde(rename = "BPE")]
    Bpe {
        dropout: (),
        unk_token: Option<&'v str>,
        continuing_subword_prefix: (),
        end_of_word_suffix: (),
        fuse_unk: bool,
        byte_fallback: bool,
        ignore_merges: bool,
        vocab: IdsByText<'v>,
        merges: Vec<(&'v str, &'v str)>,
    },
    WordPiece {
        unk_token: &'v str,
        continuing_subword_prefix: &'static str,
        max_input_chars_per_word: u32,
        vocab: IdsByText<'v>,
    },
    Unigram {
        unk_id: Option<u32>,
        vocab: Vec<(&'v str, f64)>,
        byte_fallback: bool,
    },
}

/// A JSON object from token to id, in the order of the ids.
pub(super) struct IdsByText<'v>(pub(super) Vec<std::borrow::Cow<'v, str>>);

impl Serialize for IdsByText<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().zip(0u32..))
    }
}

/// The vocabulary as it is.
pub(super) fn ids_by_text<'v>(vocabulary: &'v Vocabulary<'_>) -> IdsByText<'v> {
    IdsByText(vocabulary.tokens.iter().map(|t| (&**t).into()).collect())
}

/// A pre-tokenizer that cuts a text into the matches of a regular expression and what lies between them.
pub(super) fn split(regex: &str, behavior: &str) -> Json {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": false})
}

/// Parts one after the other; one part alone stands for itself, none is null.
pub(super) fn sequence(kind: &str, mut parts: Vec<Json>) -> Json {
    match parts.len() {
        0 => Json::Null,
        1 => parts.remove(0),
        _ => json!({"type": "Sequence", kind: parts}),
    }
}

/// A post-processor that puts tokens before and after a text; null where there are none.
pub(super) fn template(before: Option<(&str, u32)>, after: Option<(&str, u32)>) -> Json {
    if before.is_none() && after.is_none() {
        return Json::Null;
    }
    let special = |token: Option<(&str, u32)>, type_id: u32| {
        token.map(|(text, _)| json!({"SpecialToken": {"id": text, "type_id": type_id}}))
    };
    let side = |sequence: &str, type_id: u32| {
        let text = json!({"Sequence": {"id": sequence, "type_id": type_id}});
        [special(before, type_id), Some(text), special(after, type_id)].into_iter().flatten()
    };
    let mut tokens = serde_json::Map::new();
    for (text, id) in [before, after].into_iter().flatten() {
        tokens.insert(text.into(), json!({"id": text, "ids": [id], "tokens": [text]}));
    }
    json!({
        "type": "TemplateProcessing",
        "single": side("A", 0).collect::<Vec<_>>(),
        "pair": side("A", 0).chain(side("B", 1)).collect::<Vec<_>>(),
        "special_tokens": tokens,
    })
}
