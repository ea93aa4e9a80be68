"""The engine process dies or falls silent: its requests go on in the next one."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import openai
import pytest
from live_server import NO_TORCH, Hold, LiveServer, alive, engines, wait_until
from streams import Reader, open_streams

from conftest import StartServer

NUM_STREAMS = 20


async def in_thread(condition: object) -> object:
    """Wait for a condition without holding up the event loop."""
    return await asyncio.to_thread(wait_until, condition)  # type: ignore[arg-type]


def restarted(live: LiveServer) -> bool:
    return live.metric("engine_restarts_total") == 1 and live.is_ready()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_streams_go_on_in_another_engine(
    start_server: StartServer, server: LiveServer, number: signal.Signals
) -> None:
    """Whole answers and streams, greedy and seeded: the tokens of an undisturbed server."""
    live = start_server("--served-model-name=tiny").wait_ready()
    engine, tokens = live.engine_pid(), live.probe()
    body = {"model": "tiny", "prompt": [5] * 3, "n": 4, "max_tokens": 400, "ignore_eos": True,
            "seed": 3, "temperature": 1, "return_token_ids": True}  # fmt: skip
    async with aiohttp.ClientSession(live.url) as http:
        whole = asyncio.create_task(http.post("/v1/completions", json=body))
        readers, ended = await open_streams(http, "tiny", NUM_STREAMS)
        os.kill(engine, number)
        for reader in await ended:
            assert reader.status == 200 and reader.complete, reader.events[-1]
        async with await whole as answer:
            assert answer.status == 200
            choices = (await answer.json())["choices"]
    assert live.metric("engine_restarts_total") == 1
    assert live.engine_pid() != engine and not alive(engine)
    await in_thread(live.idle)
    assert live.probe() == tokens
    undisturbed = server.post("/v1/completions", body)[1]["choices"]
    assert [c["token_ids"] for c in choices] == [c["token_ids"] for c in undisturbed]
    for reader in readers[::7]:
        assert reader.token_ids == await alone(server, reader)


async def alone(live: LiveServer, reader: Reader) -> list[int]:
    """What the same stream gets from a server that nobody disturbs."""
    async with aiohttp.ClientSession(live.url) as http:
        return (await reader.again(http).read()).token_ids


async def test_the_official_client_sees_no_more_than_a_pause(
    start_server: StartServer, hold: Hold
) -> None:
    live = start_server(env=hold.env).wait_ready()
    model, engine = live.model, live.engine_pid()
    async with openai.AsyncOpenAI(
        base_url=live.url + "/v1", api_key="none", max_retries=0
    ) as client:
        stream = await client.completions.create(
            model=model, prompt=[5], max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(stream)
        hold.on()
        os.kill(engine, signal.SIGKILL)
        rest = asyncio.create_task(last_reason(stream))
        await in_thread(lambda: not live.is_ready())
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model=model, prompt=[5])
        assert refused.value.status_code == 503 and refused.value.code == "not_ready"
        hold.off()
        assert await rest == "length"
    await in_thread(live.is_ready)


async def last_reason(stream: openai.AsyncStream) -> str | None:
    """The finish reason a stream ends with."""
    return [chunk.choices[0].finish_reason async for chunk in stream][-1]


def test_a_dead_idle_engine_is_noticed_and_requests_meanwhile_get_a_503(
    start_server: StartServer, hold: Hold
) -> None:
    """Who comes before the death is noticed waits for the next engine; who comes then is told."""
    live = start_server(NO_TORCH, env=hold.env).wait_ready()
    body = {"model": live.model, "prompt": [5], "max_tokens": 2}
    hold.on()
    os.kill(live.engine_pid(), signal.SIGKILL)
    with ThreadPoolExecutor(max_workers=50) as pool:
        asked = []
        while not restarted(live):
            asked.append(pool.submit(live.post, "/v1/completions", body))
            time.sleep(0.05)
            if any(one.done() and one.result()[0] == 503 for one in asked):
                hold.off()
        answers = [one.result() for one in asked]
    assert {status for status, _ in answers} <= {200, 503}
    codes = {answer["error"]["code"] for status, answer in answers if status == 503}
    assert codes == {"not_ready"}
    assert live.post("/v1/completions", body)[0] == 200
    assert "Traceback" not in live.stderr


def cut(path: Path) -> None:
    """As a copy that was interrupted leaves it."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def put_another(path: Path) -> None:
    """Weights of the same names and shapes, which are others."""
    data = bytearray(path.read_bytes())
    data[-2000:] = bytes(2000)
    other = path.with_suffix(".new")
    other.write_bytes(data)
    other.replace(path)


def widen(path: Path) -> None:
    """A config of another model beside the weights."""
    config = path.with_name("config.json")
    other = json.loads(config.read_text())
    config.write_text(json.dumps(other | {"num_hidden_layers": other["num_hidden_layers"] + 1}))


def replace_folder(path: Path) -> None:
    """Another model's folder under the same name."""
    folder = path.parent
    folder.rename(folder.with_name("old"))
    shutil.copytree(folder.with_name("old"), folder)
    put_another(path)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (widen, "does not fit its config.json"),
        (replace_folder, "not those that the server started with"),
        (cut, "model.safetensors should hold"),
        (put_another, "not those that the server started with"),
    ],
)
async def test_weights_that_are_spoiled_at_a_restart_are_told(
    start_server: StartServer,
    tiny_model: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    told: str,
) -> None:
    """No loop of restarts, no other model behind the same name: the server says so and is 503."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    live = start_server(folder=folder).wait_ready()
    model, engine = live.model, live.engine_pid()
    async with openai.AsyncOpenAI(
        base_url=live.url + "/v1", api_key="none", max_retries=0
    ) as client:
        stream = await client.completions.create(
            model=model, prompt=[5], max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(stream)
        os.kill(engine, signal.SIGSTOP)
        spoil(folder / "model.safetensors")
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(openai.APIError) as ended:
            async for _ in stream:
                pass
    assert ended.value.code == "engine_failed"
    await in_thread(lambda: b"failed" in live.get("/ready")[1])
    assert live.get("/ready")[0] == 503 and live.get("/health")[0] == 200
    status, answer = live.post("/v1/completions", {"model": model, "prompt": [5]})
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert told in live.stderr and "Traceback" not in live.stderr
    assert live.metric("engine_restarts_total") + live.metric("engine_restarts") <= 2
    assert engines(live.pid) == []
    live.signal(signal.SIGTERM)
    assert live.wait_end() == 0


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
