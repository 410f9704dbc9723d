//! Calls and structured output through the chat protocol.

use super::*;

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Bern"]}},
            "required": ["city"], "additionalProperties": false}}}])
}

const CALL: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";

/// A server whose model thinks first; where `opens`, its template begins the thoughts itself.
async fn thinking(opens: bool) -> Rig {
    let opening = if opens { "<think>\\n" } else { "" };
    let template = format!(
        "{{{{ bos_token }}}}{{# </think> #}}{{% for m in messages %}}{{{{ '<|start|>' + m['role'] + '\\n' + m['content'] \
         + '<|end|>' }}}}{{% endfor %}}{{{{ '<|start|>assistant\\n{opening}' }}}}"
    );
    let mut text = fake_text();
    text.set_chat_template(&template).unwrap();
    let answer = "<think>\nhm\n</think>\n\nSo: 5";
    let model = FakeModel::new(Script::Reply(answer.bytes().map(u32::from).collect()), 1024, 512);
    rig_with_text(model, 8, ServerConfig::default(), text).await
}

#[tokio::test]
async fn thoughts_are_told_from_the_answer() {
    for opens in [false, true] {
        let rig = thinking(opens).await;
        let message = rig.chat(json!({})).await.json()["choices"][0]["message"].clone();
        assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("hm"), &json!("So: 5")));
        let pieces = rig.chat(json!({"stream": true})).await.pieces();
        let said = |field: &str| -> String {
            pieces.iter().filter_map(|piece| piece["choices"][0]["delta"][field].as_str()).collect()
        };
        assert_eq!((said("reasoning_content"), said("content")), ("hm".to_owned(), "So: 5".to_owned()));

        let user = json!([{"role": "user", "content": "hi"}]);
        let reply =
            rig.post("/v1/messages", json!({"messages": user, "max_tokens": 200, "temperature": 0})).await.json();
        assert_eq!(
            (&reply["content"][0]["type"], &reply["content"][0]["thinking"]),
            (&json!("thinking"), &json!("hm"))
        );
        assert_eq!(reply["content"][1]["text"], "So: 5");
        let reply = rig.post("/v1/responses", json!({"input": "hi", "temperature": 0})).await.json();
        assert_eq!(reply["output"][0]["content"][0], json!({"type": "reasoning_text", "text": "hm"}));
        assert_eq!(reply["output"][1]["content"][0]["text"], "So: 5");
        // A grammar is for the answer, and leaves no room for thoughts.
        let outputs = json!({"structured_outputs": {"choice": ["yes", "no"]}});
        let message = rig.chat(outputs).await.json()["choices"][0]["message"].clone();
        assert!(["yes", "no"].contains(&message["content"].as_str().unwrap()), "{message}");
    }
}

#[tokio::test]
async fn a_call_is_told_from_text() {
    let rig = rig_with(
        FakeModel::new(Script::Reply(format!("One moment. {CALL}").bytes().map(u32::from).collect()), 4096, 512),
        8,
        ServerConfig::default(),
    )
    .await;
    let reply = rig.chat(json!({"tools": weather()})).await.json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "One moment.");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "weather");
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Oslo"}));

    let pieces = rig.chat(json!({"tools": weather(), "stream": true})).await.pieces();
    let deltas: Vec<&Value> = pieces.iter().map(|piece| &piece["choices"][0]["delta"]).collect();
    let text: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(text, "One moment.");
    let calls: Vec<&Value> = deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
    assert_eq!(calls.len(), 1);
    assert_eq!((&calls[0]["index"], &calls[0]["function"]["name"]), (&json!(0), &json!("weather")));
    assert_eq!(pieces.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    // Without tools, or where none may be called, the same text is text.
    for extra in [json!({}), json!({"tools": weather(), "tool_choice": "none"})] {
        let reply = rig.chat(extra).await.json();
        assert_eq!(reply["choices"][0]["finish_reason"], "stop");
        assert!(reply["choices"][0]["message"]["content"].as_str().unwrap().contains(CALL));
    }
}

#[tokio::test]
async fn a_call_can_be_forced() {
    // The model would rather say letters.
    let rig = rig(FakeModel::new(Script::Letters, 4096, 512)).await;
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})] {
        let body = json!({"tools": weather(), "tool_choice": choice, "parallel_tool_calls": false});
        let reply = rig.chat(body).await.json();
        let call = &reply["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(reply["choices"][0]["finish_reason"], "tool_calls");
        assert_eq!(call["name"], "weather");
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(["Oslo", "Bern"].contains(&arguments["city"].as_str().unwrap()));
    }
}

#[tokio::test]
async fn tools_reach_a_template_that_does_not_know_them() {
    let rig = rig(FakeModel::new(Script::Letters, 4096, 512)).await;
    let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": weather()});
    let tokens = rig.post("/tokenize", body).await.json()["tokens"].clone();
    let text = rig.post("/detokenize", json!({"tokens": tokens})).await.json()["prompt"].clone();
    let text = text.as_str().unwrap();
    assert!(text.starts_with("<|bos|><|start|>system\nYou can call functions."), "{text}");
    assert!(text.contains("\"name\":\"weather\""));
}

#[tokio::test]
async fn output_follows_schemas_and_other_grammars() {
    let rig = rig(FakeModel::new(Script::Letters, 4096, 512)).await;
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer",
        "minimum": 10, "maximum": 99}}, "required": ["ok", "n"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}});
    let content = |reply: Value| reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    for temperature in [0.0, 1.0] {
        let body = json!({"response_format": format, "temperature": temperature, "max_tokens": 400});
        let reply = rig.chat(body).await.json();
        assert_eq!(reply["choices"][0]["finish_reason"], "stop");
        let value: Value = serde_json::from_str(&content(reply)).unwrap();
        assert!(value["ok"].is_boolean() && (10..100).contains(&value["n"].as_i64().unwrap()), "{value}");
    }
    let regex = rig.chat(json!({"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}})).await.json();
    assert_eq!(content(regex).len(), 7);
    let choice = rig.chat(json!({"structured_outputs": {"choice": ["yes", "no"]}})).await.json();
    assert!(["yes", "no"].contains(&content(choice).as_str()));
    let completion = rig.complete(json!({"response_format": format, "max_tokens": 400})).await.json();
    assert!(serde_json::from_str::<Value>(completion["choices"][0]["text"].as_str().unwrap()).is_ok());

    let bad = json!({"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}});
    assert_eq!(rig.chat(json!({"response_format": bad})).await.error(400)["param"], "response_format");
    rig.settle().await;
}
