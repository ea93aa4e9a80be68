"""Process of the gateway: serve until a signal, then drain."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable

from headway.batches import open_runner
from headway.core.errors import HeadwayError
from headway.core.supervision import supervise
from headway.edge.connection import ConnectionLimiter
from headway.edge.deadline import Deadline
from headway.edge.notify import Notifier
from headway.edge.serving import allowed_connections, end_on_signals, http_server
from headway.gateway.app import make_app
from headway.gateway.config import Config
from headway.gateway.state import GatewayState

log = logging.getLogger(__name__)

POLL_S = 0.05


async def serve(
    state: GatewayState,
    listener: socket.socket,
    reload_config: Callable[[], Config],
    on_ready: Callable[[], None],
    notifier: Notifier,
) -> None:
    """Serve until SIGINT or SIGTERM; SIGHUP reads the configuration and the keys again."""
    state.reload_config = reload_config
    limiter = ConnectionLimiter(allowed_connections(state.options.max_connections))
    runner = open_runner(state)
    server = http_server(make_app(state, runner), limiter, state.options)
    deadline, loop = Deadline(state.options.drain_timeout), asyncio.get_running_loop()
    end_on_signals(server, deadline)
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(reload_files(state, notifier))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    deadline.watch()
    watchers = [
        supervise("connection sweep", limiter.watch),
        supervise("systemd watchdog", lambda: notifier.watch(lambda: True)),
    ]
    try:
        await state.start()
        await runner.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        ending = asyncio.create_task(server.asked_to_end.wait())
        try:
            gc.collect()
            gc.freeze()  # objects of the application live as long as the process
            on_ready()
            notifier.ready()
            await asyncio.wait({ending, serving}, return_when=asyncio.FIRST_COMPLETED)
            state.is_draining = True
            notifier.stopping()
            log.info("draining, %d left", len(state.limits))
            await runner.stop()
            await wait_until_idle(state, state.options.drain_timeout)
            state.end_requests()
        finally:
            server.should_exit = True
            ending.cancel()
            await serving
    finally:
        for watcher in watchers:
            watcher.cancel()
        await runner.stop()
        await state.stop()
        deadline.close()


async def reload_files(state: GatewayState, notifier: Notifier) -> None:
    """Reload the configuration and the keys on SIGHUP; an invalid file changes nothing."""
    notifier.reloading()
    try:
        await state.read_files()
    except HeadwayError as error:
        log.error("configuration and keys stay as they were: %s", error)
    else:
        log.info("%d upstreams and %d models are in force", len(state.upstreams), len(state.routes))
    notifier.notify("READY=1")


async def wait_until_idle(state: GatewayState, timeout_s: float) -> None:
    """Wait until no request is in flight at any upstream, at most `timeout_s`."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    while loop.time() < until_s and any(
        each.speed.flights for each in [*state.upstreams.values(), *state.retiring]
    ):
        await asyncio.sleep(POLL_S)
