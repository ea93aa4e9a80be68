"""Several engines behind one face: what one of them runs goes on in the others when it is gone.

Real engine processes over the fake runtime, which knows the right tokens of every prompt.
"""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from deadly_engine import COMPUTES, DIES, HANGS, LONG_S, MAX_LEN, VOCAB_SIZE

from fakes import answer
from headway.core.errors import EngineDownError, RequestError
from headway.core.request import Request, SamplingParams
from headway.frontend.answer import Stream
from headway.frontend.process import ProcessClient
from headway.frontend.replicas import Replicas

PROGRAM = Path(__file__).with_name("deadly_engine.py")
SAMPLING = SamplingParams(temperature=0, max_tokens=40, seed=7)
IDS = itertools.count(1)
NUM_ENGINES = 3


@pytest_asyncio.fixture
async def replicas(tmp_path: Path) -> AsyncIterator[Replicas]:
    poison: dict[bytes, None] = {}
    clients = [
        ProcessClient(
            lambda sockets: [sys.executable, str(PROGRAM), str(tmp_path), str(sockets)],
            tokenizer=None,
            timeout_s=60.0,
            step_timeout_s=60.0,
            poison=poison,
        )
        for _ in range(NUM_ENGINES)
    ]
    opened = Replicas(clients)
    await opened.start()
    await opened.wait_ready()
    yield opened
    await opened.stop()


def ask(replicas: Replicas, prompt: list[int], engine: int | None = None) -> Stream:
    return replicas.submit(Request(next(IDS), prompt, SAMPLING), engine=engine)


async def tokens_of(stream: Stream) -> list[int]:
    found: list[int] = []
    try:
        while deltas := await stream.next():
            found += [token for delta in deltas for token in delta.token_ids]
    finally:
        stream.close()
    return found


def alone(prompt: list[int]) -> list[int]:
    """The same without any engine."""
    found = answer(
        prompt, SAMPLING, seed=7, index=0, stop_ids=set(), max_len=MAX_LEN, vocab_size=VOCAB_SIZE
    )
    return found[0]


async def begun(streams: list[Stream]) -> None:
    while not all(
        stream.resumed_tokens[0] is None or stream.resumed_tokens[0] for stream in streams
    ):
        await asyncio.sleep(0.001)


def kill(client: ProcessClient, number: int) -> None:
    assert client.pid is not None
    os.kill(client.pid, number)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        signal.SIGSTOP,
        pytest.param(signal.SIGTERM, marks=pytest.mark.hardening),
    ],
)
async def test_requests_of_an_engine_that_is_gone_go_on_in_the_others(
    replicas: Replicas, number: int
) -> None:
    """Not one token is lost or another, none is on trial, and nobody waits for the next engine."""
    if number == signal.SIGSTOP:
        for client in replicas.clients:
            client.timeout_s = 1.0
    moved: list[tuple[int, int]] = []
    replicas.on_moved = lambda request_id, engine: moved.append((request_id, engine))
    streams = [ask(replicas, [1, n]) for n in range(12)]
    counts = [client.num_requests for client in replicas.clients]
    assert counts == [4, 4, 4], "the one with the fewest gets the next"
    tasks = [asyncio.create_task(tokens_of(stream)) for stream in streams]
    await begun(streams)
    first = replicas.clients[0]
    first.command = lambda sockets: ["sleep", "60"]  # the next engine is not there in time
    kill(first, number)
    assert await asyncio.gather(*tasks) == [alone([1, n]) for n in range(12)]
    assert len(moved) <= 4
    assert {engine for _, engine in moved} <= {1, 2}
    assert not first.ready
    assert replicas.ready
    assert replicas.status == "ready"
    late = ask(replicas, [5, 6], engine=0)
    assert await tokens_of(late) == alone([5, 6]), "another answers for the one that is gone"
    assert moved[-1] == (late.answer.request.request_id, 1)


async def test_a_poisonous_request_costs_two_engines_and_nobody_a_token(
    replicas: Replicas,
) -> None:
    """It kills one, and one more on trial; the third never sees it, and refuses it from then on.

    The fake kills itself, which looks like the outside: so it is tried from its third engine on.
    """
    prompts = [[1, n] for n in range(9)]
    streams = [ask(replicas, prompt) for prompt in [*prompts, [DIES, 3]]]
    found = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
    assert found[:-1] == [alone(prompt) for prompt in prompts]
    assert isinstance(found[-1], RequestError)
    assert found[-1].code == "poison_request"
    assert sum(client.num_restarts for client in replicas.clients) <= 3
    while not all(client.ready for client in replicas.clients):
        await asyncio.sleep(0.01)
    for engine in range(NUM_ENGINES):
        with pytest.raises(RequestError, match="not tried again"):
            ask(replicas, [DIES, 3], engine)


async def test_a_request_that_hangs_its_engine_ends_and_the_others_go_on(
    replicas: Replicas,
) -> None:
    for client in replicas.clients:
        client.step_timeout_s = 1.0
    prompts = [[4, n] for n in range(8)]
    streams = [ask(replicas, prompt) for prompt in [*prompts, [HANGS, 3]]]
    found = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
    assert found[:-1] == [alone(prompt) for prompt in prompts]
    assert isinstance(found[-1], RequestError)
    assert found[-1].code == "poison_request"


async def test_an_engine_that_is_held_is_found_though_a_step_took_long_before(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    """One that computes is waited for ten times as long as any step took, one that is held is not;
    and nobody who computes is taken for one that is held."""
    slow = [ask(replicas, [COMPUTES, n]) for n in range(NUM_ENGINES)]
    assert await asyncio.gather(*map(tokens_of, slow)) == [
        alone([COMPUTES, n]) for n in range(NUM_ENGINES)
    ]
    for client in replicas.clients:
        while client._heartbeat.last.longest_s < LONG_S:
            await asyncio.sleep(0.05)
        client.step_timeout_s = 1.0
    streams = [ask(replicas, prompt) for prompt in [[4, 1], [HANGS, 3]]]
    found = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
    assert found[0] == alone([4, 1])
    assert isinstance(found[1], RequestError) and found[1].code == "poison_request"
    assert "computed nothing of its step for" in caplog.text
    assert "was in one step for" not in caplog.text


async def test_an_idle_engine_that_is_held_is_found_by_the_first_message_it_leaves(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in no step, and its heartbeat goes on; what it was asked goes on in another. (On a busy
    machine it may be held while it checks its books: that is found as a step is.)"""
    first = replicas.clients[0]
    first.step_timeout_s = 1.0
    assert await tokens_of(ask(replicas, [6, 1], engine=0)) == alone([6, 1])
    await asyncio.sleep(0.2)
    kill(first, signal.SIGUSR1)
    streams = [ask(replicas, [6, n], engine=0) for n in range(3)]
    assert await asyncio.gather(*map(tokens_of, streams)) == [alone([6, n]) for n in range(3)]
    assert first.num_restarts == 1
    assert "took no message for" in caplog.text or "computed nothing of" in caplog.text


async def test_with_all_engines_gone_requests_wait_for_the_first_that_is_back(
    replicas: Replicas,
) -> None:
    streams = [ask(replicas, [2, n]) for n in range(6)]
    tasks = [asyncio.create_task(tokens_of(stream)) for stream in streams]
    await begun(streams)
    for client in replicas.clients:
        kill(client, signal.SIGKILL)
    assert await asyncio.gather(*tasks) == [alone([2, n]) for n in range(6)]
    assert replicas.num_restarts == NUM_ENGINES


async def test_drained_engines_take_nothing_and_end(replicas: Replicas) -> None:
    task = asyncio.create_task(tokens_of(ask(replicas, [3, 4])))
    await asyncio.sleep(0)
    await replicas.drain(30.0)
    assert await task == alone([3, 4])
    assert replicas.status == "draining"
    with pytest.raises(EngineDownError):
        ask(replicas, [3, 4])
