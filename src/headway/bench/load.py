"""Puts the load on: an open loop that never waits for answers, or a closed one that does.

Given conversations with their times it fills `exchanges`. In the open loop a request is scheduled
before the run and timed from then, so a server that stalls cannot make the load kinder; a later
turn of a conversation is scheduled at its predecessor's end plus the time to think.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

from headway.bench.talk import Dialect, Talk, asked_tokens
from headway.bench.workload import Conversation
from headway.core.clock import Clock
from headway.measure.client import Answer, Client
from headway.measure.record import ClientCost, Exchange

AHEAD = 512
AHEAD_BYTES = 64 * 2**20
"""Bodies written before they are due: so many, or so many bytes."""
ROOM_S = 0.004
"""Nothing is written ahead when the next request is due sooner."""
TICK_S = 0.0015
"""Timers of event loops tick in milliseconds: before a request that is alone the last tick is
waited for in turns of the loop. In a burst that would cost more than it gives."""
PULSE_S = 0.02


class Load:
    """The requests of one run, as they are sent."""

    def __init__(self, client: Client, dialect: Dialect) -> None:
        self._client = client
        self._dialect = dialect
        self._tasks: set[asyncio.Task[None]] = set()
        self._ahead: Ahead | None = None
        self.exchanges: list[Exchange] = []
        self.running = 0

    def write_ahead(self, conversations: list[Conversation]) -> None:
        """Write the first bodies of an open loop, before its clock starts."""
        self._ahead = Ahead(self._dialect, conversations)
        self._ahead.fill()

    async def open_loop(self, conversations: list[Conversation], drain_s: float | None) -> None:
        """Send each conversation at its time, then wait for the answers, at most `drain_s`."""
        ahead = self._ahead or Ahead(self._dialect, conversations)
        for number, conversation in enumerate(conversations):
            while (wait_s := conversation.at_s - self._client.now_s()) > 0:
                if wait_s <= TICK_S or (wait_s > ROOM_S and ahead.write_one()):
                    await asyncio.sleep(0)
                else:
                    await asyncio.sleep(wait_s - TICK_S if wait_s > ROOM_S else wait_s)
            talk, said = ahead.take()
            task = asyncio.create_task(
                self._converse(conversation, number, conversation.at_s, talk, said)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await self._drain(drain_s)

    async def closed_loop(
        self, conversations: list[Conversation], concurrency: int, until_s: float | None
    ) -> None:
        """`concurrency` at a time, each begun when another ended: all of them once, or, over and
        over, until a time."""
        again = conversations if until_s is None else cycle(conversations)
        upcoming = enumerate(again)
        await asyncio.gather(*(self._work(upcoming, until_s) for _ in range(concurrency)))

    async def _work(
        self, upcoming: Iterator[tuple[int, Conversation]], until_s: float | None
    ) -> None:
        for number, conversation in upcoming:
            now_s = self._client.now_s()
            if until_s is not None and now_s >= until_s:
                return
            talk = self._dialect.talk()
            said = talk.say(conversation.turns[0])
            await self._converse(conversation, number, self._client.now_s(), talk, said)

    async def _converse(
        self, conversation: Conversation, number: int, at_s: float, talk: Talk, said: bytes
    ) -> None:
        """All turns of a conversation; it ends at the first that fails."""
        tokens = 0
        for k, turn in enumerate(conversation.turns):
            if k:
                await asyncio.sleep(turn.think_s)
                at_s += turn.think_s
                said = talk.say(turn)
            tokens += asked_tokens(turn)
            x = Exchange(
                id=len(self.exchanges),
                scheduled_s=at_s,
                service_class=conversation.service_class,
                conversation=number,
                turn=k,
                asked_prompt_tokens=tokens,
                asked_output_tokens=turn.output_tokens,
            )
            self.exchanges.append(x)
            answer = Answer() if k + 1 < len(conversation.turns) else None
            await self._send(x, said, answer, turn.chat is not None)
            if not x.ok:
                return
            if answer is not None:
                talk.hear(answer, x.num_output)
                tokens += x.num_output
            assert x.ended_s is not None
            at_s = x.ended_s

    async def _send(self, x: Exchange, said: bytes, answer: Answer | None, recorded: bool) -> None:
        body = self._dialect.request(said, x.asked_output_tokens, x.service_class, recorded)
        self.running += 1
        try:
            await self._client.exchange(x, body, answer)
        finally:
            self.running -= 1

    async def _drain(self, drain_s: float | None) -> None:
        """Wait for what is in the air; what is left after `drain_s` is cancelled."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=drain_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


class Ahead:
    """First turns, written while nothing else is to be done."""

    def __init__(self, dialect: Dialect, conversations: list[Conversation]) -> None:
        self._dialect = dialect
        self._upcoming = iter(conversations)
        self._written: deque[tuple[Talk, bytes]] = deque()
        self._bytes = 0

    def fill(self) -> None:
        """Write until there is no more room."""
        while self.write_one():
            pass

    def write_one(self) -> bool:
        """Write the next; False when there is no room or none left."""
        if len(self._written) >= AHEAD or self._bytes >= AHEAD_BYTES:
            return False
        conversation = next(self._upcoming, None)
        if conversation is None:
            return False
        talk = self._dialect.talk()
        said = talk.say(conversation.turns[0])
        self._written.append((talk, said))
        self._bytes += len(said)
        return True

    def take(self) -> tuple[Talk, bytes]:
        """The next, written now if it has to be."""
        if not self._written:
            self.write_one()
        talk, said = self._written.popleft()
        self._bytes -= len(said)
        return talk, said


@contextmanager
def quiet_gc(*, cleans: bool = True) -> Iterator[None]:
    """Only small collections while requests are timed: a full one would hold up all of them.

    With `cleans` one full collection comes first.
    """
    thresholds = gc.get_threshold()
    if cleans:
        gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class Pulse:
    """How late the event loop wakes up, and the CPU time of this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late_s: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._cpu_s = self._wall_s = 0.0
        self._spent_s: list[tuple[float, float]] = []

    async def __aenter__(self) -> "Pulse":
        self._cpu_s, self._wall_s = time.process_time(), self._clock.now_s()
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            due_s = self._clock.now_s() + PULSE_S
            await asyncio.sleep(PULSE_S)
            now_s = self._clock.now_s()
            self._late_s.append(max(0.0, now_s - due_s))
            if now_s - self._wall_s >= len(self._spent_s) + 1:
                spent_s = time.process_time() - self._cpu_s
                self._spent_s.append((round(now_s - self._wall_s, 6), round(spent_s, 6)))

    def cost(self) -> ClientCost:
        """So far."""
        return ClientCost(
            cpu_s=time.process_time() - self._cpu_s,
            wall_s=self._clock.now_s() - self._wall_s,
            late_s=[round(late, 6) for late in self._late_s],
            spent_s=self._spent_s,
        )
