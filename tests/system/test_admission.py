"""Every limit of a real server through the official client: status, code, headers, metric.

The engine computes nothing. While requests have to wait for it it is stopped, so that they do
however fast the machine is; its server is told to bear with that.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from live_server import NO_TORCH, PATIENT, LiveServer, engines, started_at
from prometheus_client.parser import text_string_to_metric_families

from headway.edge.key_file import row_text

CLASSES = """
small: {limits: {max_prompt_tokens: 50, max_output_tokens: 8}}
single: {limits: {requests_at_once: 1}}
frugal: {limits: {tokens_per_minute: 100}}
narrow: {limits: {queue_requests: 1}}
hasty: {limits: {queue_seconds: 0.001}}
patient: {}
"""
LIMITS = "    limits: {queue_requests: 1, max_output_tokens: 9}\n"
PLAIN, IMPATIENT, OPERATOR = "key-of-anybody", "key-of-the-impatient", "key-of-the-operator"
SLOW = [5] * 400
"""A prompt of 200 steps of 10 ms."""
QUEUE = 6


@pytest.fixture(scope="module")
def house(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("admission")
    (folder / "classes.yaml").write_text(CLASSES)
    rows = row_text("plain", PLAIN) + row_text("impatient", IMPATIENT)
    (folder / "keys.yaml").write_text("keys:\n" + rows + LIMITS)
    live = LiveServer(
        tiny_model, NO_TORCH, "--kv-memory=64MiB", "--served-model-name=m", "--max-num-seqs=2",
        "--max-num-batched-tokens=2", f"--max-queue={QUEUE}", "--no-prefix-cache", PATIENT,
        f"--classes={folder / 'classes.yaml'}", f"--key-file={folder / 'keys.yaml'}",
        f"--api-key={OPERATOR}",
    )  # fmt: skip
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture
async def plain(house: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(house, PLAIN) as opened:
        yield opened


def client_of(live: LiveServer, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=live.url + "/v1", api_key=key, max_retries=0)


def told(live: LiveServer, path: str) -> bytes:
    """What it says to the operator's key."""
    asked = urllib.request.Request(live.url + path, headers={"authorization": f"Bearer {OPERATOR}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return bytes(answer.read())


def metric(live: LiveServer, name: str, **labels: str) -> float:
    """The sum of a metric's samples."""
    lines = told(live, "/metrics").decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [x for x in lines if x.startswith(f"headway:{name}") and all(w in x for w in wanted)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def rejections(live: LiveServer, reason: str) -> float:
    return metric(live, "admission_rejections_total", reason=reason)


async def ask(client: openai.AsyncOpenAI, row: str = "default", **fields: Any) -> Any:
    body = {"model": "m", "prompt": [5, 6], "max_tokens": 2, **fields}
    extra = {"service_class": row, "ignore_eos": True}
    return await client.completions.create(**body, extra_body=extra)


class Waiting:
    """The requests that the first engine of a server has, while it is stopped and when it goes."""

    def __init__(self, live: LiveServer) -> None:
        self.live = live
        self.pid = min(engines(live.pid), key=lambda pid: (started_at(pid), pid))

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def count(self) -> int:
        """How many are neither answered nor given up."""
        number: int = msgspec.json.decode(told(self.live, "/stats"))["now"]["num_requests"]
        return number

    async def reach(self, count: int, tasks: list[asyncio.Task[Any]]) -> None:
        """Wait until it has so many, none of which has been answered."""
        while await asyncio.to_thread(self.count) < count:
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def waiting(
    live: LiveServer, client: openai.AsyncOpenAI, count: int, **fields: Any
) -> AsyncIterator[Waiting]:
    """`count` requests that wait for their first token: their engine is stopped."""
    found = Waiting(live)
    found.stop()
    body = {"prompt": SLOW, **fields}
    tasks = [asyncio.create_task(ask(client, **body)) for _ in range(count)]
    try:
        await found.reach(count, tasks)
        yield found
    finally:
        found.go()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in ("running", "waiting"):
            while await asyncio.to_thread(metric, live, f"num_requests_{each}"):
                await asyncio.sleep(0.01)


# limit → (status, code, param): the table of docs/admission.md
LENGTHS = [
    ({"prompt": [5] * 51}, "max_prompt_tokens", "context_length_exceeded", "prompt"),
    ({"max_tokens": 9}, "max_output_tokens", "integer_above_max_value", "max_tokens"),
]


@pytest.mark.parametrize(("fields", "reason", "code", "param"), LENGTHS)
async def test_lengths(
    house: LiveServer, plain: openai.AsyncOpenAI, fields: dict[str, Any], reason: str, code: str,
    param: str,
) -> None:  # fmt: skip
    before = rejections(house, reason)
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(plain, "small", **fields)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert reason in refused.value.message
    assert rejections(house, reason) == before + 1
    await ask(plain, "small", prompt=[5] * 50, max_tokens=8)


async def test_an_answer_of_no_given_length_is_cut_to_the_limit(house: LiveServer) -> None:
    """The limit of a key, in chat and in a dialect whose clients always ask for much."""
    async with client_of(house, IMPATIENT) as client:
        messages: Any = [{"role": "user", "content": "hello"}]
        answer = await client.chat.completions.create(
            model="m", messages=messages, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 9
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="m", messages=messages, max_completion_tokens=10
            )
        assert refused.value.param == "max_completion_tokens"
        told: Any = await client.post(
            "/messages",
            body={"model": "m", "messages": messages, "max_tokens": 300, "ignore_eos": True},
            cast_to=object,
        )
        assert told["usage"]["output_tokens"] == 9


async def test_requests_at_once_of_each_user(house: LiveServer, plain: openai.AsyncOpenAI) -> None:
    async with (
        client_of(house, OPERATOR) as other,
        waiting(house, plain, 1, row="single") as held,
    ):
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(plain, "single")
        assert refused.value.code == "rate_limit_exceeded"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        held.go()
        await ask(other, "single")
    assert rejections(house, "requests_at_once") == 1


async def test_tokens_per_minute(house: LiveServer, plain: openai.AsyncOpenAI) -> None:
    """What a request may take is held, and what it did not take is given back."""
    raw = plain.completions.with_raw_response
    body: Any = {"model": "m", "prompt": [5] * 20, "extra_body": {"service_class": "frugal"}}
    answer = await raw.create(max_tokens=60, **body)
    assert answer.headers["x-ratelimit-limit-tokens"] == "100"
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= 100 - 20
    tries = [raw.create(max_tokens=60, **body) for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as refused:
        await asyncio.gather(*tries)
    headers = refused.value.response.headers
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(headers["retry-after"]) <= 120
    assert int(headers["x-ratelimit-remaining-tokens"]) < 80
    assert rejections(house, "tokens_per_minute") >= 1
    with pytest.raises(openai.BadRequestError) as never:
        await raw.create(max_tokens=81, **body)
    assert never.value.param == "max_tokens" and "100 tokens per minute" in never.value.message


async def test_many_answers_share_the_tokens_of_a_minute(house: LiveServer) -> None:
    async with client_of(house, OPERATOR) as client:
        with pytest.raises(openai.BadRequestError) as never:
            await ask(client, "frugal", prompt=[[5] * 10] * 5, max_tokens=9, n=2)
        assert never.value.code == "tokens_per_minute_exceeded"
        chat: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 4}
        extra = {"service_class": "frugal", "ignore_eos": True}
        answer = await client.chat.completions.create(**chat, extra_body=extra)
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        assert answer.usage is not None and 90 < answer.usage.total_tokens <= 100


def overloaded(refused: Any) -> None:
    error = refused.value
    assert (error.status_code, error.code, error.type) == (503, "overloaded", "server_error")
    assert 1 <= int(error.response.headers["retry-after"]) <= 120


async def test_a_full_queue(house: LiveServer, plain: openai.AsyncOpenAI) -> None:
    """Refused at once, while another user still finds a place; then all is as before."""
    before = rejections(house, "queue_requests")
    async with (
        client_of(house, OPERATOR) as other,
        waiting(house, plain, QUEUE, row="patient") as held,
    ):
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(plain)
        overloaded(refused)
        assert rejections(house, "queue_requests") == before + 1
        another = asyncio.create_task(ask(other))
        await held.reach(QUEUE + 1, [another])
        held.go()
        await another
    await ask(plain)


async def test_queues_of_a_class_and_a_key(house: LiveServer, plain: openai.AsyncOpenAI) -> None:
    async with client_of(house, IMPATIENT) as hurried:
        async with waiting(house, plain, 1, row="narrow"):
            with pytest.raises(openai.InternalServerError) as refused:
                await ask(hurried, "narrow")
            overloaded(refused)
        async with waiting(house, hurried, 1):
            with pytest.raises(openai.RateLimitError) as own:
                await ask(hurried)
            assert 1 <= int(own.value.response.headers["retry-after"]) <= 120
    assert rejections(house, "class_queue_requests") == 1
    assert rejections(house, "key_queue_requests") == 1


async def test_a_predicted_wait(house: LiveServer, plain: openai.AsyncOpenAI) -> None:
    await ask(plain, prompt=[5] * 40)
    await ask(plain, "hasty")
    async with waiting(house, plain, 3, row="patient"):
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(plain, "hasty", prompt=SLOW, timeout=60)
        overloaded(refused)
        assert "the maximum queue wait of 0.0 s" in refused.value.message
    assert rejections(house, "class_queue_seconds") == 1


async def test_requests_that_ask_for_no_objective_queue(tiny_model: Path) -> None:
    """10 prompts of 2 s wait for each other; what asks for an objective that it cannot have, or
    would wait for more than a minute, is refused at once."""
    live = LiveServer(
        tiny_model, NO_TORCH, "--kv-memory=64MiB", "--served-model-name=m", PATIENT,
        "--max-num-batched-tokens=2", "--no-prefix-cache",
    )  # fmt: skip
    try:
        live.wait_ready()
        async with client_of(live, "none") as client:
            await ask(client, prompt=[5] * 40)
            async with waiting(live, client, 10):
                hurried: Any = {"model": "m", "prompt": SLOW, "extra_body": {"slo": {"ttft": "3s"}}}
                tasks = [asyncio.create_task(client.completions.create(**hurried)) for _ in "1234"]
                done, pending = await asyncio.wait(
                    tasks, timeout=30, return_when=asyncio.FIRST_COMPLETED
                )
                for task in pending:
                    task.cancel()
                assert {getattr(task.exception(), "code", None) for task in done} == {"overloaded"}
                with pytest.raises(openai.InternalServerError) as refused:
                    await ask(client, prompt=[[5] * 450] * 20, timeout=30)
                overloaded(refused)
                assert "the maximum queue wait of 60.0 s" in refused.value.message
            await ask(client)
    finally:
        live.close()


async def test_a_queue_wait_of_the_options_holds_for_who_asks_for_no_objective(
    tiny_model: Path,
) -> None:
    """10 prompts of 2 s wait for each other, and none is answered before the engine runs."""
    live = LiveServer(
        tiny_model, NO_TORCH, "--kv-memory=64MiB", "--served-model-name=m", PATIENT,
        "--max-num-batched-tokens=2", "--no-prefix-cache", "--max-queue-wait=10m",
    )  # fmt: skip
    try:
        live.wait_ready()
        async with client_of(live, "none") as client:
            await ask(client, prompt=[5] * 40)
            async with waiting(live, client, 10):
                pass
            await ask(client)
    finally:
        live.close()


# ── the fallback ────────────────────────────────────────────────────────────────────────────────


FULL = (NO_TORCH, "--kv-memory=64MiB", "--served-model-name=m", "--max-queue=1",
        "--max-num-batched-tokens=1", "--no-prefix-cache", PATIENT)  # fmt: skip


@contextlib.asynccontextmanager
async def full(live: LiveServer) -> AsyncIterator[tuple[openai.AsyncOpenAI, Waiting]]:
    """A client of a server whose queue of one is taken, and who takes it."""
    async with client_of(live, "none") as client, waiting(live, client, 1) as held:
        yield client, held


async def texts(client: openai.AsyncOpenAI, model: str) -> tuple[str, str, Any]:
    """A whole answer, a streamed one, and the headers of the first."""
    body: Any = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
    body["extra_body"] = {"return_token_ids": True, "service_class": "interactive"}
    raw = await client.completions.with_raw_response.create(**body)
    whole = raw.parse()
    streamed: list[int] = []
    async for chunk in await client.completions.create(stream=True, **body):
        streamed += chunk.choices[0].model_extra["token_ids"] if chunk.choices else []
    ids = whole.choices[0].model_extra["token_ids"]
    assert len(ids) == 8
    return str(ids), str(streamed), (whole.model, raw.headers)


async def test_another_server_answers_what_would_be_refused(
    tiny_model: Path, server: LiveServer
) -> None:
    async with client_of(server, "none") as direct:
        expected, _, _ = await texts(direct, "nickname")
    live = LiveServer(tiny_model, *FULL, f"--fallback-model=nickname={server.url}/v1")
    try:
        live.wait_ready()
        async with full(live) as (client, _):
            whole, streamed, (model, headers) = await texts(client, "m")
            assert whole == streamed == expected
            assert model == "nickname"
            assert headers["x-headway-fallback"] == "nickname; reason=queue"
        assert live.metric("fallback_requests_total", reason="queue") == 2
        assert live.metric("admission_rejections_total") == 0
        async with client_of(live, "none") as client:
            answer = await client.completions.with_raw_response.create(
                model="m", prompt=[5], max_tokens=2
            )
            assert "x-headway-fallback" not in answer.headers
            assert answer.parse().model == "m"
    finally:
        live.close()


async def too_late(held: Waiting, completions: Any, stream: bool) -> Any:
    """The answer to a request whose time is over before the engine looks at it."""
    held.stop()
    hurried = {"slo": {"ttft_ms": 1}}
    asked = completions.create(
        model="m", prompt=[5, 6, 7], max_tokens=4, stream=stream, extra_body=hurried
    )
    task = asyncio.create_task(asked)
    await held.reach(2, [task])
    held.go()
    return await task


async def test_what_is_given_up_goes_to_the_fallback(tiny_model: Path, server: LiveServer) -> None:
    """Let in, and then it cannot be in time any more; without a fallback that is a 503."""
    shed = (NO_TORCH, "--kv-memory=64MiB", "--served-model-name=m", "--late=shed",
            "--max-queue-wait=1000", "--max-num-batched-tokens=1", "--no-prefix-cache",
            PATIENT)  # fmt: skip
    live = LiveServer(tiny_model, *shed, f"--fallback-model=nickname={server.url}/v1")
    try:
        live.wait_ready()
        async with full(live) as (client, held):
            for stream in (False, True):
                raw = await too_late(held, client.completions.with_raw_response, stream)
                assert raw.headers["x-headway-fallback"] == "nickname; reason=late"
        assert live.metric("fallback_requests_total", reason="late") == 2
        assert live.metric("admission_rejections_total", reason="given_up") == 0
    finally:
        live.close()
    live = LiveServer(tiny_model, *shed)
    try:
        live.wait_ready()
        async with full(live) as (client, held):
            for stream in (False, True):
                with pytest.raises(openai.APIStatusError) as given_up:
                    await too_late(held, client.completions, stream)
                assert (given_up.value.status_code, given_up.value.code) == (503, "overloaded")
                assert given_up.value.response.headers["retry-after"] == "1"
        assert live.metric("admission_rejections_total", reason="given_up") == 2
    finally:
        live.close()


async def test_a_second_engine_answers_what_would_be_refused(tiny_model: Path) -> None:
    live = LiveServer(tiny_model, *FULL, f"--fallback-model=second={tiny_model}")
    try:
        live.wait_ready()
        async with full(live) as (client, _):
            messages: Any = [{"role": "user", "content": "hello"}]
            raw = await client.chat.completions.with_raw_response.create(
                model="m", messages=messages, max_tokens=4
            )
            assert raw.headers["x-headway-fallback"] == "second; reason=queue"
            assert raw.parse().model == "second"
            chunks = await client.chat.completions.create(
                model="m", messages=messages, max_tokens=4, stream=True
            )
            models = {chunk.model async for chunk in chunks}
            assert models == {"second"}
            answer: Any = await client.responses.with_raw_response.create(
                model="m", input="hello", max_output_tokens=4
            )
            assert answer.headers["x-headway-fallback"] == "second; reason=queue"
            kept = await client.responses.retrieve(answer.parse().id)
            assert kept.model == "second"
            listed = [card.id async for card in await client.models.list()]
            assert listed == ["m", "second"]
        told = live.get("/metrics")[1].decode()
        assert told.count("# TYPE headway:goodput_requests_total counter") == 1
        names = {family.name for family in text_string_to_metric_families(told)}
        assert len(names) == told.count("# HELP")
        assert live.metric("goodput_requests_total", model_name="second") >= 2
    finally:
        live.close()


@pytest.mark.hardening
async def test_refusals_come_at_once_while_the_engine_is_busy(tiny_model: Path) -> None:
    """300 refusals within 50 ms at p95: steps take long and every core has something to do."""
    burners = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
        for _ in range(os.cpu_count() or 1)
    ]
    live = LiveServer(tiny_model, *FULL)
    try:
        live.wait_ready()
        body = {"model": "m", "prompt": SLOW, "max_tokens": 1}
        spent: list[float] = []

        async def hammer(http: aiohttp.ClientSession) -> None:
            while len(spent) < 300:
                begin_s = time.perf_counter()
                async with http.post("/v1/completions", json=body) as answer:
                    await answer.read()
                    if answer.status == 503:
                        spent.append(time.perf_counter() - begin_s)
                await asyncio.sleep(0.05)

        async with aiohttp.ClientSession(live.url) as http:
            await asyncio.gather(*(hammer(http) for _ in range(4)))
        print(f"p50 {sorted(spent)[150] * 1e3:.1f} ms, p95 {sorted(spent)[285] * 1e3:.1f} ms")
        assert sorted(spent)[285] < 0.05
    finally:
        live.close()
        for burner in burners:
            burner.kill()
            await burner.wait()
