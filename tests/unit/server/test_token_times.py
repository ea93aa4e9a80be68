"""When a streamed token counts as having left: when its text does."""

from types import SimpleNamespace

from headway.core.clock import VirtualClock
from headway.core.request import SequenceUpdate
from headway.edge.event_stream import DONE, PING
from headway.frontend.answer import SequenceDelta
from headway.server.generation import Progress
from headway.server.session import Session
from headway.telemetry.timeline import RequestTimeline
from telemetry_cases import begin, telemetry

STEPS = [("Once", 1), ("", 1), ("", 1), (" upon é", 1), ("", 2), (" end", 1)]


class Scripted:
    """A stream whose deltas come a second apart; the last one ends the answer."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.deltas = []
        for number, (text, count) in enumerate(STEPS):
            reason = "length" if number == len(STEPS) - 1 else None
            self.deltas.append(SequenceDelta(SequenceUpdate(1, 0, [5] * count, reason), text))

    async def next(self) -> list[SequenceDelta]:
        if not self.deltas:
            return []
        self.clock.advance(1.0)
        return [self.deltas.pop(0)]


class Plain:
    """A dialect that shows nothing where there is no text, after an opening."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def opening(self, choice: int) -> bytes:
        return b"open "

    def chunk(self, choice: int, delta: SequenceDelta) -> bytes:
        return delta.text.encode()

    def ending(self) -> bytes:
        return b"usage " + DONE

    def ping(self) -> bytes:
        return PING


class Submitted(Session):
    """One that the engine has already."""

    def submit(self) -> RequestTimeline:
        self.dialect.progress.timeline = self.timeline
        return self.timeline


async def test_text_that_is_held_back_counts_when_it_leaves():
    clock = VirtualClock()
    model = telemetry(clock)
    timeline = begin(model, "a")
    request = SimpleNamespace(
        sampling=SimpleNamespace(n=1, grammar=None), num_choices=1,
        model=SimpleNamespace(
            telemetry=model, admission=SimpleNamespace(rules=SimpleNamespace(sheds=True))
        ),
    )  # fmt: skip
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    incoming = SimpleNamespace(send=send, scope={"fallback": b"", "meters": []}, relayed=None)
    session = Submitted(None, incoming, SimpleNamespace(meter=None))
    progress = Progress(request)
    session.dialect, session.request = Plain(progress), request
    session.streams, session.timeline = [Scripted(clock)], timeline
    await session.send_chunks()
    assert sent == [b"", b"open Once", " upon é".encode(), b" end", b"usage " + DONE]
    assert list(timeline.times[0]) == [1, 4, 4, 4, 6, 6, 6], "each with the chunk that shows it"
    assert timeline.gaps().tolist() == [3, 0, 0, 2, 0, 0]
    assert timeline.ended.outcome == "ok" and progress.num_generated == 7
    assert model.registry.counts("request_success") == {"length": 1}
