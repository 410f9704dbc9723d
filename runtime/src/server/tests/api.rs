//! What answers look like, and what is refused.

use super::*;

fn content(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap()
}

fn text(reply: &Value) -> &str {
    reply["choices"][0]["text"].as_str().unwrap()
}

/// The deltas of choice `index` joined.
fn joined(pieces: &[Value], index: u64) -> String {
    pieces
        .iter()
        .flat_map(|piece| piece["choices"].as_array().unwrap())
        .filter(|choice| choice["index"] == index)
        .filter_map(|choice| choice["delta"]["content"].as_str().or(choice["text"].as_str()))
        .collect()
}

#[tokio::test]
async fn a_chat_is_answered_whole_and_in_pieces() {
    let rig = rig(replying("Hello \u{1f600}!")).await;
    let whole = rig.chat(json!({})).await.json();
    assert_eq!(content(&whole), "Hello \u{1f600}!");
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "fake");
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], 12);
    let total = usage["prompt_tokens"].as_u64().unwrap() + 12;
    assert_eq!(usage["total_tokens"], total);

    let pieces = rig.chat(json!({"stream": true})).await.pieces();
    assert_eq!(joined(&pieces, 0), "Hello \u{1f600}!");
    assert_eq!(pieces[0]["choices"][0]["delta"]["role"], "assistant");
    let last = &pieces.last().unwrap()["choices"][0];
    assert_eq!(last["finish_reason"], "stop");
    assert_eq!(last["delta"], json!({}));
    assert!(pieces.iter().all(|piece| piece["id"] == pieces[0]["id"]));
    assert!(pieces.iter().all(|piece| piece["object"] == "chat.completion.chunk"));
}

#[tokio::test]
async fn c72_streams_of_bytes_equal_the_whole() {
    for reply in ["\u{1f600}\u{4e2d}\u{6587}\u{e9}", "a\u{301}\u{1f468}\u{200d}\u{1f469}"] {
        let rig = rig(replying(reply)).await;
        for max_tokens in [1, 2, 3, 5, 50] {
            let whole = rig.chat(json!({"max_tokens": max_tokens})).await.json();
            let options = json!({"max_tokens": max_tokens, "stream": true});
            let pieces = rig.chat(options).await.pieces();
            assert_eq!(joined(&pieces, 0), content(&whole));
            for piece in &pieces[..pieces.len() - 2] {
                let delta = piece["choices"][0]["delta"]["content"].as_str().unwrap();
                assert!(!delta.contains('\u{fffd}'));
            }
        }
    }
}

#[tokio::test]
async fn c73_stop_strings_straddle_tokens() {
    let rig = rig(replying("The quick brown fox jumps")).await;
    for stream in [false, true] {
        let options = json!({"stop": ["own fox", "nope"], "stream": stream});
        let reply = rig.chat(options).await;
        let (text, choice) = if stream {
            let pieces = reply.pieces();
            (joined(&pieces, 0), pieces.last().unwrap()["choices"][0].clone())
        } else {
            let whole = reply.json();
            assert_eq!(whole["usage"]["completion_tokens"], 19);
            (content(&whole).to_owned(), whole["choices"][0].clone())
        };
        assert_eq!(text, "The quick br");
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(choice["stop_reason"], "own fox");
    }
    let included = json!({"stop": "own fox", "include_stop_str_in_output": true});
    assert_eq!(content(&rig.chat(included).await.json()), "The quick brown fox");
    rig.settle().await;
    let metrics = rig.client.get("/metrics").await;
    assert!(metrics.text().contains("vt:request_success_total{finished_reason=\"stop\"} 3"));
    assert!(metrics.text().contains("vt:request_cancelled_total 0"));
}

#[tokio::test]
async fn c74_usage_comes_where_and_only_where_asked_for() {
    let rig = rig(replying("abc")).await;
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let body = |options: Value| {
            json!({"messages": [{"role": "user", "content": "x"}], "prompt": "x", "stream": true,
                "max_tokens": 3, "stream_options": options})
        };
        let pieces = rig.post(path, body(json!({"include_usage": true}))).await.pieces();
        let (last, others) = pieces.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert!(last["usage"]["total_tokens"].as_u64().unwrap() >= 3);
        for piece in others {
            assert_eq!(piece["usage"], Value::Null);
            assert!(piece.as_object().unwrap().contains_key("usage"));
            assert_eq!(piece["choices"].as_array().unwrap().len(), 1);
        }
        for options in [json!(null), json!({}), json!({"include_usage": false})] {
            let pieces = rig.post(path, body(options)).await.pieces();
            assert!(pieces.iter().all(|piece| piece.get("usage").is_none()));
            assert!(pieces.iter().all(|piece| piece["choices"] != json!([])));
        }
    }
}

#[tokio::test]
async fn c75_the_context_is_a_limit_with_numbers() {
    let rig = rig(letters()).await;
    let tokens = |count: usize| json!(vec![97; count]);
    let code = |error: Value| error["code"].clone();
    // The context is 256.
    let fits = rig.complete(json!({"prompt": tokens(255), "max_tokens": null})).await.json();
    assert_eq!(fits["usage"]["completion_tokens"], 1);
    for count in [256, 257] {
        let reply = rig.complete(json!({"prompt": tokens(count), "max_tokens": null})).await;
        let error = reply.error(400);
        assert!(error["message"].as_str().unwrap().contains("256 tokens"));
        assert!(error["message"].as_str().unwrap().contains(&count.to_string()));
        assert_eq!(code(error), "context_length_exceeded");
    }
    let error = rig.complete(json!({"prompt": tokens(200), "max_tokens": 57})).await.error(400);
    assert!(error["message"].as_str().unwrap().contains("57"));
    assert_eq!(code(error), "context_length_exceeded");
    let exact = json!({"prompt": tokens(200), "max_tokens": 56, "ignore_eos": true});
    assert_eq!(rig.complete(exact).await.json()["usage"]["completion_tokens"], 56);
    let huge = rig.complete(json!({"max_tokens": u64::MAX})).await;
    assert!(huge.status == 400, "{}", huge.text());
    let long = rig.chat(json!({"messages": [{"role": "user", "content": "x".repeat(300)}]})).await;
    assert_eq!(code(long.error(400)), "context_length_exceeded");
}

#[tokio::test]
async fn c75_large_bodies_are_refused_unread() {
    let rig = rig(letters()).await;
    let body = vec![b' '; 17 << 20];
    let reply = rig.client.post("/v1/completions", &body).await;
    reply.error(413);
    rig.complete(json!({})).await.json();
}

#[tokio::test]
async fn c76_empty_prompts_begin_with_bos() {
    let rig = rig(letters()).await;
    let expected = rig.complete(json!({"prompt": [256]})).await.json();
    for prompt in [json!(""), json!([]), json!([""]), json!(null)] {
        let reply = rig.complete(json!({"prompt": prompt})).await.json();
        assert_eq!(text(&reply), text(&expected));
        assert_eq!(reply["usage"]["prompt_tokens"], 1);
    }
    let error = rig.chat(json!({"messages": []})).await.error(400);
    assert_eq!(error["param"], "messages");
    rig.complete(json!({})).await.json();
}

#[tokio::test]
async fn c77_bad_requests_are_named() {
    let rig = rig(letters()).await;
    for body in [&b"{\"prompt\": \"a\""[..], b"\xff\xfe", b"{\"prompt\": \"\xff\"}", b"[]", b"", b"null"] {
        for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
            rig.client.post(path, body).await.error(400);
        }
    }
    for (field, value) in [
        ("max_tokens", json!(-1)),
        ("max_tokens", json!("many")),
        ("max_completion_tokens", json!(0)),
        ("temperature", json!("hot")),
        ("temperature", json!(-0.1)),
        ("top_p", json!(0)),
        ("top_p", json!(1.1)),
        ("top_k", json!(-2)),
        ("min_p", json!(2)),
        ("n", json!(0)),
        ("n", json!(1000)),
        ("best_of", json!(3)),
        ("seed", json!("x")),
        ("stop", json!(5)),
        ("stop", json!([1])),
        ("stop_token_ids", json!(["a"])),
        ("stream", json!("yes")),
        ("stream_options", json!([])),
        ("logit_bias", json!([])),
        ("logit_bias", json!({"x": 1})),
        ("logit_bias", json!({"5": 101})),
        ("presence_penalty", json!(3)),
        ("frequency_penalty", json!(-3)),
        ("repetition_penalty", json!(0)),
        ("logprobs", json!("x")),
        ("echo", json!(1)),
        ("prompt", json!({"a": 1})),
        ("suffix", json!("x")),
        ("model", json!(3)),
    ] {
        let error = rig.complete(json!({field: value})).await.error(400);
        let param = error["param"].as_str().unwrap();
        assert!(param.starts_with(field), "{param}");
    }
    for (field, value) in [
        ("top_logprobs", json!(3)),
        ("logprobs", json!(3)),
        ("messages", json!("x")),
        ("functions", json!([])),
        ("modalities", json!(["audio"])),
        ("audio", json!({})),
    ] {
        let error = rig.chat(json!({field: value})).await.error(400);
        assert_eq!(error["param"], field);
    }
    let error = rig.complete(json!({"prompt": [300]})).await.error(400);
    assert_eq!(error["param"], "prompt");
    rig.complete(json!({})).await.json();
}

#[tokio::test]
async fn null_is_absent_and_unknown_fields_are_ignored() {
    let rig = rig(letters()).await;
    let plain = rig.complete(json!({})).await.json();
    let nulls = json!({"stop": null, "seed": null, "logprobs": null, "n": null, "stream": null,
        "stream_options": null, "logit_bias": null, "user": "me", "made_up": {"x": 1}});
    assert_eq!(text(&rig.complete(nulls).await.json()), text(&plain));
}

#[tokio::test]
async fn c80_seeds_repeat_alone_and_together() {
    let rig = rig(letters()).await;
    let body =
        |seed: Value| json!({"prompt": "seed", "temperature": 1.0, "seed": seed, "max_tokens": 20, "ignore_eos": true});
    let alone = rig.complete(body(json!(7))).await.json();
    let (a, b, c, d) = tokio::join!(
        rig.complete(body(json!(7))),
        rig.complete(body(json!(null))),
        rig.complete(body(json!(7))),
        rig.complete(body(json!(null))),
    );
    for (reply, same) in [(a, true), (b, false), (c, true), (d, false)] {
        assert_eq!(text(&reply.json()) == text(&alone), same);
    }
    let two = rig
        .complete(json!({"prompt": "seed", "temperature": 1.0, "seed": 7, "n": 2,
        "max_tokens": 20, "ignore_eos": true}))
        .await
        .json();
    assert_eq!(text(&two), text(&alone));
    assert_ne!(two["choices"][1]["text"], two["choices"][0]["text"]);
    let next = rig.complete(body(json!(8))).await.json();
    assert_eq!(two["choices"][1]["text"], next["choices"][0]["text"]);
}

#[tokio::test]
async fn c81_special_tokens_stay_out_of_the_text() {
    let mut reply: Vec<u32> = "a".bytes().map(u32::from).collect();
    reply.extend([256, u32::from(b'b'), 258]);
    let rig = rig(FakeModel::new(Script::Reply(reply), 256, 64)).await;
    assert_eq!(content(&rig.chat(json!({})).await.json()), "ab");
    let kept = rig.chat(json!({"skip_special_tokens": false})).await.json();
    assert_eq!(content(&kept), "a<|bos|>b");
    assert_eq!(kept["choices"][0]["stop_reason"], 258);
    let ignored = rig.chat(json!({"ignore_eos": true, "skip_special_tokens": false, "max_tokens": 4})).await;
    assert_eq!(content(&ignored.json()), "a<|bos|>b<|end|>");
}

#[tokio::test]
async fn chat_logprobs_have_openai_shape() {
    let rig = rig(replying("h\u{e9}")).await;
    let options = json!({"logprobs": true, "top_logprobs": 2});
    let whole = rig.chat(options.clone()).await.json();
    let entries = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(entries.len(), 3);
    assert_eq!(entries[0]["token"], "h");
    assert_eq!(entries[0]["bytes"], json!([104]));
    assert_eq!(entries[1]["bytes"], json!([0xc3]));
    assert_eq!(entries[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(entries[0]["top_logprobs"][0]["token"], "h");
    let logprob = entries[0]["logprob"].as_f64().unwrap();
    assert!((-0.1..=0.0).contains(&logprob), "{logprob}");

    let mut streamed = options;
    streamed["stream"] = json!(true);
    let pieces = rig.chat(streamed).await.pieces();
    let all: Vec<Value> = pieces
        .iter()
        .filter_map(|piece| piece["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(all, entries);
    assert_eq!(rig.chat(json!({})).await.json()["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn completion_logprobs_and_echo() {
    let rig = rig(letters()).await;
    let reply = rig
        .complete(json!({"prompt": "xyz", "logprobs": 3, "echo": true, "max_tokens": 2, "logit_bias": {"257": -100}}))
        .await
        .json();
    let choice = &reply["choices"][0];
    assert!(text(&reply).starts_with("xyz"));
    let logprobs = &choice["logprobs"];
    // BOS, three bytes, two of the output.
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[key].as_array().unwrap().len(), 6, "{key}");
    }
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert_eq!(logprobs["text_offset"], json!([0, 0, 1, 2, 3, 4]));
    assert_eq!(logprobs["tokens"][1], "x");
    assert!(logprobs["top_logprobs"][4].as_object().unwrap().len() >= 3);

    let scored = rig.complete(json!({"prompt": "xyz", "logprobs": 0, "echo": true, "max_tokens": 0})).await.json();
    assert_eq!(text(&scored), "xyz");
    assert_eq!(
        scored["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap()[..4],
        logprobs["token_logprobs"].as_array().unwrap()[..4]
    );
    assert_eq!(scored["usage"]["completion_tokens"], 0);

    let pieces = rig.complete(json!({"prompt": "xyz", "echo": true, "stream": true})).await.pieces();
    assert!(joined(&pieces, 0).starts_with("xyz"));
}

#[tokio::test]
async fn many_prompts_and_choices_keep_their_places() {
    let rig = rig(letters()).await;
    let alone = |prompt: &'static str| rig.complete(json!({"prompt": prompt}));
    let (a, b) = (alone("first").await.json(), alone("second").await.json());
    let body = json!({"prompt": ["first", "second"], "n": 2});
    let both = rig.complete(body.clone()).await.json();
    let texts: Vec<&str> =
        both["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, [text(&a), text(&a), text(&b), text(&b)]);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let pieces = rig.complete(streamed).await.pieces();
    for (index, expected) in texts.iter().enumerate() {
        assert_eq!(joined(&pieces, index as u64), *expected);
    }
}

#[tokio::test]
async fn penalties_and_bias_change_the_choice() {
    let rig = rig(letters()).await;
    let biased = rig.complete(json!({"logit_bias": {"90": 100}, "max_tokens": 5})).await.json();
    assert_eq!(text(&biased), "ZZZZZ");
    for (penalty, expected) in [("presence_penalty", "ZYZZ"), ("frequency_penalty", "ZYZY")] {
        let body = json!({"logit_bias": {"90": 100, "89": 99.5}, penalty: 1, "max_tokens": 4});
        assert_eq!(text(&rig.complete(body).await.json()), expected);
    }
    let min = rig.complete(json!({"logit_bias": {"257": 100}, "min_tokens": 3})).await.json();
    assert_eq!(min["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn cached_prefixes_show_in_the_usage() {
    let rig = rig(letters()).await;
    let body = json!({"prompt": "0123456789abcdef".repeat(8), "max_tokens": 2, "timings": true});
    let cached = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    let first = rig.complete(body.clone()).await.json();
    let second = rig.complete(body.clone()).await.json();
    assert_eq!((cached(&first), cached(&second)), (json!(0), json!(128)));
    assert!(second["timings"]["prompt_ms"].is_number());
    let mut salted = body;
    salted["cache_salt"] = json!("mine");
    assert_eq!(cached(&rig.complete(salted).await.json()), 0);
}

#[tokio::test]
async fn a_message_can_be_continued() {
    let rig = rig(letters()).await;
    let body = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so far"}],
        "continue_final_message": true});
    let tokens = rig.post("/tokenize", body).await.json()["tokens"].clone();
    let text = rig.post("/detokenize", json!({"tokens": tokens})).await.json()["prompt"].clone();
    assert_eq!(text, "<|bos|><|start|>user\na<|end|><|start|>assistant\nso far");
}

#[tokio::test]
async fn tokens_and_texts_convert_both_ways() {
    let rig = rig(letters()).await;
    let reply = rig.post("/tokenize", json!({"prompt": "h\u{e9}", "return_token_strs": true})).await.json();
    assert_eq!(reply["tokens"], json!([256, 104, 0xc3, 0xa9]));
    assert_eq!((&reply["count"], &reply["max_model_len"]), (&json!(4), &json!(256)));
    assert_eq!(reply["token_strs"][0], "<|bos|>");
    let bare = rig.post("/tokenize", json!({"content": "h", "add_special_tokens": false})).await.json();
    assert_eq!(bare["tokens"], json!([104]));
    let text = rig.post("/detokenize", json!({"tokens": [104, 0xc3, 0xa9, 9999]})).await.json();
    assert_eq!(text["prompt"], "h\u{e9}");
    rig.post("/tokenize", json!({})).await.error(400);
    rig.post("/detokenize", json!({"tokens": "x"})).await.error(400);
}

#[tokio::test]
async fn models_are_named_and_others_refused() {
    let rig = rig_with(
        letters(),
        8,
        ServerConfig { served_model_names: vec!["org/main".to_owned(), "alias".to_owned()], ..ServerConfig::default() },
    )
    .await;
    let models = rig.client.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "org/main");
    assert_eq!(models["data"][0]["bundle_id"], "fa4e".repeat(16));
    assert_eq!(models["data"][1]["id"], "alias");
    assert_eq!(rig.client.get("/v1/models/org/main").await.json()["max_model_len"], 256);
    for other in ["other", "%ff", "%00"] {
        rig.client.get(&format!("/v1/models/{other}")).await.error(404);
    }
    assert_eq!(rig.complete(json!({"model": "alias"})).await.json()["model"], "alias");
    assert_eq!(rig.complete(json!({})).await.json()["model"], "org/main");
    let error = rig.complete(json!({"model": "gpt-9"})).await.error(404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
}

#[tokio::test]
async fn paths_and_methods_that_do_not_exist() {
    let rig = rig(letters()).await;
    rig.client.get("/v1/nothing").await.error(404);
    rig.client.get("/v1/completions").await.error(405);
    rig.client.post("/health", b"").await.error(405);
}
