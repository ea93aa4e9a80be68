"""The server's side of `--retune`: what it sees of its model, and the process that simulates."""

import asyncio
import contextlib
import copy
import logging
from collections import deque
from itertools import islice
from typing import Protocol

import msgspec

from headway.advise.retune.controller import Controller
from headway.advise.retune.question import (
    LENGTH_BYTES,
    MOST_BYTES,
    Answer,
    Question,
    decode_answer,
    encoded,
)
from headway.core.live_settings import Changes
from headway.core.resolve import Settings
from headway.telemetry.calibration import Calibration, take_calibration
from headway.telemetry.lately import Judged, judged_lately
from headway.telemetry.live import Telemetry
from headway.telemetry.retuning import Retune
from headway.telemetry.traffic import Origin, Stretch, stretch_since

log = logging.getLogger(__name__)

TICK_S = 5.0
ANSWER_WITHIN_S = 600.0
"""Beside an engine that has all cores a question gets a tenth of one: 8 s of CPU are 80 s."""
MOST_FAILURES = 3
MOST_STEPS, MOST_REQUESTS, STEPS_S = 8192, 1024, 300.0
"""Of the newest steps and requests, and how far back they go: all of them would be 0.1 s of Python
beside the event loop."""


class Model(Protocol):
    """Of a served model what is needed here."""

    telemetry: Telemetry

    def origin(self) -> Origin | None: ...

    def change_settings(self, changes: Changes) -> None: ...


class LiveSight:
    """A running server. What is made of what it sees takes its time, 30 ms of a server of 160
    requests a second, so that is done on another thread; what it does is done by the server's own
    loop."""

    def __init__(self, model: Model) -> None:
        self.model, self._loop = model, asyncio.get_running_loop()
        self._held = as_now(model.telemetry)

    def look(self) -> None:
        """From now on it sees what is known now."""
        self._held = as_now(self.model.telemetry)

    def now_s(self) -> float:
        return self.model.telemetry.clock.now_s()

    def judged(self, since_s: float) -> list[Judged]:
        return judged_lately(self._held, since_s)

    def settings(self) -> Settings | None:
        origin = self.model.origin()
        return None if origin is None else origin.settings

    def calibration(self) -> Calibration | None:
        found = take_calibration(self._held, self.now_s() - STEPS_S)
        if found is not None:
            found.traffic, found.origin = [], self.model.origin()
        return found

    def stretch(self, since_s: float) -> Stretch:
        return stretch_since(self._held, since_s)

    def change(self, changes: Changes) -> None:
        self._loop.call_soon_threadsafe(self.model.change_settings, changes)

    def count(self, told: Retune) -> None:
        """A change was kept or undone."""
        add = self.model.telemetry.registry.add
        self._loop.call_soon_threadsafe(add, "retunes", 1, told.outcome)


def as_now(telemetry: Telemetry) -> Telemetry:
    """The same with the newest steps and requests alone, which no longer grow."""
    held = copy.copy(telemetry)
    held.slots = telemetry.slots.held()
    held.steps = deque(list(islice(reversed(telemetry.steps), MOST_STEPS))[::-1])
    held.finished = deque(list(islice(reversed(telemetry.finished), MOST_REQUESTS))[::-1])
    return held


class Asker:
    """The process that simulates: started with the first question, and again when it has died."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, question: Question) -> Answer:
        """Its answer; raises OSError, EOFError, TimeoutError or MsgspecError where none comes."""
        process = self._process
        if process is None or process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            process = self._process = await asyncio.create_subprocess_exec(
                *self.command, stdin=pipe, stdout=pipe, limit=MOST_BYTES
            )
        assert process.stdin is not None and process.stdout is not None
        body = await asyncio.to_thread(encoded, question)
        async with asyncio.timeout(ANSWER_WITHIN_S):
            process.stdin.write(body)
            await process.stdin.drain()
            length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
            return decode_answer(await process.stdout.readexactly(length))

    async def stop(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Retuner:
    """Keeps a model's settings with its traffic from the moment its engine is ready."""

    def __init__(self, model: Model, command: list[str]) -> None:
        self.model, self._asker = model, Asker(command)
        self._num_failures = 0

    async def run(self) -> None:
        """Until it is cancelled; a fault of its own ends it alone, and is logged."""
        try:
            await self._follow()
        except Exception:
            log.exception("retuning failed; the settings stay as they are")
        finally:
            await self._asker.stop()

    async def _follow(self) -> None:
        sight = LiveSight(self.model)
        while (started := sight.settings()) is None:
            await asyncio.sleep(TICK_S)
        controller = Controller(sight, started, sight.count)
        self.model.telemetry.retuning = controller.told
        while self._num_failures < MOST_FAILURES:
            await self.step(controller, sight)
            self.model.telemetry.registry.set("retune_cpu_seconds", controller.told.cpu_s)
            await asyncio.sleep(TICK_S)
        controller.told.state = "given up: its process has failed too often"
        log.error("retuning is given up: its process has failed %d times", MOST_FAILURES)

    async def step(self, controller: Controller, sight: LiveSight) -> None:
        """Ask where there is something to ask."""
        sight.look()
        question = await asyncio.to_thread(controller.tick)
        if question is None:
            return
        try:
            answer = await self._asker.ask(question)
        except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
            self._num_failures += 1
            log.error("the process of --retune failed: %r", error)
            await self._asker.stop()
            controller.gave_up("its process failed")
            return
        self._num_failures = 0
        sight.look()
        await asyncio.to_thread(controller.take, answer)
