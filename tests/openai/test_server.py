"""Servers started with flags of their own: keys, names, sockets, origins, templates, loading, overload, and the end."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager

import anthropic
import httpx
import openai
import pytest

from conftest import free_port, wait_until_ready

RUN, BUNDLE = os.environ.get("VT_RUN"), os.environ.get("VT_BUNDLE")
pytestmark = pytest.mark.skipif(not RUN or not BUNDLE, reason="set VT_RUN and VT_BUNDLE")

# The shape of Llama 3's template as far as tools are concerned: JSON with `parameters`, introduced by an ipython environment.
LLAMA_TEMPLATE = """{{- bos_token }}
{%- if tools %}{{- "Environment: ipython\\n" }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}{{- message.role + ": " + message.content + "\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{- "assistant: " }}{% endif %}"""

# The endings that METRICS of a server under vLLM's dashboards have.
METRICS = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total time_to_first_token_seconds_bucket
inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
request_prefill_time_seconds_bucket request_decode_time_seconds_bucket iteration_tokens_total_bucket load_seconds
load_bytes_total bundle_info verify_failures_total""".split()


@contextmanager
def server(*flags, ready=True):
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VT_")}
    process = subprocess.Popen([RUN, "--bundle", BUNDLE, "--port", str(port), "--log", "warn", *flags], env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        if ready:
            wait_until_ready(url, process)
        yield url, process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def test_keys_from_a_file(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-key\n\nsecond-key\n")
    port = free_port()
    command = [RUN, "--bundle", BUNDLE, "--port", str(port), "--log", "warn", "--api-key-file", str(keys)]
    process = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                assert httpx.get(url + "/health").status_code == 200
                if httpx.get(url + "/ready", headers={"authorization": "Bearer first-key"}).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert httpx.get(url + "/ready").status_code == 401
        for key in ("first-key", "second-key"):
            client = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
            model = client.models.list().data[0].id
            client.completions.create(model=model, prompt="x", max_tokens=1)
            claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
            claude.messages.create(model=model, messages=[{"role": "user", "content": "x"}], max_tokens=1)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url + "/v1", api_key="third-key", max_retries=0).models.list()
        with pytest.raises(anthropic.AuthenticationError):
            claude = anthropic.Anthropic(base_url=url, api_key="third-key", max_retries=0)
            claude.messages.create(model=model, messages=[{"role": "user", "content": "x"}], max_tokens=1)
    finally:
        process.kill()


def test_names_origins_and_metrics_by_flag():
    flags = ("--served-model-name", "mine,other", "--allowed-origins", "https://a.example", "--metrics-prefix", "vllm")
    with server(*flags) as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["mine", "other"]
        assert client.completions.create(model="other", prompt="x", max_tokens=1).model == "other"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="third", prompt="x", max_tokens=1)
        origin = {"origin": "https://a.example"}
        assert httpx.get(url + "/health", headers=origin).headers["access-control-allow-origin"] == "https://a.example"
        text = httpx.get(url + "/metrics").text
        for name in METRICS:
            assert f"\nvllm:{name}" in text, name
    with server("--any-model-name") as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        client.completions.create(model="whatever", prompt="x", max_tokens=1)


def test_a_unix_socket(tmp_path):
    path = str(tmp_path / "socket")
    process = subprocess.Popen([RUN, "--bundle", BUNDLE, "--log", "warn", "--uds", path])
    try:
        http = httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=60)
        deadline = time.monotonic() + 60
        while True:
            try:
                if http.get("http://vt/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client = openai.OpenAI(base_url="http://vt/v1", api_key="none", max_retries=0, http_client=http)
        model = client.models.list().data[0].id
        stream = client.completions.create(model=model, prompt="x", max_tokens=3, stream=True)
        assert list(stream)[-1].choices[0].finish_reason
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert not os.path.exists(path)
    finally:
        process.kill()


def test_the_llama_dialect_of_calls(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(LLAMA_TEMPLATE)
    parameters = {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Bern"]}}, "required": ["city"], "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": parameters}}]
    with server("--chat-template", str(template)) as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        options = dict(
            model=client.models.list().data[0].id, messages=[{"role": "user", "content": "Oslo?"}], tools=tools,
            tool_choice="required", temperature=0, max_tokens=80, parallel_tool_calls=False,
        )
        rendered = httpx.post(url + "/tokenize", json={k: v for k, v in options.items() if k in ("messages", "tools")}).json()
        text = httpx.post(url + "/detokenize", json={"tokens": rendered["tokens"]}).json()["prompt"]
        assert "Environment: ipython" in text and '"name": "weather"' in text
        choice = client.chat.completions.create(**options).choices[0]
        call = choice.message.tool_calls[0].function
        assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Oslo", "Bern")
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        chunks = list(client.chat.completions.create(**options, stream=True))
        arguments = "".join(c.function.arguments for k in chunks for c in k.choices[0].delta.tool_calls or [])
        assert json.loads(arguments) == json.loads(call.arguments)


def test_readiness_tells_how_far_loading_is():
    with server(ready=False) as (url, process):
        seen = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                reply = httpx.get(url + "/ready")
            except httpx.TransportError:
                continue
            if reply.status_code == 200:
                break
            seen.append(reply.json())
            assert httpx.get(url + "/health").status_code == 200
        assert reply.status_code == 200 and process.poll() is None
        for state in seen:
            assert state["status"] == "loading" and 0 <= state["bytes_done"] <= max(state["bytes_total"], state["bytes_done"])


def test_the_head_of_a_request_is_bounded():
    with server() as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as stream:
            stream.settimeout(30)
            try:
                stream.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 200_000 + b"\r\n\r\n")
                reply = stream.recv(1000)
            except ConnectionError:
                reply = b""
            assert reply == b"" or b" 431 " in reply.split(b"\r\n")[0], reply
        assert httpx.get(url + "/health").status_code == 200


def test_a_prefix_of_4000_tokens_makes_the_second_request_quick():
    with server("--max-num-seqs", "2") as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300)
        model = client.models.list().data[0]
        length = min(4000, model.max_model_len - 64)
        if length < 4000:
            pytest.skip("the model's context is too short")
        prefix = [100 + i * 37 % 100 for i in range(length)]

        def first_token(prompt):
            started = time.monotonic()
            stream = client.completions.create(
                model=model.id, prompt=prompt, max_tokens=2, temperature=0, stream=True, stream_options={"include_usage": True}
            )
            seconds = None
            for chunk in stream:
                seconds = seconds or time.monotonic() - started
            return seconds, chunk.usage.prompt_tokens_details.cached_tokens

        cold, cached = first_token(prefix + [101, 102, 103])
        assert cached == 0
        warm, cached = first_token(prefix + [104, 105])
        print(f"first token: {cold:.3f} s cold, {warm:.3f} s with {cached} tokens cached")
        assert cached >= length - 16
        assert warm < 0.2 * cold


def test_more_at_once_than_fit_the_queue():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    body = json.dumps({"prompt": "sea", "max_tokens": 2}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    outcomes, told = {}, []

    def anonymous_mib(process):
        with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024

    async def one(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = time.monotonic()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        outcomes[status] = outcomes.get(status, 0) + 1
        if status == 429:
            assert b"retry-after: " in head and b"connection: close" in head
            told.append(time.monotonic() - sent)
        return writer

    async def burst(port):
        # All connections stay open until the last has its answer.
        writers = await asyncio.gather(*(one(port) for _ in range(count)))
        for writer in writers:
            writer.close()

    # A small cache, so that memory is that of the connections.
    flags = ("--max-queue", "256", "--max-num-seqs", "4", "--max-model-len", "64", "--kv-cache-memory-bytes", "33554432")
    with server(*flags) as (url, process):
        port = int(url.rsplit(":", 1)[1])
        httpx.post(url + "/v1/completions", content=body)
        before = anonymous_mib(process)
        asyncio.run(burst(port))
        grown = anonymous_mib(process) - before
        median = sorted(told)[len(told) // 2] * 1e3
        print(f"{count} at once: {outcomes}, {grown:.0f} MiB more, told to wait after {median:.0f} ms (median)")
        # Most are refused as soon as their head is there; some have to wait for a processor in between.
        page = httpx.get(url + "/metrics").text
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("vt:request_refusal_time_seconds_")]
        refused = {name: float(value) for name, value in lines}
        assert refused["vt:request_refusal_time_seconds_count"] == outcomes[429]
        assert refused['vt:request_refusal_time_seconds_bucket{le="0.001"}'] > outcomes[429] / 2
        assert set(outcomes) == {200, 429} and sum(outcomes.values()) == count
        assert outcomes[200] >= 256
        assert grown < 400
        assert httpx.post(url + "/v1/completions", content=body).status_code == 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_every_stream_ends_when_the_server_is_told_to_stop():
    ends, started = [], threading.Barrier(9)

    def stream_to_the_end(url, room):
        body = {"prompt": "Once", "max_tokens": room, "ignore_eos": True, "stream": True}
        waiting = True
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as reply:
            reason, done = None, False
            for line in reply.iter_lines():
                if waiting and line.startswith("data: {"):
                    waiting = False
                    started.wait()
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: {"):
                    reason = json.loads(line[6:])["choices"][0]["finish_reason"] or reason
        ends.append((reason, done))

    with server("--shutdown-timeout", "1", "--max-num-seqs", "8") as (url, process):
        room = min(4000, httpx.get(url + "/v1/models").json()["data"][0]["max_model_len"] - 16)
        threads = [threading.Thread(target=stream_to_the_end, args=(url, room)) for _ in range(8)]
        for thread in threads:
            thread.start()
        started.wait(timeout=60)
        told = time.monotonic()
        process.send_signal(signal.SIGTERM)
        for method, path in (("GET", "/ready"), ("POST", "/v1/completions")):
            try:
                assert httpx.request(method, url + path, json={"prompt": "x"}).status_code == 503
            except httpx.ConnectError:
                # All streams have ended already, and the server with them.
                pass
        assert process.wait(timeout=60) == 0
        seconds = time.monotonic() - told
        for thread in threads:
            thread.join(timeout=10)
    assert len(ends) == 8 and all(done and reason in ("abort", "length") for reason, done in ends), ends
    assert seconds < 1 + 10, seconds


@pytest.mark.context(2048)
def test_deterministic_texts_do_not_depend_on_the_cache():
    """What an answer left in the cache is, to the bit, what a prompt with the same tokens would have put there."""
    with server("--deterministic") as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)
        model = client.models.list().data[0].id
        ids = httpx.post(url + "/tokenize", json={"prompt": "The river was wide and slow, and"}).json()["tokens"]
        options = dict(model=model, temperature=0, logprobs=1)
        answer = client.completions.create(prompt=ids, max_tokens=48, **options, extra_body={"ignore_eos": True}).choices[0]
        said = httpx.post(url + "/tokenize", json={"prompt": answer.text, "add_special_tokens": False}).json()["tokens"]
        prompt = ids + said[:40]

        def go_on(**extra):
            reply = client.completions.create(prompt=prompt, max_tokens=12, **options, extra_body={"ignore_eos": True, **extra})
            choice = reply.choices[0]
            return choice.text, choice.logprobs.token_logprobs, reply.usage.prompt_tokens_details.cached_tokens

        cached, fresh = go_on(), go_on(cache_salt="fresh")
        assert cached[2] > len(ids) and fresh[2] == 0
        assert cached[:2] == fresh[:2]

        async def beside_others():
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as session:
                others = [session.completions.create(model=model, prompt=[300 + i] * (20 * i + 1), max_tokens=20) for i in range(5)]
                own = session.completions.create(
                    prompt=prompt, max_tokens=12, **options, extra_body={"ignore_eos": True, "cache_salt": "beside"}
                )
                return (await asyncio.gather(own, *others))[0].choices[0]

        beside = asyncio.run(beside_others())
        assert (beside.text, beside.logprobs.token_logprobs) == fresh[:2]
