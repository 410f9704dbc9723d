//! The protocols that are translated to chats.

use super::*;

const CALL: &str = "See: <tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>";

async fn large(reply: &str) -> Rig {
    rig(FakeModel::new(Script::Reply(reply.bytes().map(u32::from).collect()), 4096, 512)).await
}

fn kinds(pieces: &[Value]) -> Vec<&str> {
    pieces.iter().map(|piece| piece["type"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn messages_are_answered_in_anthropics_shape() {
    let rig = large("Hello \u{e9}!").await;
    let body = json!({"model": "fake", "max_tokens": 50, "system": "Be brief.", "temperature": 0,
        "messages": [{"role": "user", "content": "hi"}]});
    let reply = rig.post("/v1/messages", body.clone()).await.json();
    assert_eq!(reply["content"], json!([{"type": "text", "text": "Hello \u{e9}!"}]));
    assert_eq!((&reply["type"], &reply["stop_reason"]), (&json!("message"), &json!("end_turn")));
    let counted = rig.post("/v1/messages/count_tokens", body.clone()).await.json()["input_tokens"].clone();
    assert_eq!(reply["usage"]["input_tokens"], counted);

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let pieces = rig.post("/v1/messages", streamed).await.named_pieces();
    let kinds = kinds(&pieces);
    assert_eq!(kinds[..2], ["message_start", "content_block_start"]);
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let text: String = pieces.iter().filter_map(|piece| piece["delta"]["text"].as_str()).collect();
    assert_eq!(text, "Hello \u{e9}!");

    let mut cut = body.clone();
    cut["stop_sequences"] = json!(["lo"]);
    let reply = rig.post("/v1/messages", cut).await.json();
    assert_eq!((&reply["stop_reason"], &reply["stop_sequence"]), (&json!("stop_sequence"), &json!("lo")));
    let mut short = body;
    short["max_tokens"] = json!(2);
    assert_eq!(rig.post("/v1/messages", short).await.json()["stop_reason"], "max_tokens");

    let refused = rig.post("/v1/messages", json!({"messages": []})).await;
    assert_eq!(refused.status, 400);
    let error: Value = serde_json::from_slice(&refused.body).unwrap();
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
}

#[tokio::test]
async fn messages_carry_calls() {
    let rig = large(CALL).await;
    let body = json!({"max_tokens": 200, "temperature": 0, "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}]});
    let reply = rig.post("/v1/messages", body.clone()).await.json();
    assert_eq!(reply["stop_reason"], "tool_use");
    assert_eq!(reply["content"][0]["text"], "See:");
    assert_eq!((&reply["content"][1]["name"], &reply["content"][1]["input"]), (&json!("f"), &json!({"x": 1})));
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let pieces = rig.post("/v1/messages", streamed).await.named_pieces();
    let partial = pieces.iter().find_map(|piece| piece["delta"]["partial_json"].as_str());
    assert_eq!(partial, Some("{\"x\":1}"));
    let indices: Vec<&Value> =
        pieces.iter().filter(|piece| piece["type"] == "content_block_stop").map(|piece| &piece["index"]).collect();
    assert_eq!(indices, [&json!(0), &json!(1)]);
}

#[tokio::test]
async fn responses_are_answered_whole_and_in_pieces() {
    let rig = large("Hello!").await;
    let body = json!({"input": "hi", "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 50});
    let reply = rig.post("/v1/responses", body.clone()).await.json();
    assert_eq!((&reply["object"], &reply["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(reply["output"][0]["content"][0]["text"], "Hello!");
    assert_eq!(reply["usage"]["output_tokens"], 7);

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let pieces = rig.post("/v1/responses", streamed).await.named_pieces();
    let kinds = kinds(&pieces);
    assert_eq!(
        kinds[..4],
        ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    );
    assert_eq!(
        kinds[kinds.len() - 4..],
        ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    );
    let text: String = pieces.iter().filter_map(|piece| piece["delta"].as_str()).collect();
    assert_eq!(text, "Hello!");
    assert_eq!(pieces.last().unwrap()["response"]["output"][0]["content"], reply["output"][0]["content"]);
    assert!(pieces.iter().enumerate().all(|(index, piece)| piece["sequence_number"] == index));

    let mut short = body;
    short["max_output_tokens"] = json!(2);
    let reply = rig.post("/v1/responses", short).await.json();
    assert_eq!(
        (&reply["status"], &reply["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    assert_eq!(rig.post("/v1/responses", json!({})).await.error(400)["param"], "input");
}

#[tokio::test]
async fn responses_carry_calls() {
    let rig = large(CALL).await;
    let body = json!({"temperature": 0, "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]});
    let reply = rig.post("/v1/responses", body.clone()).await.json();
    let call = &reply["output"][1];
    assert_eq!(
        (&call["type"], &call["name"], &call["arguments"]),
        (&json!("function_call"), &json!("f"), &json!("{\"x\":1}"))
    );
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let pieces = rig.post("/v1/responses", streamed).await.named_pieces();
    let done = pieces.iter().find(|piece| piece["type"] == "response.function_call_arguments.done").unwrap();
    assert_eq!((&done["arguments"], &done["output_index"]), (&json!("{\"x\":1}"), &json!(1)));
}
