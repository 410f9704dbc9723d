//! Published chat templates, rendered as `transformers` renders them.
//!
//! `VT_TEST_TEMPLATES` names the file that `fixtures/chat_templates.py` writes: templates, random conversations, and the
//! text or the error that `transformers` gives.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::collections::BTreeMap;
use vt_run::text::TextError;
use vt_run::text::chat_template::{ChatInput, ChatTemplate};

/// Differences of one template that are worth printing.
const SHOWN: usize = 3;

#[test]
fn templates_render_as_transformers_renders_them() {
    let Some(path) = std::env::var_os("VT_TEST_TEMPLATES") else {
        eprintln!("SKIPPED: VT_TEST_TEMPLATES does not name what fixtures/chat_templates.py wrote");
        return;
    };
    let templates: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert!(!templates.is_empty());
    let mut differing = 0;
    for template in &templates {
        let (mut rendered, mut found) = (0, Vec::new());
        let name = template["name"].as_str().unwrap();
        let tokens: BTreeMap<String, String> = serde_json::from_value(template["tokens"].clone()).unwrap();
        let compiled = ChatTemplate::new(template["source"].as_str().unwrap(), tokens);
        for case in template["cases"].as_array().unwrap() {
            let input = ChatInput {
                messages: case["messages"].clone(),
                tools: case["tools"].clone(),
                add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
                extra: case["extra"].as_object().unwrap().clone(),
            };
            let got = compiled.as_ref().map_err(ToString::to_string).map(|compiled| compiled.render(&input));
            rendered += usize::from(case["text"].is_string());
            if let Some(difference) = difference(case, got) {
                found.push(difference);
            }
        }
        let cases = template["cases"].as_array().unwrap().len();
        println!("{name}: {} of {cases} as transformers does it ({rendered} rendered)", cases - found.len());
        found.iter().take(SHOWN).for_each(|difference| println!("  {difference}"));
        differing += found.len();
    }
    assert_eq!(differing, 0, "conversations that differ");
}

/// What is wrong with the result of one case, if anything.
fn difference(case: &Value, got: Result<Result<String, TextError>, String>) -> Option<String> {
    let (text, error) = (case["text"].as_str(), case["error"].as_str().unwrap_or(""));
    match got {
        Ok(Ok(got)) if text == Some(got.as_str()) => None,
        // What the template itself says must be said. Where Python fails by itself, as when it is to iterate over the null
        // content of a message with tool calls, there is nothing to compare with.
        Ok(Err(TextError::TemplateRefused(words))) if error == format!("TemplateError: {words}") => None,
        Ok(_) if text.is_none() && !error.starts_with("TemplateError") => None,
        Ok(Ok(got)) => Some(match text {
            None => format!("rendered, where transformers says {error:?}: {got:?}"),
            Some(text) => {
                let same = text.chars().zip(got.chars()).take_while(|(a, b)| a == b).count();
                let tail = |s: &str| s.chars().skip(same.saturating_sub(20)).take(100).collect::<String>();
                format!("from character {same} on {:?}, expected {:?}", tail(&got), tail(text))
            }
        }),
        Ok(Err(other)) => Some(format!("{other}, expected {:?}", text.unwrap_or(error))),
        Err(other) => Some(format!("does not compile: {other}, expected {:?}", text.unwrap_or(error))),
    }
}
