"""The server under test: one that runs already, or one that is started here.

VT_TEST_URL   a running server, such as http://127.0.0.1:8000
VT_RUN        the vt-run binary, together with
VT_BUNDLE     a bundle to serve; the server is started on a free port and stopped at the end
VT_RUN_ARGS   further arguments for the binary
"""

import os
import shlex
import signal
import socket
import subprocess
import time

import httpx
import openai
import pytest

START_SECONDS = 120


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(url, process):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            pytest.exit(f"the server ended with {process.returncode} before it was ready", 1)
        try:
            if httpx.get(url + "/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    pytest.exit("the server was not ready in time", 1)


@pytest.fixture(scope="session")
def base_url():
    if url := os.environ.get("VT_TEST_URL"):
        wait_until_ready(url.rstrip("/"), None)
        yield url.rstrip("/")
        return
    binary, bundle = os.environ.get("VT_RUN"), os.environ.get("VT_BUNDLE")
    if not binary or not bundle:
        pytest.skip("set VT_TEST_URL, or VT_RUN and VT_BUNDLE", allow_module_level=True)
    port = free_port()
    arguments = shlex.split(os.environ.get("VT_RUN_ARGS", ""))
    process = subprocess.Popen([binary, "--bundle", bundle, "--port", str(port), *arguments])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def pytest_configure(config):
    config.addinivalue_line("markers", "context(tokens): needs a model with a context of so many tokens")


@pytest.fixture(autouse=True)
def enough_context(request):
    if marker := request.node.get_closest_marker("context"):
        (needed,) = marker.args
        models = httpx.get(request.getfixturevalue("base_url") + "/v1/models").json()["data"]
        if models[0]["max_model_len"] < needed:
            pytest.skip(f"needs a context of {needed} tokens")


@pytest.fixture(scope="session")
def client(base_url):
    return openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def async_client(base_url):
    def make():
        return openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0, timeout=120)

    return make


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def http(base_url):
    with httpx.Client(base_url=base_url, timeout=120) as session:
        yield session
