"""`vt-run bench` and `vt-run chat`, as a user runs them."""

import json
import os
import signal
import subprocess

import pytest

RUN, BUNDLE = os.environ.get("VT_RUN"), os.environ.get("VT_BUNDLE")
pytestmark = pytest.mark.skipif(not RUN or not BUNDLE, reason="set VT_RUN and VT_BUNDLE")


def environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("VT_")}


def bench(*arguments):
    command = [RUN, "bench", "--json", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    return ran.returncode, json.loads(ran.stdout) if ran.stdout else ran.stderr


def test_a_server_is_measured(base_url):
    code, report = bench(
        "--url", base_url, "--concurrency", "1,6", "--requests", "30", "--input-len", "2,20", "--output-len", "3,12",
        "--disconnect-fraction", "0.1", "--malformed-fraction", "0.1",
    )
    assert code == 0, report
    for load, at_once in zip(report["loads"], (1, 6)):
        assert load["concurrency"] == at_once
        assert load["errors"] == {}
        assert load["finished"] + load["left"] + load["refused"] == 30
        assert load["finished"] > 10
        assert 3 * load["finished"] <= load["output_tokens"] <= 12 * load["finished"]
        assert load["first_token"]["p50"] <= load["first_token"]["p99"]
        assert load["between_tokens"]["count"] > 0
    assert set(report["left_over"].values()) == {0.0}


def test_a_server_that_is_not_there_is_an_error():
    code, message = bench("--url", "http://127.0.0.1:1")
    assert code == 2 and "connect" in message
    code, report = bench("--url", "http://127.0.0.1:1", "--model", "m", "--concurrency", "1", "--requests", "2")
    assert code == 1
    (kind,) = report["loads"][0]["errors"]
    assert kind.startswith("connect")


def test_the_engine_is_measured_in_process():
    code, report = bench("--bundle", BUNDLE, "--concurrency", "2", "--requests", "4", "--input-len", "16", "--output-len", "6")
    assert code == 0, report
    (load,) = report["loads"]
    assert load["finished"] == 4 and load["output_tokens"] == 24
    assert load["prefill_tokens_per_second"] > 0 and load["decode_tokens_per_second"] > 0


def chat(*arguments):
    return subprocess.Popen(
        [RUN, "chat", "--bundle", BUNDLE, "--temperature", "0", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )


def test_a_conversation_has_a_history_that_can_be_forgotten():
    flags = ("--max-tokens", "6", "--system", "Answer briefly.")
    alone, errors = chat(*flags).communicate(b"Name a river.\n", timeout=120)
    assert alone.endswith(b"\n"), errors
    process = chat(*flags)
    # The same question alone, and alone again after another.
    said, errors = process.communicate(b"Name a river.\nAnd another.\n/reset\nName a river.\n/nothing\n", timeout=120)
    assert process.returncode == 0, errors
    assert said.startswith(alone) and said.endswith(alone) and len(said) > 2 * len(alone)
    assert b"/nothing is not known" in errors


def test_an_answer_can_be_interrupted_and_the_program_goes_on():
    process = chat()
    process.stdin.write(b"Write a very long story about the sea.\n")
    process.stdin.flush()
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(b"/reset\nSay one word.\n/exit\n", timeout=120)
    assert process.returncode == 0, errors
    assert first and said.count(b"\n") >= 2
    if b"[interrupted]" not in errors:
        pytest.skip("the model had answered before it could be interrupted")
