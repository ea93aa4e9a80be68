"""A server whose model is computed by two ranks: asked, one rank killed, asked again, and ended."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import LiveServer, alive, children, wait_until

from parity.tiny import save, tiny_model

BODY = {"prompt": list(range(20, 60)), "temperature": 0, "ignore_eos": True}


@pytest.fixture(
    scope="module",
    params=[
        ("--tensor-parallel-size=2", "--sum-parts=2"),
        ("--pipeline-parallel-size=2",),
        ("--tensor-parallel-size=2", "--pipeline-parallel-size=2"),
        ("--decode-context-parallel-size=2",),
        pytest.param(
            ("--tensor-parallel-size=2", "--decode-context-parallel-size=2"),
            marks=pytest.mark.hardening,
        ),
    ],
    ids=["tensor", "pipeline", "both", "context", "tensor and context"],
)
def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """A tiny model of 8 query and 4 KV heads, 2 layers."""
    folder = save(tiny_model("llama"), tmp_path_factory.mktemp("models") / "cut")
    flags = ("--skip-tokenizer-init", *request.param)
    server = LiveServer(folder, "--kv-memory=16MiB", *flags, real=True)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def answer(live: LiveServer, num_tokens: int = 24) -> list[int]:
    body = BODY | {"model": live.model, "max_tokens": num_tokens, "return_token_ids": True}
    status, found = live.post("/v1/completions", body)
    assert status == 200, found
    return found["choices"][0]["token_ids"]


def test_a_killed_rank_is_replaced_with_its_engine(live: LiveServer):
    first = answer(live)
    (group,) = json.loads(live.get("/stats")[1])["now"]["kv_groups"]
    assert group["blocks_total"] > 100 and live.metric("engine_restarts_total") == 0
    engine = live.engine_pid()
    os.kill(children(engine)[-1], signal.SIGKILL)
    assert answer(live) == first
    assert live.metric("engine_restarts_total") == 1
    assert live.engine_pid() != engine and not alive(engine)
    assert "The engine ends and begins again, and its requests go on: " in live.stderr
    assert "Traceback" not in live.stderr
    assert " failed: " not in live.stderr


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.hardening), signal.SIGSTOP],
)
def test_an_answer_goes_on_where_a_rank_ends_in_its_midst(
    live: LiveServer, number: signal.Signals
) -> None:
    """The engine is replaced with its ranks; the client gets the tokens of an undisturbed answer,
    late."""
    undisturbed, restarts = answer(live, 270), live.metric("engine_restarts_total")
    engine = live.engine_pid()
    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(answer, live, 270)
        wait_until(lambda: live.metric("num_requests_running") == 1)
        os.kill(children(engine)[-1], number)
        assert not disturbed.done()
        assert disturbed.result(90) == undisturbed
    assert live.metric("engine_restarts_total") == restarts + 1
    assert live.engine_pid() != engine and not alive(engine)


def test_no_rank_outlives_its_server(live: LiveServer):
    answer(live)
    followers = children(live.engine_pid())
    live.close()
    wait_until(lambda: not any(map(alive, followers)))
