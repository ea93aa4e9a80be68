"""Requests that kill their engine, hang it or break its steps, and the others beside them.

A real client and real engine processes, over the fake runtime: whoever is not at fault gets exactly
the tokens it gets alone, whatever happens to the engine meanwhile.
"""

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
from deadly_engine import DIES, DIES_ONCE, HANGS, MAX_LEN, RAISES, VOCAB_SIZE

from fakes import answer
from headway.core.clock import VirtualClock
from headway.core.errors import EngineDownError, RequestError, ServerFaultError
from headway.core.request import Request, SamplingParams
from headway.engine import messages
from headway.frontend.answer import Stream
from headway.frontend.process import WATCH_INTERVAL_S, ProcessClient

PROGRAM = Path(__file__).with_name("deadly_engine.py")
NUM_TOKENS = 30
IDS = itertools.count(1)
SAMPLING = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, seed=7)


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[ProcessClient]:
    opened = ProcessClient(
        lambda sockets: [sys.executable, str(PROGRAM), str(tmp_path), str(sockets)],
        tokenizer=None,
        timeout_s=60.0,
        step_timeout_s=60.0,
    )
    await opened.start()
    await opened.wait_ready()
    yield opened
    await opened.stop()


def ask(client: ProcessClient, prompt: list[int], sampling: SamplingParams) -> Stream:
    """A request with an id of its own."""
    return client.submit(Request(next(IDS), prompt, sampling))


async def tokens_of(stream: Stream) -> dict[int, list[int]]:
    """What each sequence of a request gained."""
    found: dict[int, list[int]] = {}
    try:
        while deltas := await stream.next():
            for delta in deltas:
                found.setdefault(delta.index, []).extend(delta.token_ids)
    finally:
        stream.close()
    return found


def alone(prompt: list[int], sampling: SamplingParams = SAMPLING) -> dict[int, list[int]]:
    """The same without any engine."""
    return {
        index: answer(
            prompt,
            sampling,
            seed=7,
            index=index,
            stop_ids=set(),
            max_len=MAX_LEN,
            vocab_size=VOCAB_SIZE,
        )[0]
        for index in range(sampling.n)
    }


async def outcomes(
    client: ProcessClient, prompts: list[list[int]], sampling: SamplingParams = SAMPLING
) -> list[dict[int, list[int]] | BaseException]:
    streams = [ask(client, prompt, sampling) for prompt in prompts]
    return await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)


async def test_one_that_raises_fails_alone(client: ProcessClient) -> None:
    pid = client.pid
    prompts = [[1, 2, number] for number in range(9)] + [[RAISES, 3]]
    *others, culprit = await outcomes(client, prompts)
    assert others == [alone(prompt) for prompt in prompts[:-1]]
    assert isinstance(culprit, ServerFaultError)
    assert (client.pid, client.num_restarts) == (pid, 0)


@pytest.mark.parametrize("deed", [DIES, HANGS], ids=["kills", "hangs"])
async def test_one_that_kills_is_tried_once_more_and_refused(
    client: ProcessClient, deed: int
) -> None:
    """Two engines at most, and nobody else loses or gains a token."""
    if deed == HANGS:
        client.step_timeout_s = 3.0
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, seed=7, n=2)
    prompts = [[1, 2, number] for number in range(5)] + [[deed, 3]] + [[4, 5]]
    found = await outcomes(client, prompts, sampling)
    culprit = found.pop(5)
    assert found == [alone(prompt, sampling) for prompt in prompts if deed not in prompt]
    assert isinstance(culprit, RequestError)
    assert (culprit.code, culprit.status) == ("poison_request", 500)
    assert client.num_restarts == 2
    while not client.ready:
        await asyncio.sleep(0.01)
    with pytest.raises(RequestError, match="not tried again"):  # as clients do, by themselves
        ask(client, [deed, 3], sampling)
    assert await outcomes(client, [[6, 7]]) == [alone([6, 7])]
    assert client.num_restarts == 2


async def test_one_that_kills_once_ends_well(client: ProcessClient) -> None:
    prompts = [[1, 2], [DIES_ONCE, 3], [4, 5]]
    assert await outcomes(client, prompts) == [alone(prompt) for prompt in prompts]
    assert client.num_restarts == 1


async def test_an_engine_that_is_killed_costs_no_request_a_token(client: ProcessClient) -> None:
    """Also those that come while the others are tried, and those whose clients leave."""
    prompts = [[number] for number in range(12)]
    streams = [ask(client, prompt, SAMPLING) for prompt in prompts]
    tasks = [asyncio.create_task(tokens_of(stream)) for stream in streams]
    while not all(stream.resumed_tokens[0] for stream in streams):
        await asyncio.sleep(0.001)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    while client.ready:
        await asyncio.sleep(0.01)
    streams[3].close()
    tasks[3].cancel()
    while not client.ready:
        await asyncio.sleep(0.001)
    late = asyncio.create_task(tokens_of(ask(client, [50, 51], SAMPLING)))
    others = [task for number, task in enumerate(tasks) if number != 3]
    assert await asyncio.gather(*others) == [alone([n]) for n in range(12) if n != 3]
    assert await late == alone([50, 51])
    assert client.num_restarts == 1


async def test_a_request_that_comes_as_the_engine_dies_goes_to_the_next(
    client: ProcessClient,
) -> None:
    """The engine is gone and nobody has noticed; then it is noticed and the next one starts: what
    is submitted in either moment has its tokens, and is not charged with the death."""
    assert client._watcher is not None and client.pid is not None
    client._watcher.cancel()
    os.kill(client.pid, signal.SIGKILL)
    while client._send(messages.Flush()):
        await asyncio.sleep(0.005)
    assert client.ready, "nobody has noticed"
    first = [ask(client, [number], SAMPLING) for number in range(4)]
    client._watcher = asyncio.create_task(client._watch())
    while client.ready:
        await asyncio.sleep(0.001)
    second = [ask(client, [number], SAMPLING) for number in range(4, 8)]
    found = await asyncio.gather(*map(tokens_of, first + second))
    assert found == [alone([number]) for number in range(8)]
    assert {stream.num_deaths for stream in first + second} == {0}
    assert client.num_restarts == 1


@pytest.mark.hardening
async def test_killed_at_random_moments_of_a_burst(client: ProcessClient) -> None:
    """Forty engines die at any moment of twenty-four submissions: every request has its tokens."""
    source = random.Random(11)
    for _ in range(40):
        while not client.ready:
            await asyncio.sleep(0.005)
        moment, tasks = source.randrange(24), []
        for number in range(24):
            if number == moment:
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)
            tasks.append(asyncio.create_task(tokens_of(ask(client, [number], SAMPLING))))
            await asyncio.sleep(source.choice((0, 0, 0.002, 0.02)))
        assert await asyncio.gather(*tasks) == [alone([number]) for number in range(24)]
    assert client.num_restarts == 40


async def test_a_client_that_drains_waits_for_those_that_go_on(client: ProcessClient) -> None:
    """The engine dies, the server is told to end before the next one is up."""
    stream = ask(client, [1, 2], SAMPLING)
    assert await stream.next()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    while client.ready:
        await asyncio.sleep(0.01)
    ending = asyncio.create_task(client.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(EngineDownError):
        ask(client, [1], SAMPLING)
    found = await tokens_of(stream)
    assert found[0] == alone([1, 2])[0][-len(found[0]) :]
    await ending
    assert client.status == "draining"


async def test_who_did_not_listen_has_heard_no_silence(client: ProcessClient) -> None:
    """A machine that stood still for a minute, and an engine that stands still by itself."""
    clock = client.clock = VirtualClock()
    assert client._watcher is not None and client.pid is not None
    client._watcher.cancel()
    os.kill(client.pid, signal.SIGSTOP)
    client._last_beat_s = client._looked_s = 0.0
    clock.advance(client.timeout_s + 1)
    client._poll()
    assert client._find_fault() is None
    while (why := client._find_fault()) is None:
        clock.advance(WATCH_INTERVAL_S)
        client._poll()
    assert "was stopped for" in why and clock.now_s() >= 2 * client.timeout_s


async def test_random_frames_on_each_socket_end_nothing(client: ProcessClient) -> None:
    """Whoever gets into the private folder: frames that are no messages are dropped."""
    source = random.Random(3)
    pid = client.pid
    beat = next(client._folder.glob("*/beat"))
    context = zmq.Context()
    with context.socket(zmq.PUSH) as intruder:
        intruder.setsockopt(zmq.LINGER, 1000)
        intruder.connect(f"ipc://{beat}")
        for _ in range(200):
            intruder.send(source.randbytes(source.choice((0, 1, 5, 100, 5000))))
    context.destroy(linger=1000)
    assert client._pair is not None
    for _ in range(200):
        client._pair.send(source.randbytes(source.choice((0, 1, 5, 100, 5000))))
    assert await outcomes(client, [[1, 2, 3]]) == [alone([1, 2, 3])]
    assert (client.pid, client.num_restarts) == (pid, 0)
