"""The engine process dies or falls silent: every stream says so, and the server serves again."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import aiohttp
import openai
import pytest
from live_server import NO_TORCH, LiveServer, alive, wait_until
from streams import open_streams

from conftest import StartServer

NUM_STREAMS = 20


async def in_thread(condition: object) -> object:
    """Wait for a condition without holding up the event loop."""
    return await asyncio.to_thread(wait_until, condition)  # type: ignore[arg-type]


def restarted(live: LiveServer) -> bool:
    return live.metric("engine_restarts_total") == 1 and live.is_ready()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_streams_end_with_an_error_and_the_server_comes_back(
    start_server: StartServer, number: signal.Signals
) -> None:
    live = start_server().wait_ready()
    engine, tokens, model = live.engine_pid(), live.probe(), live.model
    async with aiohttp.ClientSession(live.url) as http:
        whole = asyncio.create_task(
            http.post("/v1/completions", json={"model": model, "prompt": [5] * 3, "n": 16,
                                               "max_tokens": 500, "ignore_eos": True})
        )  # fmt: skip
        _, ended = await open_streams(http, model, NUM_STREAMS)
        os.kill(engine, number)
        for reader in await ended:
            assert reader.status == 200
            assert reader.error.get("code") == "engine_died", reader.events[-1]
            assert reader.error["type"] == "server_error"
        async with await whole as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (503, "engine_died")
            assert int(answer.headers["retry-after"]) >= 1
    assert live.get("/health")[0] == 200
    await in_thread(lambda: restarted(live))
    assert live.engine_pid() != engine and not alive(engine)
    assert live.idle()
    assert live.probe() == tokens
    assert live.process.poll() is None


async def test_the_official_client_sees_the_error(start_server: StartServer) -> None:
    live = start_server().wait_ready()
    model, engine = live.model, live.engine_pid()
    async with openai.AsyncOpenAI(
        base_url=live.url + "/v1", api_key="none", max_retries=0
    ) as client:
        stream = await client.completions.create(
            model=model, prompt=[5], max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(stream)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine stopped"):
            _ = [chunk async for chunk in stream]
        await stream.close()
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model=model, prompt=[5])
        assert refused.value.status_code == 503 and refused.value.code == "not_ready"
    status, _ = live.get("/ready")
    assert status == 503
    await in_thread(live.is_ready)


def test_a_dead_idle_engine_is_noticed_and_requests_meanwhile_get_a_503(
    start_server: StartServer,
) -> None:
    live = start_server(NO_TORCH).wait_ready()
    body = {"model": live.model, "prompt": [5], "max_tokens": 2}
    os.kill(live.engine_pid(), signal.SIGKILL)
    codes = set()
    while not restarted(live):
        status, answer = live.post("/v1/completions", body)
        assert status in (200, 503), answer
        codes.add(answer["error"]["code"] if status == 503 else "")
    assert codes - {""} <= {"engine_died", "not_ready"} and "not_ready" in codes
    assert live.post("/v1/completions", body)[0] == 200
    assert "Traceback" not in live.stderr


def test_an_engine_that_cannot_start_again_is_told(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    live = start_server(NO_TORCH, folder=folder).wait_ready()
    model = live.model
    (folder / "config.json").unlink()
    os.kill(live.engine_pid(), signal.SIGKILL)
    wait_until(lambda: b"failed" in live.get("/ready")[1])
    status, answer = live.post("/v1/completions", {"model": model, "prompt": [5]})
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert live.get("/health")[0] == 200
    assert "no config.json" in live.stderr
    live.signal(signal.SIGTERM)
    assert live.wait_end() == 0
    assert list(live.sockets.iterdir()) == []
