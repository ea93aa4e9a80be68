"""Process of the gateway: serve until a signal, then drain."""

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from functools import partial

from headway.batches import open_runner
from headway.batches.runner import Runner
from headway.core.errors import HeadwayError
from headway.edge.notify import Notifier
from headway.edge.serving import HttpServer, http_process
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
    runner = open_runner(state)
    tasks = {"systemd watchdog": lambda: notifier.watch(lambda: True)}
    app, reload = make_app(state, runner), partial(reload_files, state, notifier)
    async with http_process(app, state.options, reload, tasks) as server:
        await serve_until_signal(state, listener, server, runner, on_ready, notifier)


async def serve_until_signal(
    state: GatewayState,
    listener: socket.socket,
    server: HttpServer,
    runner: Runner,
    on_ready: Callable[[], None],
    notifier: Notifier,
) -> None:
    """Serve until the signal, drain, and stop what asks upstreams."""
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
        await runner.stop()
        await state.stop()


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
