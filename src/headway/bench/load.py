"""The load: an open loop that never waits for answers, or a closed loop that does.

`LoadGenerator` sends conversations at their times and fills `exchanges`. In the open loop a request
is scheduled before the run and timed from then, so a server that stalls cannot reduce the load; a
later turn of a conversation is scheduled at its predecessor's end plus the think time.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

from headway.bench.talk import BenchDialect, ConversationWriter, turn_tokens
from headway.bench.workload import Conversation
from headway.core.clock import Clock
from headway.measure.client import Client, ReceivedAnswer
from headway.measure.record import ClientCost, Exchange

MAX_BODIES_AHEAD = 512
MAX_BYTES_AHEAD = 64 * 2**20
"""Limits of the bodies that are written before they are due: their number, and their bytes."""
MIN_WRITE_ROOM_S = 0.004
"""No body is written ahead when the next request is due sooner."""
TICK_S = 0.0015
"""Timers of event loops have a resolution of milliseconds: before a request that is alone the last
tick is waited for in iterations of the loop. In a burst that would cost more than it gains."""
PULSE_S = 0.02


class LoadGenerator:
    """The requests of one run, as they are sent."""

    def __init__(self, client: Client, dialect: BenchDialect) -> None:
        self._client = client
        self._dialect = dialect
        self._tasks: set[asyncio.Task[None]] = set()
        self._ahead: BodyQueue | None = None
        self.exchanges: list[Exchange] = []
        self.running = 0

    def write_ahead(self, conversations: list[Conversation]) -> None:
        """Write the first bodies of an open loop, before its clock starts."""
        self._ahead = BodyQueue(self._dialect, conversations)
        self._ahead.fill()

    async def open_loop(self, conversations: list[Conversation], drain_s: float | None) -> None:
        """Send each conversation at its time, then wait for the answers, at most `drain_s`."""
        ahead = self._ahead or BodyQueue(self._dialect, conversations)
        for number, conversation in enumerate(conversations):
            while (wait_s := conversation.at_s - self._client.now_s()) > 0:
                if wait_s <= TICK_S or (wait_s > MIN_WRITE_ROOM_S and ahead.write_one()):
                    await asyncio.sleep(0)
                else:
                    await asyncio.sleep(wait_s - TICK_S if wait_s > MIN_WRITE_ROOM_S else wait_s)
            talk, prompt = ahead.take()
            task = asyncio.create_task(
                self._converse(conversation, number, conversation.at_s, talk, prompt)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await self._drain(drain_s)

    async def closed_loop(
        self, conversations: list[Conversation], concurrency: int, until_s: float | None
    ) -> None:
        """Run `concurrency` conversations at a time: all of them once, or repeatedly until
        `until_s`."""
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
            prompt = talk.add_turn(conversation.turns[0])
            await self._converse(conversation, number, self._client.now_s(), talk, prompt)

    async def _converse(
        self,
        conversation: Conversation,
        number: int,
        at_s: float,
        talk: ConversationWriter,
        prompt: bytes,
    ) -> None:
        """Send all turns of a conversation; it ends at the first that fails."""
        tokens = 0
        for k, turn in enumerate(conversation.turns):
            if k:
                await asyncio.sleep(turn.think_s)
                at_s += turn.think_s
                prompt = talk.add_turn(turn)
            tokens += turn_tokens(turn)
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
            answer = ReceivedAnswer() if k + 1 < len(conversation.turns) else None
            await self._send(x, prompt, answer, turn.chat is not None)
            if not x.ok:
                return
            if answer is not None:
                talk.add_answer(answer, x.num_output)
                tokens += x.num_output
            assert x.ended_s is not None
            at_s = x.ended_s

    async def _send(
        self, x: Exchange, prompt: bytes, answer: ReceivedAnswer | None, recorded: bool
    ) -> None:
        body = self._dialect.request(prompt, x.asked_output_tokens, x.service_class, recorded)
        self.running += 1
        try:
            await self._client.exchange(x, body, answer)
        finally:
            self.running -= 1

    async def _drain(self, drain_s: float | None) -> None:
        """Wait for requests in flight; those that remain after `drain_s` are cancelled."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=drain_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


class BodyQueue:
    """Bodies of first turns, written while the loop is idle."""

    def __init__(self, dialect: BenchDialect, conversations: list[Conversation]) -> None:
        self._dialect = dialect
        self._upcoming = iter(conversations)
        self._written: deque[tuple[ConversationWriter, bytes]] = deque()
        self._bytes = 0

    def fill(self) -> None:
        """Write bodies until a limit is reached."""
        while self.write_one():
            pass

    def write_one(self) -> bool:
        """Write the next body; return False when a limit is reached or none is left."""
        if len(self._written) >= MAX_BODIES_AHEAD or self._bytes >= MAX_BYTES_AHEAD:
            return False
        conversation = next(self._upcoming, None)
        if conversation is None:
            return False
        talk = self._dialect.talk()
        prompt = talk.add_turn(conversation.turns[0])
        self._written.append((talk, prompt))
        self._bytes += len(prompt)
        return True

    def take(self) -> tuple[ConversationWriter, bytes]:
        """Return the next body, written now where it was not written ahead."""
        if not self._written:
            self.write_one()
        talk, prompt = self._written.popleft()
        self._bytes -= len(prompt)
        return talk, prompt


@contextmanager
def quiet_gc(*, cleans: bool = True) -> Iterator[None]:
    """Allow only small garbage collections while requests are timed: a full one would delay all of
    them.

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


class LoopMonitor:
    """Measures how late the event loop wakes up, and the CPU time of this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late_s: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._cpu_s = self._wall_s = 0.0
        self._spent_s: list[tuple[float, float]] = []

    async def __aenter__(self) -> "LoopMonitor":
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
        """Return the costs since the start."""
        return ClientCost(
            cpu_s=time.process_time() - self._cpu_s,
            wall_s=self._clock.now_s() - self._wall_s,
            late_s=[round(late, 6) for late in self._late_s],
            spent_s=self._spent_s,
        )
