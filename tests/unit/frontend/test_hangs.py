"""Which engines count as hung: those that stand still, or compute beyond all measure, or leave what
they are sent."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.clock import VirtualClock
from headway.engine.messages import Beat
from headway.frontend.process import ProcessClient


@pytest.fixture
def client() -> Iterator[ProcessClient]:
    """Of an engine that lives and is ready, whose steps may take 2 s."""
    found = ProcessClient(lambda _: [], tokenizer=None, step_timeout_s=2.0, clock=VirtualClock())
    lives: Any = SimpleNamespace(returncode=None)
    found._process, found.status, found._last_beat_s = lives, "ready", found.clock.now_s()
    yield found
    found._process = None
    asyncio.run(found.stop())


@pytest.mark.parametrize(
    ("beat", "told"),
    [
        (Beat(1.9, 0.05, 1.9, 0.0), ""),
        (Beat(2.5, 0.05, 2.0, 0.3), "computed nothing of its step for 2.0 s"),
        (Beat(2.5, 1.0, 2.0, 0.3), "computed nothing of its step for 2.0 s"),  # of 10 s at most
        (Beat(3.6, 0.35, 0.0, 0.2), ""),  # the machine gives it no time
        (Beat(2.2, 0.05, 0.0, 2.1), "was in one step for 2.2 s"),
        (Beat(3.0, 0.35, 0.0, 3.0), ""),
        (Beat(3.8, 0.35, 0.0, 3.6), "was in one step for 3.8 s"),
        (Beat(20.0, 0.35, 0.5, 0.2), ""),
        (Beat(20.5, 0.35, 0.5, 0.2), "was in one step for 20.5 s"),
    ],
)
def test_who_hangs(client: ProcessClient, beat: Beat, told: str) -> None:
    client._heartbeat.record(beat)
    assert (client._find_fault() or "") == told
    client.status = "loading 20%"
    assert client._find_fault() is None


def test_who_takes_no_message_hangs_though_no_step_is_begun(client: ProcessClient) -> None:
    heart = client._heartbeat

    def look(num_received: int, busy_s: float = 0.0) -> str:
        heart.record(Beat(busy_s, 0.05, num_received=num_received))
        return client._find_fault() or ""

    heart.num_sent = 3
    assert [look(3), look(3)] == ["", ""], "nobody has sent it anything"
    heart.num_sent = 4
    assert [look(3) for _ in range(5)] == [*[""] * 4, "took no message for 2.0 s"]
    assert look(4) == "", "it was slow"
    heart.num_sent = 9
    assert [look(taken) for taken in (4, 5, 5, 6, 6, 6, 7, 7, 7)] == [""] * 9, "it goes on"
    assert [look(7, busy_s) for busy_s in (0.2, 0.7, 1.2, 1.7, 0.2)] == [""] * 5, "it is in a step"
    assert [look(7) for _ in range(4)][-1] == "took no message for 2.0 s"
