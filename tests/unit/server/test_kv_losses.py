"""What answers tell of keys and values that are not exact, and what a request may ask of them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import requests

from headway.config.kv_keep import count_kept_tokens
from headway.config.kv_layers import mean_kept_tokens
from headway.config.kv_read import tokens_read
from headway.config.options import EngineOptions
from headway.engine.process import ready_message
from headway.gateway.ask import client_headers
from headway.planning import plan_settings
from headway.server.models import ServedModel
from headway.spec.embedded import model_folder
from in_process import InProcess, fake_engine

MESSAGES = [{"role": "user", "content": "hello " * 30}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello " * 30, "max_tokens": 2},
    "/v1/responses": {"input": "hello " * 30, "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}
NARROW = [(0, 20), (0, 0), (16, 12)]
"""Layer 0 is narrowed to 20 tokens, layer 1 whole, layer 2 sees 12 of its own window's 16."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    opened = InProcess(tmp_path_factory.mktemp("kv"))
    try:
        yield opened
    finally:
        opened.close()


def held(server: InProcess, kv_dtype: str = "float32", **changes: Any) -> ServedModel:
    """The server's model, as its engine tells of its KV."""
    model = server.state.rows[0]
    client: Any = model.client
    client.info = msgspec.structs.replace(client.info, kv_dtype=kv_dtype, **changes)
    return model


def ask(server: InProcess, path: str, **fields: Any) -> requests.Response:
    body = {"model": "tiny", **BODIES[path], **fields}
    return requests.post(server.url + path, json=body, timeout=60)


def kept(answer: dict[str, Any]) -> tuple[int | None, int]:
    """(prompt tokens that are kept, prompt tokens) of an answer in any dialect."""
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    prompt = usage.get("prompt_tokens") or usage["input_tokens"]
    prompt += usage.get("cache_read_input_tokens", 0)
    return details.get("kept_tokens", usage.get("kept_input_tokens")), prompt


@pytest.mark.parametrize("path", BODIES)
def test_exact_kv_has_no_header(server: InProcess, path: str):
    held(server, narrowed=[])
    answer = ask(server, path, kv="exact")
    assert answer.status_code == 200 and "x-headway-kv" not in answer.headers
    assert kept(answer.json())[0] is None


@pytest.mark.parametrize("path", BODIES)
def test_windows_are_in_header_and_usage(server: InProcess, path: str):
    """Layer 1 keeps all n tokens, layer 0 20 of them, layer 2 12 of the 16 that it saw."""
    held(server, narrowed=NARROW)
    answer = ask(server, path, kv="windows")
    assert answer.status_code == 200 and answer.headers["x-headway-kv"] == "windows"
    told, n = kept(answer.json())
    assert n > 20 and told == round(n * (20 + n + 12) / (n + n + 16))
    held(server, "int8", narrowed=NARROW)
    both = ask(server, path, kv="int8")
    assert both.headers["x-headway-kv"] == "windows, int8" and kept(both.json())[0] == told
    held(server, "int4/int8", narrowed=[])
    assert ask(server, path, kv="int4/int8").headers["x-headway-kv"] == "int4/int8"


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}),
        (
            "/v1/completions",
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
    ],
)
def test_a_stream_tells_the_same(server: InProcess, path: str, options: dict[str, Any]):
    held(server, narrowed=NARROW)
    whole = kept(ask(server, path).json())
    answer = ask(server, path, stream=True, **options)
    assert answer.headers["x-headway-kv"] == "windows"
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    told = [kept(event) for event in map(json.loads, events) if event.get("usage")]
    assert told and set(told) == {whole}


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_held_is_refused_by_name(server: InProcess, path: str):
    """Exact where the server is not, less where it is exact, and what nobody holds."""
    for kv_dtype, narrowed, asked, word in (
        ("float32", NARROW, "exact", "keys and values are: windows"),
        ("int8", [], "exact", "are: int8"),
        ("float32", [], "windows", "are: exact"),
        ("int8", NARROW, "int4", "are: windows, int8"),
        ("int8/int4", [], "int4/int8", "are: int8/int4"),
    ):
        held(server, kv_dtype, narrowed=narrowed)
        answer = ask(server, path, kv=asked)
        error = answer.json()["error"]
        assert answer.status_code == 400 and word in error["message"]
        if "code" in error:
            assert (error["code"], error["param"]) == ("kv_not_held", "kv")
    answer = ask(server, path, kv="less")
    assert answer.status_code == 400 and "it is one of exact" in answer.json()["error"]["message"]


READS: dict[str, Any] = {"bounded": [False, True, True], "kv_read": 0.25, "block_size": 4}
"""Layers 1 and 2 choose a quarter of their blocks of 4."""


def read_of(answer: dict[str, Any]) -> int | None:
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    count: int | None = details.get("read_tokens", usage.get("read_input_tokens"))
    return count


@pytest.mark.parametrize("path", BODIES)
def test_the_share_that_is_read_is_reported_and_may_be_set(server: InProcess, path: str):
    """The server's by default, more where a request asks, all where it must be exact."""
    held(server, narrowed=[], **READS)
    answer = ask(server, path)
    n = kept(answer.json())[1]
    assert answer.headers["x-headway-kv"] == "read=0.25"
    assert kept(answer.json())[0] is None and read_of(answer.json()) == tokens_read(
        n, 0.25, 4, [0, -1, -1]
    )
    half = ask(server, path, kv={"read": 0.5})
    assert half.headers["x-headway-kv"] == "read=0.5"
    assert read_of(half.json()) == tokens_read(n, 0.5, 4, [0, -1, -1])
    assert ask(server, path, kv="read").headers["x-headway-kv"] == "read=0.25"
    for whole in ({"read": 1}, "exact"):
        exact = ask(server, path, kv=whole)
        assert exact.status_code == 200 and "x-headway-kv" not in exact.headers
        assert read_of(exact.json()) is None
    held(server, "int8", narrowed=NARROW, **READS)
    both = ask(server, path)
    assert both.headers["x-headway-kv"] == "windows, read=0.25, int8"


@pytest.mark.parametrize("path", BODIES)
def test_a_share_that_is_not_held_is_refused_by_name(server: InProcess, path: str):
    """Less than the server's, none that it could choose, what is no share, what nobody knows."""
    held(server, narrowed=[], **READS)
    for asked, word in (
        ({"read": 0.1}, "read 0.25 of their context or more"),
        ({"read": 2}, "maximum is 1"),
        ({"read": "25%"}, "kv.read"),
        ({"reads": 0.5}, "reads"),
        ("windows", "are: read"),
    ):
        answer = ask(server, path, kv=asked)
        assert answer.status_code == 400 and word in answer.json()["error"]["message"], asked
    held(server, narrowed=[], bounded=[], kv_read=1.0)
    answer = ask(server, path, kv={"read": 0.5})
    assert answer.status_code == 400 and "read 1 of their" in answer.json()["error"]["message"]
    assert ask(server, path, kv={}).status_code == 200


KEEPS: dict[str, Any] = {"chooses": [False, True, True], "kv_keep": 0.25, "block_size": 4}
"""Layers 1 and 2 keep a quarter of a prompt, in blocks of 4."""
LONG = "hello there " * 60


@pytest.mark.parametrize("path", BODIES)
def test_the_share_that_is_kept_is_reported_and_may_be_set(server: InProcess, path: str):
    """The server's by default, more where a request asks, all where it must be exact."""
    name = next(name for name in ("messages", "prompt", "input") if name in BODIES[path])
    long = {name: [{"role": "user", "content": LONG}] if name == "messages" else LONG}
    held(server, narrowed=[], bounded=[], kv_read=1.0, **KEEPS)
    answer = ask(server, path, **long)
    told, n = kept(answer.json())
    assert answer.headers["x-headway-kv"] == "keep=0.25" and n > 200
    assert told == round(n * (n + 2 * count_kept_tokens(0.25, n, 4)) / (3 * n))
    half = ask(server, path, kv={"keep": 0.5}, **long)
    assert half.headers["x-headway-kv"] == "keep=0.5"
    assert kept(half.json())[0] == round(n * (n + 2 * count_kept_tokens(0.5, n, 4)) / (3 * n))
    assert ask(server, path, kv="keep").headers["x-headway-kv"] == "keep=0.25"
    for whole in ({"keep": 1}, "exact"):
        exact = ask(server, path, kv=whole)
        assert exact.status_code == 200 and "x-headway-kv" not in exact.headers
        assert kept(exact.json())[0] is None
    held(server, "int8", narrowed=NARROW, **{**KEEPS, "chooses": [False, True, False]})
    both = ask(server, path, **long)
    assert both.headers["x-headway-kv"] == "windows, keep=0.25, int8"
    expected = round(n * (20 + count_kept_tokens(0.25, n, 4) + 12) / (n + n + 16))
    assert kept(both.json())[0] == expected
    for asked, word in (
        ({"keep": 0.1}, "keep 0.25 of their tokens or more"),
        ({"keep": 0}, "kv.keep is 0"),
        ({"keep": "all"}, "kv.keep"),
        ({"read": 0.5}, "read 1 of their context"),
        ({"keep": 0.5, "method": "keydiff"}, "method"),
    ):
        refused = ask(server, path, kv=asked)
        assert refused.status_code == 400 and word in refused.json()["error"]["message"], asked
    held(server, narrowed=[], chooses=[], kv_keep=1.0)
    refused = ask(server, path, kv={"keep": 0.5})
    assert refused.status_code == 400 and "keep 1 of their" in refused.json()["error"]["message"]


def test_a_prompt_shorter_than_every_window_is_kept_whole():
    assert [mean_kept_tokens(n, NARROW) for n in (0, 1, 12)] == [0, 1, 12]
    assert mean_kept_tokens(1000, [(0, 0), (0, 68)]) == 534


def test_what_a_file_narrows_narrowed_the_settings(tmp_path: Path):
    """A window and its sinks count; the model's own windows and an empty option do not."""
    path = tmp_path / "kv.yaml"
    path.write_text("layers: {0: {window: 64, sinks: 4}, 3: {window: 128}}")
    options = EngineOptions(kv_layers=str(path), device="cpu")
    _, settings, _, _ = plan_settings(model_folder(None), options)
    assert settings.cache.narrowed == ((0, 68), (0, 0), (0, 0), (0, 128), (0, 0), (0, 0))
    assert plan_settings(model_folder(None), EngineOptions(device="cpu"))[1].cache.narrowed == ()


def test_the_engine_tells_the_server():
    engine = fake_engine(64)
    cache = replace(engine.settings.cache, narrowed=((0, 68), (0, 0)))
    engine.settings = replace(engine.settings, cache=cache)
    assert ready_message(engine).narrowed == [(0, 68), (0, 0)]


def test_a_gateway_passes_it_on_from_servers_of_ours():
    answer: Any = SimpleNamespace(headers={"x-headway-kv": "windows, int8", "server": "other"})
    ours, theirs = (SimpleNamespace(is_headway=one) for one in (True, False))
    assert client_headers(answer, ours) == [(b"x-headway-kv", b"windows, int8")]  # type: ignore[arg-type]
    assert client_headers(answer, theirs) == []  # type: ignore[arg-type]
