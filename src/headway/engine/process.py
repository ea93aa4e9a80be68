"""The engine's own process: messages in, steps, messages out, and a heartbeat beside them.

Given the socket folder and a function that builds the engine, it tells of loading, runs steps
while there is work and waits while there is none. It ends when told to, or when its parent is gone.
Where it was joined to other engines, requests go on there and come from there (`handover.py`).
"""

import contextlib
import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from headway.core.clock import SystemClock
from headway.core.errors import ExecutorLostError, HeadwayError, RequestError, ShedError
from headway.core.orphans import wake_when_orphaned
from headway.core.plan import AwaitingExecutor
from headway.engine import messages
from headway.engine.calibration import pace_alone
from headway.engine.engine import Engine
from headway.engine.handover import Handover

log = logging.getLogger(__name__)

IDLE_POLL_MS = 500
START_PROBE_S = 1.0
IDLE_PROBE_EVERY_S, RARER, AT_LEAST_EVERY_S = 5.0, 1.2, 60.0
"""Idle moments are probed every 5 s at first, then ever more rarely, for the best changes less."""
CHECK_SHARE = 0.01
"""Of the time, what checks of the engine in silent moments may take."""
COMPUTES_S = 1e-3
"""Of processor time since the beat saw it move last: a step that has used less is still."""
Progress = Callable[[int, int], None]
Join = Callable[[Engine, str], Handover]
"""Joins an engine to others, who fetch its blocks at this address."""


class LoopProgress:
    """Since when the loop is busy with one thing, written by the loop and read by the beat.

    It is made on the loop's thread, whose processor time says whether the loop computes: on a busy
    machine a step goes on slowly, and one that is held does not go on. Where the thread sleeps
    while others compute its step, `watch` knows of them.
    """

    __slots__ = (
        *("_begin_s", "_clock", "_clocks", "_looked_s", "_moved_s", "_since_s", "_step_s"),
        *("_still_s", "longest_s", "num_messages"),
    )

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._since_s: float | None = None
        self.longest_s, self.num_messages = 0.0, 0
        self._clocks: list[int] = []
        """The processor clock of each thread or process that computes; none where unknown."""
        if sys.platform == "linux":
            self._clocks = [time.pthread_getcpuclockid(threading.get_ident())]
        self._step_s: float | None = None
        """The step that the beat has seen: since when, of processor times its begin and its last
        move, and how long it did not move up to the last look."""
        self._begin_s: list[float] = []
        self._moved_s: list[float] = []
        self._still_s = self._looked_s = 0.0

    def watch(self, engine: Engine) -> None:
        """Know who computes the steps of `engine` beside the loop's thread: ranks that this waits
        for asleep, or a GPU, of which no clock tells, so that all of a step counts as computed."""
        if engine.settings.device == "cuda":
            self._clocks = []
        elif self._clocks and isinstance(engine.executor, AwaitingExecutor):
            self._clocks = [*self._clocks, *map(clock_of, engine.executor.awaited)]

    def __enter__(self) -> None:
        self._since_s = self._clock.now_s()

    def __exit__(self, *_: object) -> None:
        self.longest_s = max(self.longest_s, self.busy_s)
        self._since_s = None

    @property
    def busy_s(self) -> float:
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock.now_s() - since_s

    def beat(self) -> messages.Beat:
        """What the server is told; a machine that stood still between two looks was no long step.

        Looks every 0.5 s at a step that is held from its second 1.2 on: 0.5, 1 and 1.5 s busy, and
        still for 0, 0 and 0.5 s. Where the clocks are unknown all of the time counts as computed.
        """
        busy_s, now_s = self.busy_s, self._clock.now_s()
        if not self._clocks:
            return messages.Beat(busy_s, self.longest_s, 0.0, busy_s, self.num_messages)
        used_s = [processor_s(clock) for clock in self._clocks]
        if self._since_s != self._step_s:
            self._step_s, self._begin_s, self._moved_s = self._since_s, used_s, used_s
            self._still_s = 0.0
        elif busy_s == 0 or most_since(self._moved_s, used_s) >= COMPUTES_S:
            self._moved_s, self._still_s = used_s, 0.0
        else:
            self._still_s += min(now_s - self._looked_s, 2 * messages.BEAT_INTERVAL_S)
        self._looked_s = now_s
        computed_s = most_since(self._begin_s, used_s) if busy_s else 0.0
        return messages.Beat(busy_s, self.longest_s, self._still_s, computed_s, self.num_messages)


def clock_of(pid: int) -> int:
    """The clock of a process's processor time, as Linux numbers them (clock_getcpuclockid)."""
    return ~pid << 3 | 2


def processor_s(clock: int) -> float:
    """The processor time of a clock; 0 where its process is gone."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def most_since(before_s: list[float], now_s: list[float]) -> float:
    """The most that any of them has computed since."""
    return max((now - then for then, now in zip(before_s, now_s, strict=False)), default=0.0)


def serve_engine(
    sockets: Path, build: Callable[[Progress], Engine], join: Join | None = None
) -> int:
    """Run until told to stop; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's: it drains first
    parent = int(os.environ.get(messages.PARENT_VARIABLE, os.getppid()))
    wake_when_orphaned()
    context = zmq.Context()
    pair = connect(context, zmq.PAIR, sockets / messages.ENGINE_SOCKET)
    pulse = LoopProgress()
    threading.Thread(target=beat, args=(context, sockets, parent, pulse), daemon=True).start()
    try:
        engine = build(tell_progress(pair))
        address = f"unix:{sockets / messages.BLOCKS_SOCKET}"
        handover = join(engine, address) if join is not None else None
    except HeadwayError as error:
        failure = messages.Failed(error.cause, error.fix, error.exit_code)
        (sockets / messages.FAILURE_FILE).write_bytes(messages.encode(failure))
        return error.exit_code
    pulse.watch(engine)
    engine.executor.probe(START_PROBE_S)
    if engine.grammars is not None:
        engine.grammars.prepare()
    pair.send(messages.encode(introduction(engine)))
    gc.collect()
    gc.freeze()  # a full collection would visit 180,000 objects of torch: 40 ms, more than a step
    try:
        run(engine, pair, pulse, handover)
    except ExecutorLostError as error:
        log.error("The engine ends and begins again, and its requests go on: %s", error)
        return 1
    pair.close(linger=2000)
    return 0


def connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, path: Path) -> zmq.Socket[bytes]:
    """A socket connected to `path`, unbounded, with a cap on the size of one message."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
    socket.connect(f"ipc://{path}")
    return socket


def beat(
    context: zmq.Context[zmq.Socket[bytes]], sockets: Path, parent: int, pulse: LoopProgress
) -> None:
    """Say twice a second that the process lives; end it when the server, its parent, is gone."""
    socket = connect(context, zmq.PUSH, sockets / messages.BEAT_SOCKET)
    while os.getppid() == parent:
        socket.send(messages.encode(pulse.beat()))
        time.sleep(messages.BEAT_INTERVAL_S)
    remove_sockets(sockets)
    os._exit(1)


def remove_sockets(sockets: Path) -> None:
    """What a server that was killed could not remove: its sockets, and folders left empty."""
    for name in messages.FILES:
        (sockets / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        sockets.rmdir()
        sockets.parent.rmdir()


def tell_progress(pair: zmq.Socket[bytes]) -> Progress:
    """A progress function that tells the server, at most ten times a second."""
    clock, last_s = SystemClock(), 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_s
        now_s = clock.now_s()
        if now_s - last_s > 0.1 or done == total:
            last_s = now_s
            pair.send(messages.encode(messages.Loading(done, total)))

    return progress


def introduction(engine: Engine) -> messages.Ready:
    """What the engine serves, for the server."""
    settings = engine.settings
    blocks = settings.cache.shown([count - 1 for count in settings.cache.num_blocks])
    return messages.Ready(
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        vocab_size=engine.vocab_size,
        num_blocks=blocks[0],
        block_size=settings.cache.block_size,
        description=engine.executor.describe(),
        dtype=settings.dtype,
        kv_dtype=settings.cache.dtype,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        group_blocks=blocks,
        settings=settings.to_stats(),
        alone=pace_alone(engine),
        narrowed=list(settings.cache.narrowed),
        plan=settings,
        bounded=list(settings.cache.bounded),
        kv_read=settings.cache.read,
        chooses=list(settings.cache.chooses),
        kv_keep=settings.cache.keep,
    )


def run(
    engine: Engine, pair: zmq.Socket[bytes], pulse: LoopProgress, handover: Handover | None = None
) -> None:
    """The loop: take what came in, step, send what came out."""
    poller = zmq.Poller()
    poller.register(pair, zmq.POLLIN)
    bell = Bell()
    poller.register(bell.listener, zmq.POLLIN)
    if engine.grammars is not None:
        engine.grammars.on_news = bell.ring
    probed_s, pause_s = engine.clock.now_s(), IDLE_PROBE_EVERY_S
    is_checked, check_at_s = True, probed_s
    while True:
        while heard := dict(poller.poll(0 if engine.has_work else idle_ms(engine))):
            if bell.listener.fileno() in heard:
                bell.hush()
            if pair in heard:
                with pulse:
                    goes_on = take(engine, pair, handover)
                pulse.num_messages += 1
                if not goes_on:
                    return
        if engine.has_work:
            is_checked = False
            with pulse:
                step(engine, pair, handover)
        elif not is_checked and engine.clock.now_s() >= check_at_s:
            with pulse:
                check_at_s = check(engine)
            is_checked = True
        elif engine.clock.now_s() - probed_s > pause_s:
            with pulse:
                engine.executor.probe(
                    0
                )  # tens of milliseconds, in which a request may have to wait
            ceilings = engine.executor.describe().ceilings
            pair.send(messages.encode(messages.ProbeResult(ceilings, pace_alone(engine))))
            probed_s, pause_s = engine.clock.now_s(), min(pause_s * RARER, AT_LEAST_EVERY_S)


def step(engine: Engine, pair: zmq.Socket[bytes], handover: Handover | None = None) -> None:
    """Run a step, and say what came of it."""
    updates, record = engine.step()
    pair.send(messages.encode(messages.StepOutput(updates, record)))
    for request_id, error in engine.take_refusals():
        pair.send(messages.encode(refused(request_id, error)))
    for request_id, parcel in handover.take_due() if handover is not None else ():
        pair.send(messages.encode(messages.HandedOver(request_id, parcel)))


class Bell:
    """Wakes the loop from another thread: what rings is a byte in a pair of sockets."""

    def __init__(self) -> None:
        self.listener, self._ringer = socket.socketpair()
        for end in (self.listener, self._ringer):
            end.setblocking(False)

    def ring(self) -> None:
        """From any thread."""
        with contextlib.suppress(BlockingIOError):  # it rings already
            self._ringer.send(b"!")

    def hush(self) -> None:
        """Take what has rung so far."""
        self.listener.recv(4096)


def check(engine: Engine) -> float:
    """Check the engine's invariants while it is idle; return until when that is enough.

    It visits each block that can be found, some 20 ms for thousands of them, for which a request
    that comes just then waits. So it is done half a second after the last answer, and seldom.
    """
    began_s = engine.clock.now_s()
    engine.check_integrity()
    now_s = engine.clock.now_s()
    return now_s + (now_s - began_s) / CHECK_SHARE


def idle_ms(engine: Engine) -> int:
    """How long an engine without work may sleep: less than usual when it wakes by itself."""
    wakes_in_s = engine.wakes_at_s - engine.clock.now_s()
    return math.ceil(1000 * min(max(wakes_in_s, 0.0), IDLE_POLL_MS / 1000))


def refused(request_id: int, error: RequestError) -> messages.Rejection | messages.Shed:
    """`error` as a message."""
    if isinstance(error, ShedError):
        return messages.Shed(request_id)
    return messages.Rejection(
        *(request_id, error.cause, error.param, error.code, error.status),
        retry_after_s=error.retry_after_s,
    )


def fault(request_id: int, error: Exception) -> messages.Rejection | messages.Shed:
    """Why a request was not taken: what is wrong with it, or that the fault is ours."""
    if isinstance(error, RequestError):
        return refused(request_id, error)
    return messages.Rejection(request_id, "", None, messages.FAULT)


def take(engine: Engine, pair: zmq.Socket[bytes], handover: Handover | None = None) -> bool:
    """Act on one message; False when it says to stop. A frame that is no message is dropped.

    A request in it is refused, so that no client waits for its answer.
    """
    frame = pair.recv()
    try:
        message = messages.decode_to_engine(frame)
    except (msgspec.MsgspecError, RequestError) as error:
        log.error("dropped a frame of %d bytes that is no message: %s", len(frame), error)
        with contextlib.suppress(msgspec.MsgspecError):
            request_id = messages.decode_submit_head(frame).request.request_id
            pair.send(messages.encode(fault(request_id, error)))
        return True
    match message:
        case messages.Submit():
            reply = submit(engine, message, handover)
            if reply is not None:
                pair.send(messages.encode(reply))
        case messages.Abort(request_id, index):
            engine.abort(request_id, index)
        case messages.ReleaseHandover(request_id):
            if handover is not None:
                handover.drop(request_id)
        case messages.ForgetOwner(owner):
            engine.forget(owner)
        case messages.Flush():
            engine.flush()
        case messages.Stop():
            return False
    return True


def submit(
    engine: Engine, submission: messages.Submit, handover: Handover | None
) -> messages.Rejection | messages.Shed | messages.TakenOver | None:
    """Hand a request to the engine; what it says, or raises, refuses this request alone."""
    request = submission.request
    try:
        if submission.parcel and handover is not None:
            refusal = handover.take_over(request, submission.parcel, submission.resumed_tokens)
            return messages.TakenOver(request.request_id, refusal)
        engine.add(request, submission.resumed_tokens)
        if submission.hands_over and handover is not None:
            handover.offer(request.request_id)
    except RequestError as error:
        return refused(request.request_id, error)
    except Exception as error:
        log.exception("request %d could not be added", request.request_id)
        engine.abort(request.request_id)
        return fault(request.request_id, error)
    return None
