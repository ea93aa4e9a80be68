"""Runs batches: one task a batch that lives its life, one dispatcher that starts lines in turn.

Given the stores and the endpoints it goes on where the last server stopped. It promises that each
line's answer is written once, that owners take turns, and that what is our fault (an engine that is
restarting, a full disk) makes a batch wait, not fail. A line counts for its key: where that has a
limit the owner rests until it may go on, and others' lines run. A line that was running when the
engine died runs again alone, once: if the engine dies again it was this line.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import msgspec
from starlette.types import ASGIApp

from headway.batches.call import Answer, batch_body, call
from headway.batches.host import Host
from headway.batches.lane import Lane
from headway.batches.lines import MESSAGES, Checked, Line, check_file, check_messages, read_body
from headway.batches.results import answered, message_answered
from headway.batches.store import Batch, Batches
from headway.core.errors import RequestError, ServerFaultError, StorageError
from headway.core.supervision import supervise
from headway.edge.database import IN_USE, storage_errors
from headway.edge.errors import error_body
from headway.edge.keys import Caller

log = logging.getLogger(__name__)

Result = TypeVar("Result")
FETCHED_LINES = 256
MOST_TRIES = 2
WAIT_S = 0.5
READY_WAIT_S = 0.1
DISK_WAIT_S = 2.0
SHARE_OF_ENGINE = 4
SWEEP_S = 60.0
LEAST_REST_S = 0.02
NO_KEY_S = 5.0
"""How often it is looked for a key that is no longer there: one of the same name may come back."""
LIMITED, FULL = 429, 503
"""Answers that say: later. At the first the owner rests, at the second the line waits."""
ENGINE_DIED = "engine_died"


@dataclass(slots=True, eq=False)
class Job:
    """A batch in progress: the lines that wait, and the tasks of those that run.

    `held` is the line that waits for its place, `failure` what nobody expected of one.
    """

    batch: Batch
    waiting: deque[Line] = field(default_factory=deque)
    alone: deque[Line] = field(default_factory=deque)
    held: Line | None = None
    failure: BaseException | None = None
    running: set[asyncio.Task[bool]] = field(default_factory=set)
    fetched: int = 0
    exhausted: bool = False
    stopped: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_lines(self) -> bool:
        waits = self.waiting or self.alone or self.held or not self.exhausted
        return not self.stopped and bool(waits)

    def check_over(self) -> None:
        """Tell when nothing runs and nothing will."""
        if not self.running and not self.has_lines:
            self.over.set()

    def stop(self) -> None:
        """Start no more lines and drop those that run; they have no answer."""
        self.stopped = True
        for task in self.running:
            task.cancel()
        self.check_over()


class Runner:
    """All unfinished batches of one data folder."""

    def __init__(self, state: Host, batches: Batches) -> None:
        self.state = state
        self.batches = batches
        self.files = batches.files
        self.endpoints: dict[str, ASGIApp] = {}
        self.lane = Lane(1)
        self._jobs: dict[str, Job] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._disk_told = False
        self._turn = ""
        self._rests: dict[str, asyncio.TimerHandle] = {}
        """Owner none of whose lines begins → what ends that."""

    # ── life ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Go on with what an earlier server left; called once, before the first request."""
        self._tasks = [
            supervise("batch dispatch", self._dispatch),
            supervise("file expiry", self._sweep),
        ]
        try:
            await self.batches.database.claim()
            unfinished = await self.batches.unfinished() if self.batches.database.exists else []
        except StorageError as error:
            level = logging.WARNING if error.code == IN_USE else logging.ERROR
            log.log(level, "files and batches are not served here: %s", error)
            return
        for batch_id in unfinished:
            self.take(batch_id)

    async def stop(self) -> None:
        """Drop what runs, to be gone on with by the next server, and close the database."""
        tasks = [*self._tasks, *self._lives.values()]
        for task in tasks:
            task.cancel()
        for job in self._jobs.values():
            job.stop()
        lines = [task for job in self._jobs.values() for task in job.running]
        await asyncio.gather(*tasks, *lines, return_exceptions=True)
        self._tasks.clear()
        await self.batches.database.close()

    def take(self, batch_id: str) -> None:
        """Live the life of an unfinished batch."""
        task = asyncio.create_task(self._live(batch_id))
        self._lives[batch_id] = task
        task.add_done_callback(lambda _: self._lives.pop(batch_id, None))

    def cancel(self, batch_id: str) -> None:
        """The batch is cancelling: its lines end now."""
        job = self._jobs.get(batch_id)
        if job is not None:
            job.stop()

    async def _sweep(self) -> None:
        """Delete files past their time."""
        while True:
            if self.batches.database.is_open:
                try:
                    await self.files.remove_expired()
                except StorageError as error:
                    log.warning("expired files stay for now: %s", error)
            await asyncio.sleep(SWEEP_S)

    # ── one batch ───────────────────────────────────────────────────────────────────────────

    async def _live(self, batch_id: str) -> None:
        """The life of a batch: validate, run the lines, write the files."""
        try:
            batch = await self._patiently(lambda: self.batches.get(batch_id))
            if batch.status == "validating":
                batch = await self._validate(batch)
            if batch.status == "in_progress":
                batch = await self._run_lines(batch)
            if batch.status in ("finalizing", "cancelling"):
                batch = await self._patiently(lambda: self.batches.finalize(batch_id))
            log.debug("batch %s is %s", batch_id, batch.status)
        except Exception:
            # Not again in this process: a line that broke it would break it again.
            log.exception("batch %s stopped; the next start goes on with it", batch_id)

    async def read_lines(self, batch: Batch) -> Checked:
        """The lines of a batch's input, and what is wrong with them."""
        path, state = self.files.path(batch.input_file_id), self.state

        def check() -> Checked:
            with storage_errors():
                if batch.endpoint == MESSAGES:
                    return check_messages(path, models=state.model_names, unnamed=state.unnamed)
                return check_file(
                    path,
                    endpoints=(batch.endpoint,),
                    models=state.model_names,
                    unnamed=state.unnamed,
                    max_line_bytes=state.options.max_body,
                )

        return await asyncio.to_thread(check)

    async def _validate(self, batch: Batch) -> Batch:
        async def work() -> Batch:
            return await self.batches.begin(batch.id, await self.read_lines(batch))

        return await self._patiently(work)

    async def _run_lines(self, batch: Batch) -> Batch:
        job = self._jobs[batch.id] = Job(batch)
        expired = False
        try:
            now = await self._patiently(lambda: self.batches.get(batch.id))
            if now.status == "cancelling":  # since it was checked, when there was no job to stop
                job.stop()
            self._woken.set()
            left_s = max(0.0, batch.expires_at - self.files.clock.wall_s())
            async with asyncio.timeout(left_s):
                await job.over.wait()
        except TimeoutError:
            expired = True
            job.stop()
            await job.over.wait()
        finally:
            self._jobs.pop(batch.id, None)
        if job.failure is not None:
            raise job.failure
        return await self._patiently(lambda: self.batches.close_lines(batch.id, expired=expired))

    async def _patiently(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """`work`, again and again while the disk is full."""
        while True:
            try:
                result = await work()
            except StorageError as error:
                if not self._disk_told:
                    log.error("batches wait: %s", error)
                self._disk_told = True
                await asyncio.sleep(DISK_WAIT_S)
            else:
                if self._disk_told:
                    log.warning("batches go on")
                self._disk_told = False
                return result

    # ── lines ───────────────────────────────────────────────────────────────────────────────

    async def _dispatch(self) -> None:
        """Start lines, the owners in turn, as long as there is a place for another."""
        while True:
            job = self._next_job()
            if job is None:
                self._woken.clear()
                await self._woken.wait()
                continue
            try:
                await self._start_line(job)
            except Exception:
                log.exception("no line of batch %s could be started", job.batch.id)
                await asyncio.sleep(WAIT_S)

    async def _start_line(self, job: Job) -> None:
        """Start the job's next line when there is a place; a line tried before runs alone."""
        self.lane.limit = self._limit(job)
        await self.lane.enter()
        task = caller = line = None
        try:
            caller = self._enter(job)
            line = job.held = await self._next_line(job) if caller is not None else None
            if caller is not None and line is not None:
                await self.lane.empty(but=1 if line.tries else self.lane.busy)
            if caller is not None and line is not None and not job.stopped:
                task = asyncio.create_task(self._answer(job, line, caller))
                job.running.add(task)
                task.add_done_callback(partial(self._line_ended, job, caller))
        finally:
            job.held = None
            if task is None:
                if caller is not None:
                    caller.meter.leave(counted=False)
                self.lane.leave()
                job.check_over()
        if task is not None and line is not None and line.tries:
            await asyncio.wait({task})

    def _enter(self, job: Job) -> Caller | None:
        """The owner as the caller of a line, which counts from now on; None: the owner rests."""
        principal, keyring = job.batch.principal, self.state.keyring
        owner = keyring.named(principal.name)
        if owner is None:
            log.debug("batch %s waits: there is no key %s", job.batch.id, principal.name)
            self._rest(principal.name, NO_KEY_S)
            return None
        who = owner.principal if keyring else principal
        caller = owner.for_lines(
            msgspec.structs.replace(who, service_class=job.batch.price.service_class)
        )
        try:
            caller.meter.enter(spare=True)
        except RequestError as error:
            self._rest(principal.name, error.retry_after_s or WAIT_S)
            return None
        return caller

    def _rest(self, owner: str, seconds: float) -> None:
        """Begin no line of the owner's for a while, or until one of them has ended."""
        self._end_rest(owner)
        loop, seconds = asyncio.get_running_loop(), max(seconds, LEAST_REST_S)
        self._rests[owner] = loop.call_later(seconds, self._end_rest, owner)

    def _end_rest(self, owner: str) -> None:
        """Let the owner's lines begin again; no clock is asked: a loop's timers may be early."""
        timer = self._rests.pop(owner, None)
        if timer is not None:
            timer.cancel()
        self._woken.set()

    def _limit(self, job: Job) -> int:
        """How many lines run at once: as told, or a share of what the engine runs at once."""
        told_limit = self.state.options.batch_concurrency
        at_once = self.state.num_at_once(job.batch.model or "")
        return told_limit or max(1, at_once // SHARE_OF_ENGINE)

    def _next_job(self) -> Job | None:
        """The oldest batch with lines of the owner whose turn it is."""
        first: dict[str, Job] = {}
        for job in self._jobs.values():
            owner = job.batch.principal.name
            served = job.batch.model in self.state.model_names
            if job.has_lines and served and owner not in self._rests:
                first.setdefault(owner, job)
        if not first:
            return None
        owners = sorted(first)
        self._turn = next((name for name in owners if name > self._turn), owners[0])
        return first[self._turn]

    async def _next_line(self, job: Job) -> Line | None:
        """A line of the job, or None when there is none after all."""
        if not job.waiting and not job.exhausted:
            lines = await self._patiently(
                lambda: self.batches.waiting(job.batch.id, job.fetched, FETCHED_LINES)
            )
            job.exhausted = len(lines) < FETCHED_LINES
            job.fetched = lines[-1].number if lines else job.fetched
            job.waiting.extend(line for line in lines if not line.tries)
            job.alone.extend(line for line in lines if line.tries)
        if job.stopped:
            return None
        if job.waiting:
            return job.waiting.popleft()
        return job.alone.popleft() if job.alone else None

    async def _answer(self, job: Job, line: Line, caller: Caller) -> bool:
        """Ask until there is an answer to keep, and keep it; or leave the line for later.

        One that met a limit of its key goes back and counts for nothing; one during which the
        engine died runs again alone. Returns whether the line counts for its key.
        """
        batch_id = job.batch.id
        answer = await self._ask_patiently(job.batch, line, caller)
        if answer.status == LIMITED:
            (job.alone if line.tries else job.waiting).appendleft(line)
            self._rest(caller.principal.name, answer.retry_after_s or WAIT_S)
            return False
        if answer.code == ENGINE_DIED:
            await self._patiently(lambda: self.batches.tried(batch_id, line.number))
            if line.tries + 1 < MOST_TRIES:
                job.alone.append(replace(line, tries=line.tries + 1))
                return True
            answer = refused(ServerFaultError("The engine died of this line, twice."))
        write = message_answered if job.batch.endpoint == MESSAGES else answered
        result = write(line.custom_id, answer.status, answer.request_id, answer.body)
        await self._patiently(lambda: self.batches.finish_line(batch_id, line.number, result))
        return True

    def _line_ended(self, job: Job, caller: Caller, task: asyncio.Task[bool]) -> None:
        """Give back what a line held, however its task ended.

        A task that is cancelled before its first step never enters its own `finally`. One that
        failed in a way nobody expected ends the batch here; the next start goes on with it.
        """
        failure = None if task.cancelled() else task.exception()
        counted = task.cancelled() or failure is not None or task.result()
        job.running.discard(task)
        if failure is not None:
            job.failure = failure
            job.stop()
        caller.meter.leave(counted=counted)
        if counted:
            self._end_rest(caller.principal.name)
        self.lane.leave()
        job.check_over()
        self._woken.set()

    async def _ask_patiently(self, batch: Batch, line: Line, caller: Caller) -> Answer:
        """The line's answer, however often the server is full."""
        model = batch.model or ""
        while True:
            while not self.state.takes_lines(model):
                await asyncio.sleep(READY_WAIT_S)
            answer = await self._ask(batch, line, caller)
            if answer.status != FULL or answer.code == ENGINE_DIED:
                return answer
            await asyncio.sleep(WAIT_S)

    async def _ask(self, batch: Batch, line: Line, caller: Caller) -> Answer:
        try:
            path = self.files.path(batch.input_file_id)
            url, body = await asyncio.to_thread(read_body, path, line)
            body = batch_body(body)
        except RequestError as error:
            return refused(error)
        except OSError as error:
            log.error("the input of batch %s cannot be read: %s", batch.id, error)
            return refused(ServerFaultError("The line can no longer be read."))
        return await call(self.endpoints[url], url, body, caller, line.custom_id)


def refused(error: RequestError) -> Answer:
    """A line that never reached an endpoint, or must not again."""
    return Answer(status=error.status, body=msgspec.json.encode(error_body(error)), request_id="")
