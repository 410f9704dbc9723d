"""Tools, structured output, and the protocols beside chats, with the official clients.

What must hold for any model is tested: forced calls and schemas, not what a model does of its own accord.
"""

import json
import re

import anthropic
import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def claude(base_url):
    return anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=120)


@pytest.mark.context(2048)
def test_a_forced_call_has_valid_arguments(client, model):
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        reply = client.chat.completions.create(
            model=model, messages=QUESTION, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=80,
            parallel_tool_calls=False,
        )
        call = reply.choices[0].message.tool_calls[0]
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Bern")
        assert reply.choices[0].finish_reason == "tool_calls"


@pytest.mark.context(2048)
def test_a_call_comes_through_a_stream(client, model):
    chunks = list(
        client.chat.completions.create(
            model=model, messages=QUESTION, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=80,
            parallel_tool_calls=False, stream=True,
        )
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments)["city"] in ("Oslo", "Bern")
    assert calls[0].id and calls[0].function.name == "weather"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_results_of_calls_go_back(client, model):
    history = QUESTION + [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
    ]
    reply = client.chat.completions.create(model=model, messages=history, tools=TOOLS, tool_choice="none", max_tokens=4)
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_output_follows_a_schema(client, model):
    for temperature in (0, 1):
        reply = client.chat.completions.create(
            model=model, messages=QUESTION, temperature=temperature, max_tokens=250,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        )
        value = json.loads(reply.choices[0].message.content)
        assert isinstance(value["ok"], bool) and value["kind"] in ("a", "b")


def test_output_follows_a_choice(client, model):
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert reply.choices[0].message.content in ("yes", "no")


def test_an_impossible_schema_is_refused(client, model):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model=model, messages=QUESTION,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        )
    assert raised.value.param == "response_format"


def test_responses_whole_and_in_pieces(client, model):
    options = dict(model=model, input="Say something short.", temperature=0, max_output_tokens=12)
    whole = client.responses.create(**options)
    assert whole.status in ("completed", "incomplete")
    assert whole.usage.output_tokens <= 12
    text = ""
    with client.responses.stream(**options) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
    assert text == whole.output_text


@pytest.mark.context(2048)
def test_responses_carry_forced_calls(client, model):
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
    reply = client.responses.create(
        model=model, input="Oslo?", tools=tools, tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=80, temperature=0,
    )
    call = next(item for item in reply.output if item.type == "function_call")
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Oslo", "Bern")


def test_messages_whole_and_in_pieces(claude, model):
    options = dict(model=model, messages=QUESTION, max_tokens=12, extra_body={"temperature": 0})
    whole = claude.messages.create(**options)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole.usage.output_tokens <= 12
    with claude.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason


@pytest.mark.context(2048)
def test_messages_carry_forced_calls(claude, model):
    tools = [{"name": "weather", "description": "Weather", "input_schema": PARAMETERS}]
    reply = claude.messages.create(
        model=model, messages=QUESTION, max_tokens=80, tools=tools,
        tool_choice={"type": "tool", "name": "weather"}, extra_body={"temperature": 0},
    )
    call = next(block for block in reply.content if block.type == "tool_use")
    assert call.input["city"] in ("Oslo", "Bern")
    assert reply.stop_reason == "tool_use"


def test_messages_are_counted(claude, model):
    counted = claude.messages.count_tokens(model=model, messages=QUESTION).input_tokens
    reply = claude.messages.create(model=model, messages=QUESTION, max_tokens=1)
    used = reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
    assert counted == used


def test_bad_messages_raise(claude, model):
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model=model, messages=[], max_tokens=1)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="no-such-model", messages=QUESTION, max_tokens=1)


def test_output_is_a_json_object(client, model):
    options = dict(model=model, messages=QUESTION, temperature=0, max_tokens=300, response_format={"type": "json_object"})
    choice = client.chat.completions.create(**options).choices[0]
    # A model may not come to an end by itself; what it says until then is the beginning of an object.
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_output_follows_a_regex_and_a_grammar(client, model):
    def answer(**outputs):
        reply = client.chat.completions.create(
            model=model, messages=QUESTION, temperature=1, max_tokens=40, extra_body={"structured_outputs": outputs}
        )
        return reply.choices[0].message.content

    assert re.fullmatch(r"[a-c]{3}-[0-9]{2}", answer(regex="[a-c]{3}-[0-9]{2}"))
    grammar = 'start: item ("," item)?\nitem: "x" | "yy"'
    assert answer(grammar=grammar) in ("x", "yy", "x,x", "x,yy", "yy,x", "yy,yy")
    completion = client.completions.create(
        model=model, prompt="A number: ", temperature=1, max_tokens=20, extra_body={"structured_outputs": {"regex": "[0-9]{4}"}}
    )
    assert re.fullmatch("[0-9]{4}", completion.choices[0].text)


def test_schemas_hold_in_responses_and_streams(client, model):
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    reply = client.responses.create(model=model, input="?", max_output_tokens=250, temperature=0, text=form)
    assert json.loads(reply.output_text)["kind"] in ("a", "b")
    chunks = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=250, stream=True,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert json.loads(text)["kind"] in ("a", "b")


@pytest.mark.context(2048)
def test_several_calls_at_once(client, model):
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=120
    )
    calls = reply.choices[0].message.tool_calls
    assert calls and len({call.id for call in calls}) == len(calls)


@pytest.mark.context(2048)
def test_messages_take_what_claude_clients_send(claude, model):
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Oslo?"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
    ]
    tools = [{"name": "weather", "description": "Weather", "input_schema": PARAMETERS}]
    reply = claude.messages.create(
        model=model, system="Be brief.", messages=history, tools=tools, max_tokens=8, stop_sequences=["\0never"],
        extra_body={"temperature": 0},
    )
    assert reply.role == "assistant" and reply.content
    with claude.messages.stream(
        model=model, messages=QUESTION, max_tokens=80, tools=tools, tool_choice={"type": "any"}, extra_body={"temperature": 0}
    ) as stream:
        final = stream.get_final_message()
    assert next(block for block in final.content if block.type == "tool_use").input["city"] in ("Oslo", "Bern")
