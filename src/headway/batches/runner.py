"""Runner of batches: one task per batch for its life cycle, one dispatcher that starts lines.

It continues where the last server stopped. Each answer is written once, owners take turns, and a
fault of the server (an engine that restarts, a full disk) makes a batch wait, not fail. A line
counts for the limits of its key: at a limit the owner's lines pause while others' run. A line that
was running when the engine died runs again alone, once; a second death is attributed to it.

Many lines run at once while there are no other requests, one while there are (`Lane`):

    lines in flight   others in flight   may another start?
    0 … limit - 1     0                  yes
    0                 1 or more          yes: a batch never starves
    1 or more         1 or more          no: running lines finish, none follows

A request counts for a second longer than it runs, so that a batch does not fill every pause of a
conversation. The engine also runs these lines in an idle class; the lane keeps them out of its
slots and its memory.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.batches.call import LineAnswer, batch_body, call
from headway.batches.host import BatchHost
from headway.batches.lines import (
    MESSAGES,
    BatchLine,
    Checked,
    check_file,
    check_messages,
    read_body,
)
from headway.batches.results import answer_result, message_result
from headway.batches.store import Batches, BatchRecord
from headway.core.errors import RequestError, ServerFaultError, StorageError
from headway.core.supervision import supervise
from headway.edge.database import IN_USE, storage_errors
from headway.edge.errors import error_body
from headway.edge.keys import Caller

log = logging.getLogger(__name__)

Result = TypeVar("Result")
FETCH_BATCH_LINES = 256
MAX_TRIES = 2
WAIT_S = 0.5
READY_WAIT_S = 0.1
DISK_WAIT_S = 2.0
ENGINE_SHARE_DIVISOR = 4
SWEEP_S = 60.0
MIN_REST_S = 0.02
MISSING_KEY_RETRY_S = 5.0
"""Interval of looking for a deleted key: one of the same name may be created."""
LIMITED, FULL = 429, 503
"""Statuses that ask for a retry: after the first the owner pauses, after the second the line."""
ENGINE_DIED = "engine_died"
MAX_LINES_WITH_OTHERS = 1
REQUEST_LINGER_S = 1.0


@dataclass(slots=True, eq=False)
class BatchJob:
    """A batch in progress: its waiting lines, and the tasks of its running lines.

    `held` is the line that waits for a place in the lane, `failure` an unexpected exception of one.
    """

    batch: BatchRecord
    waiting: deque[BatchLine] = field(default_factory=deque)
    alone: deque[BatchLine] = field(default_factory=deque)
    held: BatchLine | None = None
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
        """Set `over` when no line runs or waits."""
        if not self.running and not self.has_lines:
            self.over.set()

    def stop(self) -> None:
        """Start no more lines and cancel the running ones, which get no answer."""
        self.stopped = True
        for task in self.running:
            task.cancel()
        self.check_over()


class Lane:
    """Counter of running lines and of other requests; one dispatcher waits in `enter`, `empty`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.busy = 0
        self.others = 0
        self._changed = asyncio.Event()

    @property
    def free(self) -> bool:
        """Return whether a line may start now."""
        return self.busy < (MAX_LINES_WITH_OTHERS if self.others else self.limit)

    async def enter(self) -> None:
        """Wait for a place and take it."""
        while not self.free:
            self._changed.clear()
            await self._changed.wait()
        self.busy += 1

    async def empty(self, but: int) -> None:
        """Wait until at most `but` places are taken."""
        while self.busy > but:
            self._changed.clear()
            await self._changed.wait()

    def leave(self) -> None:
        """Give the place back."""
        assert self.busy > 0
        self.busy -= 1
        self._changed.set()

    def forget(self) -> None:
        """Stop counting one of the other requests."""
        self.others -= 1
        self._changed.set()

    def count_requests(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with its requests counted as others while they run."""
        return ForegroundApp(self, app)


class ForegroundApp:
    """Endpoint whose requests have priority over the lines of batches."""

    def __init__(self, lane: Lane, app: ASGIApp) -> None:
        self._lane = lane
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._lane.others += 1
        try:
            await self._app(scope, receive, send)
        finally:
            asyncio.get_running_loop().call_later(REQUEST_LINGER_S, self._lane.forget)


class Runner:
    """All unfinished batches of one data folder."""

    def __init__(self, state: BatchHost, batches: Batches) -> None:
        self.state = state
        self.batches = batches
        self.files = batches.files
        self.endpoints: dict[str, ASGIApp] = {}
        self.lane = Lane(1)
        self._jobs: dict[str, BatchJob] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._disk_is_full = False
        self._turn = ""
        self._rests: dict[str, asyncio.TimerHandle] = {}
        """Owner whose lines are paused → timer that ends the pause."""

    # ── life ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Resume the unfinished batches of an earlier server; called once, before any request."""
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
        """Cancel all batches, which the next server resumes, and close the database."""
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
        """Start the task of an unfinished batch."""
        task = asyncio.create_task(self._live(batch_id))
        self._lives[batch_id] = task
        task.add_done_callback(lambda _: self._lives.pop(batch_id, None))

    def cancel(self, batch_id: str) -> None:
        """Cancel the lines of a batch that is cancelling."""
        job = self._jobs.get(batch_id)
        if job is not None:
            job.stop()

    async def _sweep(self) -> None:
        """Delete expired files, once a minute."""
        while True:
            if self.batches.database.is_open:
                try:
                    await self.files.remove_expired()
                except StorageError as error:
                    log.warning("expired files stay for now: %s", error)
            await asyncio.sleep(SWEEP_S)

    # ── one batch ───────────────────────────────────────────────────────────────────────────

    async def _live(self, batch_id: str) -> None:
        """Run the life cycle of a batch: validate, run the lines, write the files."""
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

    async def read_lines(self, batch: BatchRecord) -> Checked:
        """Return the lines of a batch's input and their faults."""
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

    async def _validate(self, batch: BatchRecord) -> BatchRecord:
        async def work() -> BatchRecord:
            return await self.batches.begin(batch.id, await self.read_lines(batch))

        return await self._patiently(work)

    async def _run_lines(self, batch: BatchRecord) -> BatchRecord:
        job = self._jobs[batch.id] = BatchJob(batch)
        expired = False
        try:
            now = await self._patiently(lambda: self.batches.get(batch.id))
            if now.status == "cancelling":  # since it was checked, when there was no job to stop
                job.stop()
            self._woken.set()
            remaining_s = max(0.0, batch.expires_at - self.files.clock.wall_s())
            async with asyncio.timeout(remaining_s):
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
        """Return the result of `work`, retried while the disk is full."""
        while True:
            try:
                result = await work()
            except StorageError as error:
                if not self._disk_is_full:
                    log.error("batches wait: %s", error)
                self._disk_is_full = True
                await asyncio.sleep(DISK_WAIT_S)
            else:
                if self._disk_is_full:
                    log.warning("batches go on")
                self._disk_is_full = False
                return result

    # ── lines ───────────────────────────────────────────────────────────────────────────────

    async def _dispatch(self) -> None:
        """Start lines, the owners in turn, while the lane has a place."""
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

    async def _start_line(self, job: BatchJob) -> None:
        """Start the next line of a batch when the lane has a place; a retried line runs alone."""
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

    def _enter(self, job: BatchJob) -> Caller | None:
        """Return the owner as the caller of a line, counted from now on; None: the owner pauses."""
        principal, keyring = job.batch.principal, self.state.keyring
        owner = keyring.named(principal.name)
        if owner is None:
            log.debug("batch %s waits: there is no key %s", job.batch.id, principal.name)
            self._rest(principal.name, MISSING_KEY_RETRY_S)
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
        """Pause the owner's lines for some time, or until one of them has ended."""
        self._end_rest(owner)
        loop, seconds = asyncio.get_running_loop(), max(seconds, MIN_REST_S)
        self._rests[owner] = loop.call_later(seconds, self._end_rest, owner)

    def _end_rest(self, owner: str) -> None:
        """End the pause of an owner's lines. No clock is read: timers of a loop may be early."""
        timer = self._rests.pop(owner, None)
        if timer is not None:
            timer.cancel()
        self._woken.set()

    def _limit(self, job: BatchJob) -> int:
        """Return how many lines run at once: the option, or a share of the engine's sequences."""
        option = self.state.options.batch_concurrency
        at_once = self.state.num_at_once(job.batch.model or "")
        return option or max(1, at_once // ENGINE_SHARE_DIVISOR)

    def _next_job(self) -> BatchJob | None:
        """Return the oldest batch with waiting lines of the next owner, in turn."""
        first: dict[str, BatchJob] = {}
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

    async def _next_line(self, job: BatchJob) -> BatchLine | None:
        """Return the next line of a batch, or None."""
        if not job.waiting and not job.exhausted:
            lines = await self._patiently(
                lambda: self.batches.waiting(job.batch.id, job.fetched, FETCH_BATCH_LINES)
            )
            job.exhausted = len(lines) < FETCH_BATCH_LINES
            job.fetched = lines[-1].number if lines else job.fetched
            job.waiting.extend(line for line in lines if not line.tries)
            job.alone.extend(line for line in lines if line.tries)
        if job.stopped:
            return None
        if job.waiting:
            return job.waiting.popleft()
        return job.alone.popleft() if job.alone else None

    async def _answer(self, job: BatchJob, line: BatchLine, caller: Caller) -> bool:
        """Run a line and store its answer, or put it back; return whether it counts for its key.

        A line that met a limit of its key goes back and does not count. A line during which the
        engine died runs again alone.
        """
        batch_id = job.batch.id
        answer = await self._ask_patiently(job.batch, line, caller)
        if answer.status == LIMITED:
            (job.alone if line.tries else job.waiting).appendleft(line)
            self._rest(caller.principal.name, answer.retry_after_s or WAIT_S)
            return False
        if answer.code == ENGINE_DIED:
            await self._patiently(lambda: self.batches.tried(batch_id, line.number))
            if line.tries + 1 < MAX_TRIES:
                job.alone.append(replace(line, tries=line.tries + 1))
                return True
            answer = error_answer(ServerFaultError("The engine died of this line, twice."))
        write = message_result if job.batch.endpoint == MESSAGES else answer_result
        result = write(line.custom_id, answer.status, answer.request_id, answer.body)
        await self._patiently(lambda: self.batches.finish_line(batch_id, line.number, result))
        return True

    def _line_ended(self, job: BatchJob, caller: Caller, task: asyncio.Task[bool]) -> None:
        """Release the place and the counts of a line, however its task ended.

        A task that is cancelled before its first step never enters its own `finally`. An unexpected
        exception ends the batch in this process; the next start resumes it.
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

    async def _ask_patiently(
        self, batch: BatchRecord, line: BatchLine, caller: Caller
    ) -> LineAnswer:
        """Return the answer of a line, retried while the server is full."""
        model = batch.model or ""
        while True:
            while not self.state.takes_lines(model):
                await asyncio.sleep(READY_WAIT_S)
            answer = await self._ask(batch, line, caller)
            if answer.status != FULL or answer.code == ENGINE_DIED:
                return answer
            await asyncio.sleep(WAIT_S)

    async def _ask(self, batch: BatchRecord, line: BatchLine, caller: Caller) -> LineAnswer:
        try:
            path = self.files.path(batch.input_file_id)
            url, body = await asyncio.to_thread(read_body, path, line)
            body = batch_body(body)
        except RequestError as error:
            return error_answer(error)
        except OSError as error:
            log.error("the input of batch %s cannot be read: %s", batch.id, error)
            return error_answer(ServerFaultError("The line can no longer be read."))
        return await call(self.endpoints[url], url, body, caller, line.custom_id)


def error_answer(error: RequestError) -> LineAnswer:
    """Return the answer of a line that did not reach an endpoint."""
    return LineAnswer(
        status=error.status, body=msgspec.json.encode(error_body(error)), request_id=""
    )
