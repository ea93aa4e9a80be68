"""Steps that the engine's thread sleeps through: no hang where a GPU or another rank computes them.

A real engine process over the fake runtime, of which a step takes longer than a small
--step-timeout.
"""

import itertools
import sys
from pathlib import Path

import pytest
from deadly_engine import AFTER, NAPS_S, SLEEPS

from headway.core.request import Request, SamplingParams
from headway.frontend.answer import Stream
from headway.frontend.process import ProcessClient

PROGRAM = Path(__file__).with_name("deadly_engine.py")
SAMPLING = SamplingParams(temperature=0, max_tokens=AFTER + 1, seed=7)
"""One step of a request is behind `AFTER` tokens."""
IDS = itertools.count(1)
STEP_TIMEOUT_S = NAPS_S[1] / 2


async def count_tokens(stream: Stream) -> int:
    found = 0
    try:
        while deltas := await stream.next():
            found += sum(len(delta.token_ids) for delta in deltas)
    finally:
        stream.close()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="else all of a step counts as computed")
@pytest.mark.parametrize(
    ("where", "restarts"), [([], 1), (["cuda"], 0), (["rank"], 0)], ids=["here", "cuda", "rank"]
)
async def test_a_step_hangs_that_nobody_computes(
    tmp_path: Path, where: list[str], restarts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of half a second teaches how long steps take, then one sleeps for twice the timeout,
    which is less than ten times that: whose thread computes its steps is replaced."""
    client = ProcessClient(
        lambda sockets: [sys.executable, str(PROGRAM), str(tmp_path), str(sockets), *where],
        tokenizer=None,
        timeout_s=60.0,
        step_timeout_s=60.0,
    )
    await client.start()
    await client.wait_ready()
    try:
        assert (
            await count_tokens(client.submit(Request(next(IDS), [SLEEPS], SAMPLING))) == AFTER + 1
        )
        client.step_timeout_s = STEP_TIMEOUT_S
        assert (
            await count_tokens(client.submit(Request(next(IDS), [SLEEPS], SAMPLING))) == AFTER + 1
        )
        assert client.num_restarts == restarts
        assert ("computed nothing of its step for" in caplog.text) == bool(restarts)
    finally:
        await client.stop()
