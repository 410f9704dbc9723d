"""The official `openai` client, unmodified, against a server (see conftest.py for which one).

Nothing here depends on what the model says: texts are compared with each other, not with the world.
"""

import asyncio
import time

import openai
import pytest

QUESTION = [{"role": "user", "content": "Say something short about rivers."}]
PROMPT = "Once upon a time, there was"


def metric(http, name):
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(name + " ") or line.startswith(name + "{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_the_model_is_listed(client, model):
    card = client.models.retrieve(model)
    assert card.id == model
    assert len(card.bundle_id) == 64
    assert card.max_model_len > 0


def test_a_chat_is_answered(client, model):
    reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=16)
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.model == model
    assert reply.usage.completion_tokens <= 16
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_equals_the_whole(client, model):
    options = dict(model=model, messages=QUESTION, temperature=0, max_tokens=24)
    whole = client.chat.completions.create(**options).choices[0]
    chunks = list(client.chat.completions.create(**options, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_the_stream_helper_works(client, model):
    with client.chat.completions.stream(model=model, messages=QUESTION, temperature=0, max_tokens=8) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        snapshot = stream.current_completion_snapshot
    assert snapshot.choices[0].message.content == text


def test_usage_comes_last_in_a_stream(client, model):
    chunks = list(
        client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens <= 4
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_greedy_answers_repeat(client, model):
    texts = {
        client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=16).choices[0].text
        for _ in range(3)
    }
    assert len(texts) == 1


def test_seeds_repeat_alone_and_together(client, async_client, model):
    options = dict(model=model, prompt=PROMPT, temperature=1.0, max_tokens=12, seed=1234)
    alone = client.completions.create(**options).choices[0].text
    assert client.completions.create(**options).choices[0].text == alone
    other = client.completions.create(**{**options, "seed": 4321}).choices[0].text
    assert other != alone

    async def together():
        async with async_client() as session:
            requests = [
                session.completions.create(**({**options, "seed": None} if index % 2 else options))
                for index in range(6)
            ]
            return [reply.choices[0].text for reply in await asyncio.gather(*requests)]

    texts = asyncio.run(together())
    assert texts[0] == texts[2] == texts[4] == alone


def test_several_at_once_are_each_as_alone(client, async_client, model):
    prompts = [f"Number {index} is" for index in range(8)]
    options = dict(model=model, temperature=0, max_tokens=8)
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]

    async def together():
        async with async_client() as session:
            requests = [session.completions.create(prompt=prompt, **options) for prompt in prompts]
            return [reply.choices[0].text for reply in await asyncio.gather(*requests)]

    assert asyncio.run(together()) == alone


def test_prompts_in_a_list_keep_their_order(client, model):
    prompts = ["One", "Two", "Three"]
    options = dict(model=model, temperature=0, max_tokens=6)
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
    reply = client.completions.create(prompt=prompts, **options)
    assert [choice.text for choice in reply.choices] == alone
    assert [choice.index for choice in reply.choices] == [0, 1, 2]


def test_token_ids_are_a_prompt(client, http, model):
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    options = dict(model=model, temperature=0, max_tokens=6)
    from_ids = client.completions.create(prompt=ids, **options)
    from_text = client.completions.create(prompt=PROMPT, **options)
    assert from_ids.choices[0].text == from_text.choices[0].text
    assert from_ids.usage.prompt_tokens == len(ids)


def test_several_choices(client, model):
    reply = client.chat.completions.create(model=model, messages=QUESTION, n=3, temperature=1, seed=1, max_tokens=12)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) > 1


def test_stop_strings_straddle_tokens(client, model):
    options = dict(model=model, prompt=PROMPT, temperature=0, max_tokens=24)
    text = client.completions.create(**options).choices[0].text
    stop = text[5:9]
    reply = client.completions.create(**options, stop=stop).choices[0]
    assert reply.text == text[: text.index(stop)]
    assert reply.finish_reason == "stop"
    chunks = list(client.completions.create(**options, stop=[stop, "\0never"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == reply.text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_of_a_chat(client, model):
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    ).choices[0]
    assert 1 <= len(reply.logprobs.content) <= 5
    for entry in reply.logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        ordered = [top.logprob for top in entry.top_logprobs]
        assert ordered == sorted(ordered, reverse=True)
        # Greedy: the chosen token is the most likely one.
        assert entry.logprob == pytest.approx(ordered[0], abs=1e-5)
    joined = b"".join(bytes(entry.bytes) for entry in reply.logprobs.content)
    assert joined.decode("utf-8", "replace").startswith(reply.message.content)


def test_logprobs_of_a_completion_and_its_prompt(client, model):
    reply = client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=3, logprobs=2, echo=True
    ).choices[0]
    assert reply.text.startswith(PROMPT)
    logprobs = reply.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    scored = client.completions.create(model=model, prompt=PROMPT, max_tokens=0, logprobs=0, echo=True).choices[0]
    assert scored.text == PROMPT
    for one, other in zip(scored.logprobs.token_logprobs[1:], logprobs.token_logprobs[1:]):
        assert one == pytest.approx(other, abs=2e-2)


def test_bias_decides(client, http, model):
    token = http.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()["tokens"][0]
    reply = client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=4, logit_bias={str(token): 100}
    )
    assert reply.choices[0].text == "xxxx"


def test_further_sampling_parameters_are_accepted(client, model):
    reply = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        max_completion_tokens=5,
        user="me",
        extra_body={"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2, "unheard_of": 1},
    )
    assert 2 <= reply.usage.completion_tokens <= 5


def test_a_conversation_goes_on(client, model):
    first = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=12)
    history = QUESTION + [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": [{"type": "text", "text": "And about lakes?"}]},
    ]
    second = client.chat.completions.create(model=model, messages=history, temperature=0, max_tokens=8)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.context(2048)
def test_a_prefix_is_computed_once(client, model):
    prompt = "The prefix cache keeps blocks of sixteen tokens. " * 12
    options = dict(model=model, prompt=prompt, temperature=0, max_tokens=4)
    first = client.completions.create(**options)
    second = client.completions.create(**options)
    assert second.choices[0].text == first.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens >= second.usage.prompt_tokens - 32


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": 0},
        {"max_tokens": -1},
        {"n": 0},
        {"stop": 3},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ],
)
def test_bad_requests_raise_and_name_the_field(client, model, change):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{"model": model, "messages": QUESTION, **change})
    assert next(iter(change)) in raised.value.param
    assert raised.value.type == "invalid_request_error"


def test_too_long_a_prompt_says_how_long(client, model):
    limit = client.models.retrieve(model).max_model_len
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=model, prompt=[5] * (limit + 1), max_tokens=1)
    assert raised.value.code == "context_length_exceeded"
    assert str(limit) in raised.value.message


def test_other_models_do_not_exist(client):
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert raised.value.code == "model_not_found"


def test_malformed_json_is_the_clients_fault(http):
    for body in (b'{"model": ', b"\xff\xfe", b"[]", b""):
        reply = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_an_empty_prompt_keeps_the_server_up(client, http, model):
    for prompt in ("", [], [""]):
        reply = http.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 2})
        assert reply.status_code in (200, 400)
    client.completions.create(model=model, prompt=PROMPT, max_tokens=1)


def test_leaving_cancels(client, http, model):
    before = metric(http, "vt:request_cancelled_total")
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: metric(http, "vt:request_cancelled_total") > before)
    wait_for(lambda: metric(http, "vt:num_requests_running") == 0)
    assert metric(http, "vt:kv_cache_usage_perc") == 0


def test_text_and_tokens_convert_both_ways(http):
    text = "R\u00edo, \u6cb3, \U0001f30a and a river"
    tokens = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == text


def test_health_and_metrics(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    reply = http.get("/metrics")
    assert "openmetrics-text" in reply.headers["content-type"]
    assert reply.text.endswith("# EOF\n")
    assert reply.headers["x-request-id"]


def test_penalties_change_what_repeats(client, model):
    options = dict(model=model, prompt="la la la la la la", temperature=0, max_tokens=12)
    plain = client.completions.create(**options).choices[0].text
    punished = client.completions.create(**options, presence_penalty=2, frequency_penalty=2).choices[0].text
    repeated = client.completions.create(**options, extra_body={"repetition_penalty": 50}).choices[0].text
    assert len({plain, punished, repeated}) > 1


def test_streams_never_split_a_character(client, http, model):
    # Bias towards the single bytes of an emoji, whatever the model would say.
    text = "\U0001f600"
    tokens = http.post("/tokenize", json={"prompt": text * 3, "add_special_tokens": False}).json()["tokens"]
    bias = {str(token): 100 for token in tokens}
    options = dict(model=model, prompt="x", temperature=1, seed=3, max_tokens=24, logit_bias=bias)
    whole = client.completions.create(**options).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)]
    assert "".join(pieces) == whole
    for piece in pieces[:-1]:
        piece.encode("utf-8")


@pytest.mark.context(2048)
def test_usage_counts_cached_tokens_in_streams_and_messages(client, model):
    prompt = "Sixteen tokens and then some more of the same kind, so that there is a block to keep. " * 8
    options = dict(model=model, prompt=prompt, temperature=0, max_tokens=2)
    client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    usage = chunks[-1].usage
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 32 > 0


def test_request_ids_come_back(http, client, model):
    reply = client.completions.with_raw_response.create(
        model=model, prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )
    assert reply.headers["x-request-id"] == "mine-7"
    assert http.get("/nothing").headers["x-request-id"]


def test_large_bodies_are_refused(http):
    reply = http.post("/v1/completions", content=b'{"prompt": "' + b"a" * (17 << 20) + b'"}')
    assert reply.status_code == 413
    assert reply.json()["error"]["type"] == "invalid_request_error"
