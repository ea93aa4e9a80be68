"""The server process: bind, start the engine's client, serve until a signal, then drain.

Given a state it listens, and promises that a port in use is a clean error before anything is
loaded, that `/health` answers at once, and that no child process or socket is left behind.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn

from headway.core.errors import PortInUseError, UsageError
from headway.edge.auth import is_loopback
from headway.edge.connection import ConnectionLimiter
from headway.edge.deadline import Deadline
from headway.edge.notify import Notifier
from headway.server.app import make_app
from headway.server.batches import open_runner
from headway.server.models import State
from headway.telemetry.request_log import MINUTE_S, log_minute

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75
SPARE_FILES = 64
SWITCH_INTERVAL_S = 0.001
"""So long a thread that parses or tokenizes may keep the event loop waiting; Python says 5 ms."""
SILENT = Notifier()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises PortInUseError or UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"Port {port} on {host} is in use.",
                "Stop what listens there, or choose another with --port (0 takes a free one).",
            ) from error
        raise UsageError(
            f"Cannot listen on {host}:{port}: {error.strerror}.", "Check --host."
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def check_address(host: str, has_key: bool, insecure: bool) -> None:
    """Refuse to listen beyond this machine without a key, unless told to."""
    if not (is_loopback(host) or has_key or insecure):
        raise UsageError(
            f"--host {host} can be reached from other machines, and nobody needs a key.",
            "Give --api-key KEY or --key-file FILE, or say --insecure if everybody may ask.",
        )


class Server(uvicorn.Server):
    """uvicorn, with our own way of ending: drain first, then stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.asked_to_end = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Signals are handled in `serve`."""
        yield


async def serve(
    state: State,
    listener: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
    notifier: Notifier = SILENT,
) -> None:
    """Serve until SIGINT or SIGTERM; raises the HeadwayError that keeps an engine from starting."""
    limiter = ConnectionLimiter(allowed_connections(state.options.max_connections))
    runner = open_runner(state)
    config = uvicorn.Config(
        make_app(state, runner),
        http=limiter.protocol,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
        ws="none",
    )
    server, deadline = Server(config), Deadline(state.options.drain_timeout)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask_to_end, server, deadline)
    loop.add_signal_handler(signal.SIGHUP, reload_keys, state, notifier)
    deadline.watch()
    watchers = [
        asyncio.create_task(limiter.watch()),
        asyncio.create_task(notifier.watch(lambda: not any_failed(state))),
        asyncio.create_task(log_minutes(state)),
    ]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await runner.start()
        await asyncio.gather(*(model.client.start() for model in state.rows))
        settled = asyncio.create_task(all_settled(state))
        ending = asyncio.create_task(server.asked_to_end.wait())
        await asyncio.wait({settled, ending, serving}, return_when=asyncio.FIRST_COMPLETED)
        if settled.done():
            settled.result()
            gc.collect()
            gc.freeze()  # what serves lives as long as the server
            on_ready()
            notifier.ready()
        else:
            settled.cancel()
        await asyncio.wait({ending, serving}, return_when=asyncio.FIRST_COMPLETED)
        notifier.stopping()
        await runner.stop()
        await asyncio.gather(
            *(model.client.drain(state.options.drain_timeout) for model in state.rows)
        )
    finally:
        server.should_exit = True
        for watcher in watchers:
            watcher.cancel()
        await runner.stop()
        if state.upstream is not None:
            await state.upstream.close()
        await asyncio.gather(*(model.client.stop() for model in state.rows))
        await serving
        deadline.close()


async def log_minutes(state: State) -> None:
    """A line a minute for each model that had something to do, where totals are logged."""
    while state.log_stats:
        await asyncio.sleep(MINUTE_S)
        for model in state.rows:
            log_minute(model.telemetry)


def ask_to_end(server: Server, deadline: Deadline) -> None:
    """The first signal drains, with a deadline; a second one ends at once."""
    if server.asked_to_end.is_set():
        server.should_exit = server.force_exit = True
        raise SystemExit(130)
    deadline.arm()
    server.asked_to_end.set()


def reload_keys(state: State, notifier: Notifier) -> None:
    """SIGHUP: read the key file again; with one that cannot be used the old keys stay."""
    notifier.reloading()
    try:
        state.keyring.reload()
    except UsageError as error:
        log.error("the keys stay as they were: %s", error)
    else:
        log.info("%d keys are in force", len(state.keyring.callers))
    notifier.notify("READY=1")


def any_failed(state: State) -> bool:
    """Whether an engine has been given up: then only a new server helps."""
    return any(model.client.status == "failed" for model in state.rows)


def allowed_connections(wanted: int) -> int:
    """`wanted`, or what the limit on open files leaves, which is raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, wanted + SPARE_FILES)
    if soft < min(hard, wanted + SPARE_FILES):
        soft = min(hard, wanted + SPARE_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(2, min(wanted, soft - SPARE_FILES))


async def all_settled(state: State) -> None:
    """Wait until every engine is ready; raises what keeps one from starting."""
    await asyncio.gather(*(model.client.settled() for model in state.rows))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run the server's coroutine on uvloop where there is one."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if sys.platform == "win32":
        asyncio.run(main)
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
