"""Process of the engine: receives messages, runs steps, sends updates, with a heartbeat thread.

It builds the engine with the given function, reports the progress of loading, runs steps while
there is work and waits while there is none. It ends on a message, or when its parent is gone. With
a connection to other engines, requests continue there and come from there (`handover.py`).
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
from headway.engine.calibration import unloaded_times
from headway.engine.engine import Engine
from headway.engine.handover import Handover

log = logging.getLogger(__name__)

IDLE_POLL_MS = 500
START_PROBE_S = 1.0
IDLE_PROBE_INTERVAL_S, PROBE_BACKOFF, MAX_PROBE_INTERVAL_S = 5.0, 1.2, 60.0
"""Interval of probes in idle moments: 5 s at first, then growing, because the best changes less."""
CHECK_TIME_SHARE = 0.01
"""Maximum share of the time for integrity checks in idle moments."""
MIN_COMPUTE_S = 1e-3
"""Processor seconds since the last look, below which a step counts as still."""
Progress = Callable[[int, int], None]
Join = Callable[[Engine, str], Handover]
"""Connects an engine to others, which fetch its blocks at this address."""


class LoopProgress:
    """Since when the loop is busy with one thing; the loop writes it, the heartbeat reads it.

    It is created on the loop's thread, whose processor time shows whether the loop computes: on a
    busy machine a step progresses slowly, a hung one does not. Where the thread sleeps while other
    processes compute its step, `watch` adds them.
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
        """Processor clock of each thread or process that computes; [] if unknown."""
        if sys.platform == "linux":
            self._clocks = [time.pthread_getcpuclockid(threading.get_ident())]
        self._step_s: float | None = None
        """The step seen by the last heartbeat: its begin; processor times at its begin and at its
        last progress; and how long it had not progressed."""
        self._begin_s: list[float] = []
        self._moved_s: list[float] = []
        self._still_s = self._looked_s = 0.0

    def watch(self, engine: Engine) -> None:
        """Add the processes that compute the steps of `engine` while the loop's thread sleeps.

        A GPU has no processor clock, so with CUDA the whole step counts as computed.
        """
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
        """Return the heartbeat; a suspended machine does not count as a long step.

        Looks every 0.5 s at a step that hangs from its second 1.2 on: 0.5, 1 and 1.5 s busy, and
        still for 0, 0 and 0.5 s. With unknown clocks all of the time counts as computed.
        """
        busy_s, now_s = self.busy_s, self._clock.now_s()
        if not self._clocks:
            return messages.Beat(busy_s, self.longest_s, 0.0, busy_s, self.num_messages)
        used_s = [processor_s(clock) for clock in self._clocks]
        if self._since_s != self._step_s:
            self._step_s, self._begin_s, self._moved_s = self._since_s, used_s, used_s
            self._still_s = 0.0
        elif busy_s == 0 or most_since(self._moved_s, used_s) >= MIN_COMPUTE_S:
            self._moved_s, self._still_s = used_s, 0.0
        else:
            self._still_s += min(now_s - self._looked_s, 2 * messages.BEAT_INTERVAL_S)
        self._looked_s = now_s
        computed_s = most_since(self._begin_s, used_s) if busy_s else 0.0
        return messages.Beat(busy_s, self.longest_s, self._still_s, computed_s, self.num_messages)


def clock_of(pid: int) -> int:
    """Return the id of a process's processor clock in Linux (clock_getcpuclockid)."""
    return ~pid << 3 | 2


def processor_s(clock: int) -> float:
    """Return the processor time of a clock; 0 if its process is gone."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def most_since(before_s: list[float], now_s: list[float]) -> float:
    """Return the largest increase of a processor time."""
    return max((now - then for then, now in zip(before_s, now_s, strict=False)), default=0.0)


def serve_engine(
    sockets: Path, build: Callable[[Progress], Engine], join: Join | None = None
) -> int:
    """Run until told to stop; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C: it drains first
    parent = int(os.environ.get(messages.PARENT_VARIABLE, os.getppid()))
    wake_when_orphaned()
    context = zmq.Context()
    pair = connect(context, zmq.PAIR, sockets / messages.ENGINE_SOCKET)
    pulse = LoopProgress()
    threading.Thread(target=beat, args=(context, sockets, parent, pulse), daemon=True).start()
    try:
        engine = build(progress_sender(pair))
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
    pair.send(messages.encode(ready_message(engine)))
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
    """Return a socket connected to `path`, unbounded, with a maximum message size."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
    socket.connect(f"ipc://{path}")
    return socket


def beat(
    context: zmq.Context[zmq.Socket[bytes]], sockets: Path, parent: int, pulse: LoopProgress
) -> None:
    """Send a heartbeat twice a second; end the process when the server, its parent, is gone."""
    socket = connect(context, zmq.PUSH, sockets / messages.BEAT_SOCKET)
    while os.getppid() == parent:
        socket.send(messages.encode(pulse.beat()))
        time.sleep(messages.BEAT_INTERVAL_S)
    remove_sockets(sockets)
    os._exit(1)


def remove_sockets(sockets: Path) -> None:
    """Remove what a killed server left: its sockets, and empty folders."""
    for name in messages.FILES:
        (sockets / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        sockets.rmdir()
        sockets.parent.rmdir()


def progress_sender(pair: zmq.Socket[bytes]) -> Progress:
    """Return a callback that reports progress to the server, at most ten times a second."""
    clock, last_s = SystemClock(), 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_s
        now_s = clock.now_s()
        if now_s - last_s > 0.1 or done == total:
            last_s = now_s
            pair.send(messages.encode(messages.Loading(done, total)))

    return progress


def ready_message(engine: Engine) -> messages.Ready:
    """Return the message about what the engine serves."""
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
        alone=unloaded_times(engine),
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
    """Run the loop: take messages, run steps, send updates."""
    poller = zmq.Poller()
    poller.register(pair, zmq.POLLIN)
    bell = Bell()
    poller.register(bell.listener, zmq.POLLIN)
    if engine.grammars is not None:
        engine.grammars.on_news = bell.ring
    probed_s, pause_s = engine.clock.now_s(), IDLE_PROBE_INTERVAL_S
    is_checked, check_at_s = True, probed_s
    while True:
        while heard := dict(poller.poll(0 if engine.has_work else idle_ms(engine))):
            if bell.listener.fileno() in heard:
                bell.hush()
            if pair in heard:
                with pulse:
                    goes_on = handle_message(engine, pair, handover)
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
            pair.send(messages.encode(messages.ProbeResult(ceilings, unloaded_times(engine))))
            probed_s, pause_s = (
                engine.clock.now_s(),
                min(pause_s * PROBE_BACKOFF, MAX_PROBE_INTERVAL_S),
            )


def step(engine: Engine, pair: zmq.Socket[bytes], handover: Handover | None = None) -> None:
    """Run a step, and send its updates, refusals and handovers."""
    updates, record = engine.step()
    pair.send(messages.encode(messages.StepOutput(updates, record)))
    for request_id, error in engine.drain_refusals():
        pair.send(messages.encode(rejection_of(request_id, error)))
    for request_id, parcel in handover.take_due() if handover is not None else ():
        pair.send(messages.encode(messages.HandedOver(request_id, parcel)))


class Bell:
    """Wakes the loop from another thread, by a byte in a socket pair."""

    def __init__(self) -> None:
        self.listener, self._ringer = socket.socketpair()
        for end in (self.listener, self._ringer):
            end.setblocking(False)

    def ring(self) -> None:
        """Wake the loop; may be called from any thread."""
        with contextlib.suppress(BlockingIOError):  # it is already ringing
            self._ringer.send(b"!")

    def hush(self) -> None:
        """Take the bytes that were sent so far."""
        self.listener.recv(4096)


def check(engine: Engine) -> float:
    """Check the engine's invariants while it is idle; returns when the next check is due.

    It visits each cached block, some 20 ms for thousands, during which a new request waits. So it
    runs half a second after the last answer, and seldom.
    """
    began_s = engine.clock.now_s()
    engine.check_integrity()
    now_s = engine.clock.now_s()
    return now_s + (now_s - began_s) / CHECK_TIME_SHARE


def idle_ms(engine: Engine) -> int:
    """Return how long an idle engine may sleep, in milliseconds."""
    wakes_in_s = engine.wakes_at_s - engine.clock.now_s()
    return math.ceil(1000 * min(max(wakes_in_s, 0.0), IDLE_POLL_MS / 1000))


def rejection_of(request_id: int, error: RequestError) -> messages.Rejection | messages.Shed:
    """Return the message for a RequestError."""
    if isinstance(error, ShedError):
        return messages.Shed(request_id)
    return messages.Rejection(
        *(request_id, error.cause, error.param, error.code, error.status),
        retry_after_s=error.retry_after_s,
    )


def failure_reply(request_id: int, error: Exception) -> messages.Rejection | messages.Shed:
    """Return the message for a request that was not accepted: its error, or an internal one."""
    if isinstance(error, RequestError):
        return rejection_of(request_id, error)
    return messages.Rejection(request_id, "", None, messages.FAULT)


def handle_message(
    engine: Engine, pair: zmq.Socket[bytes], handover: Handover | None = None
) -> bool:
    """Handle one message; returns False for Stop. A malformed frame is dropped.

    If it is a request it is refused, so that no client waits for its answer.
    """
    frame = pair.recv()
    try:
        message = messages.decode_to_engine(frame)
    except (msgspec.MsgspecError, RequestError) as error:
        log.error("dropped a frame of %d bytes that is no message: %s", len(frame), error)
        with contextlib.suppress(msgspec.MsgspecError):
            request_id = messages.decode_submit_head(frame).request.request_id
            pair.send(messages.encode(failure_reply(request_id, error)))
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
    """Add a request to the engine; an error refuses this request only."""
    request = submission.request
    try:
        if submission.parcel and handover is not None:
            refusal = handover.take_over(request, submission.parcel, submission.resumed_tokens)
            return messages.TakenOver(request.request_id, refusal)
        engine.add(request, submission.resumed_tokens)
        if submission.hands_over and handover is not None:
            handover.offer(request.request_id)
    except RequestError as error:
        return rejection_of(request.request_id, error)
    except Exception as error:
        log.exception("request %d could not be added", request.request_id)
        engine.abort(request.request_id)
        return failure_reply(request.request_id, error)
    return None
