"""The client of an engine in a process of its own: start it, watch it, talk to it, restart it.

Given the command that starts an engine process, `ProcessClient` keeps one running. After a death, a
silence or a step that hangs it starts another, in which the requests go on behind the tokens they
had (`frontend.quarantine`).
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from headway.core.clock import Clock, SystemClock
from headway.core.errors import HeadwayError, RequestError, ShutdownError
from headway.core.records import StepRecord
from headway.core.request import Request
from headway.core.supervision import supervise
from headway.engine import messages
from headway.frontend import run_queue
from headway.frontend.answer import ResumedTokens, Stream, Streams
from headway.frontend.client import changed, died, gave_up, not_ready, read_failure
from headway.frontend.heartbeat import Heartbeat
from headway.frontend.quarantine import CrashQuarantine, poisonous, submission
from headway.frontend.retold import FirstStamp, Retold
from headway.frontend.run_queue import RunQueue
from headway.frontend.sockets import bind, private_folder, readable
from headway.frontend.text import OutputParserSpec, Tokenizer

log = logging.getLogger(__name__)

LOADING_TIMEOUT_S = 120.0
WATCH_INTERVAL_S = 0.25
STARVES_S = 2 * messages.BEAT_INTERVAL_S
"""From so long a silence on the engine's threads are looked at."""
MAX_FAILED_STARTS = 5
RESUME_WITHIN_S = 120.0
"""How long the requests of a dead engine wait for the next one."""


def environment(weights: Sequence[int]) -> dict[str, str]:
    """An engine's: ours, who started it and what memory it shares."""
    own = {messages.PARENT_VARIABLE: str(os.getpid())}
    return {**os.environ, **own, messages.WEIGHTS_VARIABLE: ",".join(map(str, weights))}


class ProcessClient:
    """One engine process, kept alive."""

    def __init__(
        self,
        command: Callable[[Path], list[str]],
        *,
        tokenizer: Tokenizer | None,
        timeout_s: float = 3.0,
        step_timeout_s: float = 120.0,
        clock: Clock | None = None,
        stamp: Callable[[], str] = lambda: "",
        on_record: Callable[[StepRecord], None] = lambda record: None,
        on_ready: Callable[[messages.Ready], None] = lambda ready: None,
        on_probe: Callable[[messages.ProbeResult], None] = lambda probed: None,
        on_death: Callable[[], None] = lambda: None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_orphans: Callable[[Streams, bool], None] = lambda streams, from_outside: None,
        poison: dict[bytes, None] | None = None,
        weights: Sequence[int] = (),
    ) -> None:
        """`stamp` tells the model's files apart: an engine that read others is not let in.

        `on_orphans` is given the streams of an engine that died, and whether it was ended from
        outside; it may take some away, the rest waits for the next engine. `poison` is shared by
        the engines of one model: requests that are not tried again. So are `weights`, descriptors
        of memory.
        """
        self.command = command
        self._files = FirstStamp(stamp)
        self._has_changed = False
        self.timeout_s = timeout_s
        self.step_timeout_s = step_timeout_s
        self.clock = clock or SystemClock()
        self.on_record = on_record
        self.on_ready = on_ready
        self.on_probe = on_probe
        self.on_death = on_death
        self.on_progress = on_progress
        self.on_orphans = on_orphans
        self._weights = tuple(weights)
        self.on_handover: Callable[[messages.HandoverNews], None] = lambda news: None
        self.info: messages.Ready | None = None
        self.status = "starting"
        self.failure: HeadwayError | None = None
        self.num_restarts = 0
        self._folder = private_folder()
        self._context = zmq.Context()
        self._generation = 0
        self._process: asyncio.subprocess.Process | None = None
        self._pair: zmq.Socket[bytes] | None = None
        self._beat: zmq.Socket[bytes] | None = None
        self._last_beat_s = self._looked_s = 0.0
        self._stopped_s = 0.0
        """For how long the engine process has been stopped (SIGSTOP), by looks at it."""
        self._heart = Heartbeat()
        self._run_queue = RunQueue()
        self._died_s: float | None = None
        self._quarantine = CrashQuarantine(poison)
        self._streams = Streams(tokenizer, self._abort, self._left)
        self.on_left: Callable[[int], None] = lambda request_id: None
        self._failed_starts = 0
        self._retold = Retold()
        self._settled = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    # ── life ────────────────────────────────────────────────────────────────────────────────

    @property
    def ready(self) -> bool:
        return self.status == "ready"

    @property
    def _resumes(self) -> bool:
        """Whether an engine that was ready has died and another one is to take its requests."""
        ends = self.status in ("draining", "failed", "stopped")
        return self._died_s is not None and self.info is not None and not ends

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    @property
    def pid(self) -> int | None:
        """The engine process's id, while there is one."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the engine and its watcher; returns at once, `settled` waits."""
        await self._spawn()
        self._watcher = supervise("engine watch", self._watch)

    async def settled(self) -> None:
        """Wait until the engine is ready; raises the HeadwayError that keeps it from starting."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    async def _spawn(self) -> None:
        self._generation += 1
        sockets = self._folder / str(self._generation)
        sockets.mkdir(mode=0o700)
        self._pair = bind(self._context, zmq.PAIR, sockets / messages.ENGINE_SOCKET, self._drain)
        self._beat = bind(self._context, zmq.PULL, sockets / messages.BEAT_SOCKET, self._hear)
        self._last_beat_s = self._looked_s = self.clock.now_s()
        self._stopped_s = 0.0
        self._heart = Heartbeat()
        self._run_queue = RunQueue()
        self._process = await asyncio.create_subprocess_exec(
            *self.command(sockets),
            stdin=asyncio.subprocess.DEVNULL,
            env=environment(self._weights),
            pass_fds=self._weights,
        )

    def _unbind(self) -> None:
        for socket in (self._pair, self._beat):
            if socket is not None:
                asyncio.get_running_loop().remove_reader(socket.FD)
                socket.close()
        self._pair = self._beat = None
        shutil.rmtree(self._folder / str(self._generation), ignore_errors=True)

    async def _watch(self) -> None:
        """Notice an engine that is dead, silent or stuck, and start another."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self._listen()
            if self._has_changed:
                await self._kill()
                self._give_up(changed())
                return
            why = self._trouble()
            if self._died_s is not None and self.clock.now_s() - self._died_s > RESUME_WITHIN_S:
                self._died_s = None
                self._fail_all(died())
            if why is None:
                continue
            failure = self._failure()
            if failure is not None:
                self._give_up(failure)
                return
            if not await self._restart(why):
                return

    def _listen(self) -> None:
        """Take what has come in; a time in which we did not look is no silence of the engine.

        A machine that stood still for a minute stood still for both: the engine speaks next. Nor
        is a time in which the engine could run and had no processor.
        """
        now_s = self.clock.now_s()
        since_s = now_s - self._looked_s
        self._last_beat_s += max(0.0, since_s - 2 * WATCH_INTERVAL_S)
        self._looked_s = now_s
        self._hear()
        self._drain()
        if self.pid is not None and now_s - self._last_beat_s > STARVES_S:
            waited_s = self._run_queue.waited_s(self.pid, min(since_s, 2 * WATCH_INTERVAL_S))
            self._last_beat_s = min(now_s, self._last_beat_s + waited_s)
        if self.pid is not None and run_queue.is_stopped(self.pid):
            self._stopped_s += min(since_s, 2 * WATCH_INTERVAL_S)
        else:
            self._stopped_s = 0.0

    def _trouble(self) -> str | None:
        """What is wrong with the engine process, or None."""
        process = self._process
        assert process is not None
        if process.returncode is not None:
            return f"ended with status {process.returncode}"
        if self._stopped_s and self._stopped_s >= self.timeout_s - 2 * WATCH_INTERVAL_S:
            return f"was stopped for {self._stopped_s:.1f} s"
        silent_s = self.clock.now_s() - self._last_beat_s
        limit_s = self.timeout_s if self.ready else max(LOADING_TIMEOUT_S, self.timeout_s)
        if silent_s >= limit_s:
            return f"was silent for {silent_s:.1f} s"
        return self._heart.trouble(self.step_timeout_s) if self.ready else None

    @property
    def _ended_from_outside(self) -> bool:
        """Whether nothing tells of a fault of its own: it was killed, or ended, or stopped."""
        assert self._process is not None
        return self._process.returncode in (0, -signal.SIGKILL, -signal.SIGTERM)

    def _failure(self) -> HeadwayError | None:
        """Why the process that has ended could not start, where it knew."""
        return read_failure(self._folder / str(self._generation) / messages.FAILURE_FILE)

    async def _restart(self, why: str) -> bool:
        """Make sure the old process is gone, start a new one, and keep the streams for it.

        While the server drains there is nothing to start it for. False when there is no new one.
        """
        draining = self.status == "draining"
        log.error("the engine process %s%s", why, "" if draining else "; starting it again")
        self._failed_starts = 0 if self.ready else self._failed_starts + 1
        self._become("restarting")
        if not draining:
            self._died_s = self._died_s or self.clock.now_s()
        await self._kill()
        self._unbind()
        self.on_death()
        if draining:
            self._fail_all(died())
            return False
        for stream in self._quarantine.charge(self._streams):
            log.error("request %d is refused for good", stream.answer.request.request_id)
            stream.fail(poisonous())
        self.on_orphans(self._streams, self._ended_from_outside)
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._give_up(HeadwayError(f"The engine process {why}, {MAX_FAILED_STARTS} times."))
            return False
        await asyncio.sleep(min(0.1 * 2**self._failed_starts - 0.1, 5.0))
        self.num_restarts += 1
        await self._spawn()
        return True

    def _become(self, status: str) -> None:
        """Take a new status; a server that drains or has stopped does not come back."""
        if self.status not in ("draining", "stopped"):
            self.status = status

    async def _kill(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()

    def _give_up(self, failure: HeadwayError) -> None:
        if self._settled.is_set():  # a first start's failure is shown by who waits for it
            log.error("the engine cannot be started again: %s", failure)
        self.failure, self.status = failure, "failed"
        self._settled.set()
        self._fail_all(gave_up())

    def _fail_all(self, error: RequestError) -> None:
        self._quarantine.clear()
        self._streams.fail_all(error)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the running ones, at most `timeout_s`."""
        self.status = "draining"
        self._send(messages.Flush())
        await self._streams.run_out(timeout_s, self.clock)
        self._fail_all(ShutdownError())

    async def stop(self) -> None:
        """End the engine and remove the sockets; safe to call twice and at any moment."""
        self.status = "stopped"
        if self._watcher is not None:
            self._watcher.cancel()
        self._fail_all(ShutdownError())
        self._send(messages.Stop())
        if self._process is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), 1.0)
        await self._kill()
        self._unbind()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ── talk ────────────────────────────────────────────────────────────────────────────────

    def _send(self, message: messages.ToEngine) -> bool:
        """Send a message; False when nobody is there to take it: not yet, or no more."""
        if self._pair is None:
            return False
        try:
            self._pair.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._heart.num_sent += 1
        # ZeroMQ's descriptor is edge-triggered: sending may swallow the edge of a message.
        asyncio.get_running_loop().call_soon(self._drain)
        return True

    def _hear(self) -> None:
        """Take the heartbeats that have come in."""
        while self._beat is not None and readable(self._beat):
            frame = self._beat.recv(zmq.NOBLOCK)
            try:
                self._heart.hear(messages.decode_beat(frame))
            except msgspec.MsgspecError:
                continue
            self._last_beat_s = self.clock.now_s()

    def _drain(self) -> None:
        """Take the messages that have come in."""
        while self._pair is not None and readable(self._pair):
            frame = self._pair.recv(zmq.NOBLOCK)
            try:
                message = messages.decode_from_engine(frame)
            except msgspec.MsgspecError:
                log.error("dropped a frame of %d bytes that is no message", len(frame))
                continue
            self._take(message)

    def _take(self, message: messages.FromEngine) -> None:
        match message:
            case messages.StepOutput(updates, record):
                self._streams.feed(updates)
                if self._quarantine.trying:
                    self._quarantine.moved(self._streams, {update.request_id for update in updates})
                self.on_record(record)
            case messages.Loading(done, total):
                self._become(f"loading {done / max(total, 1):.0%}")
                self.on_progress(done, total)
            case messages.Ready() if not self._files.are_the_first():
                self._has_changed = True
            case messages.Ready():
                self.info, self._died_s = message, None
                self._become("ready")
                for told in self._retold.again():
                    self._send(told)
                self._failed_starts = 0
                self.on_ready(message)
                self._settled.set()
                self._quarantine.begin(self._streams, self._send)
            case messages.ProbeResult():
                self.on_probe(message)
            case messages.Rejection(request_id) | messages.Shed(request_id):
                self._streams.fail(request_id, message.error())
            case messages.HandedOver() | messages.TakenOver():
                self.on_handover(message)

    def submit(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None = None,
        engine: int | None = None,
        resumed_tokens: ResumedTokens = (),
        *,
        hands_over: bool = False,
    ) -> Stream:
        """Send a request to the engine; raises EngineDownError when it takes none now.

        One that was let in while an engine died goes to the next. Where it `hands_over` it leaves
        the engine behind its next token, and `on_handover` is told.
        """
        if not self.takes:
            raise not_ready(self.status)
        self._quarantine.check(request)
        stream = self._streams.open(request, parser_spec, resumed_tokens)
        stream.hands_over = hands_over
        if self._resumes or self._quarantine.trying:
            self._quarantine.queue.append(request.request_id)
        else:  # where the engine has just died this fails, and the next one gets the request
            stream.was_sent = self._send(submission(stream))
        return stream

    def adopt(self, stream: Stream, *, on_trial: bool) -> None:
        """Go on with a request of an engine that died, behind the tokens that it was told.

        One that may have killed it is put `on_trial`: at most one at a time.
        """
        request_id = stream.answer.request.request_id
        self._streams.adopt(stream)
        if on_trial or self._quarantine.trying or not self.ready:
            self._quarantine.join(request_id)
            if self.ready:
                self._quarantine.begin(self._streams, self._send)
        else:
            stream.was_sent = self._send(submission(stream))

    def release(self, request_id: int) -> Stream | None:
        """The stream of a request that goes on elsewhere; None where nobody wants it any more."""
        self._quarantine.left(request_id)
        return self._streams.pop(request_id, None)

    def drop(self, request_id: int) -> None:
        """What the engine keeps of a request that it has handed over is wanted no more."""
        self._send(messages.ReleaseHandover(request_id))

    def forget(self, owner: bytes) -> None:
        """The engine drops the KV blocks of `owner`, and each that is started after it."""
        message = self._retold.forget(owner)
        if self.ready:
            self._send(message)

    @property
    def trying(self) -> bool:
        """Whether newcomers have to wait for requests on trial."""
        return self._quarantine.trying

    @property
    def takes(self) -> bool:
        """Whether it takes requests: now, or for the engine that is being started."""
        return self.ready or self._resumes

    def _left(self, request_id: int) -> None:
        self._quarantine.left(request_id)
        self.on_left(request_id)

    def _abort(self, request_id: int, index: int | None) -> None:
        self._send(messages.Abort(request_id, index))
