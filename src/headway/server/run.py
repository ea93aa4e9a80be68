"""The server process: bind, start the engines' clients, serve until a signal, then drain.

A port in use is a clean error before anything is loaded, `/health` answers at once, and no child
process or socket is left behind.
"""

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from functools import partial

from headway.batches import open_runner
from headway.batches.runner import Runner
from headway.core.errors import UsageError
from headway.edge.notify import Notifier
from headway.edge.serving import HttpServer, http_process
from headway.server.app import make_app
from headway.server.forgetting import forget_revoked
from headway.server.models import ServerState
from headway.telemetry.request_log import MINUTE_S, log_minute

log = logging.getLogger(__name__)

SILENT = Notifier()


async def serve(
    state: ServerState,
    listener: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
    notifier: Notifier = SILENT,
) -> None:
    """Serve until SIGINT or SIGTERM; raises the HeadwayError that keeps an engine from starting."""
    runner = open_runner(state)
    tasks = {
        "systemd watchdog": lambda: notifier.watch(lambda: not has_failed_engine(state)),
        "log of totals": lambda: log_minutes(state),
    }
    app, reload = make_app(state, runner), partial(reload_keys, state, notifier)
    async with http_process(app, state.options, reload, tasks) as server:
        await serve_until_signal(state, listener, server, runner, on_ready, notifier)


async def serve_until_signal(
    state: ServerState,
    listener: socket.socket,
    server: HttpServer,
    runner: Runner,
    on_ready: Callable[[], None],
    notifier: Notifier,
) -> None:
    """Start the engines, serve until the signal, drain, and stop all of it."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await runner.start()
        await asyncio.gather(*(model.client.start() for model in state.rows))
        forget_revoked(state)
        all_ready = asyncio.create_task(wait_all_ready(state))
        end_signal = asyncio.create_task(server.asked_to_end.wait())
        await asyncio.wait({all_ready, end_signal, serving}, return_when=asyncio.FIRST_COMPLETED)
        if all_ready.done():
            all_ready.result()
            gc.collect()
            gc.freeze()  # these objects live as long as the server
            on_ready()
            notifier.ready()
        else:
            all_ready.cancel()
        await asyncio.wait({end_signal, serving}, return_when=asyncio.FIRST_COMPLETED)
        notifier.stopping()
        log.info("draining, %d left", sum(model.telemetry.num_live for model in state.rows))
        await runner.stop()
        await asyncio.gather(
            *(model.client.drain(state.options.drain_timeout) for model in state.rows)
        )
    finally:
        server.should_exit = True
        await runner.stop()
        if state.upstream is not None:
            await state.upstream.close()
        await asyncio.gather(*(model.client.stop() for model in state.rows))
        for model in state.rows:
            if model.scorer is not None:
                model.scorer.close()
        await serving


async def log_minutes(state: ServerState) -> None:
    """Log the totals of each model once a minute, where it had requests and totals are logged."""
    while state.log_stats:
        await asyncio.sleep(MINUTE_S)
        for model in state.rows:
            log_minute(model.telemetry)


async def reload_keys(state: ServerState, notifier: Notifier) -> None:
    """Handle SIGHUP: read the key file again; an invalid file leaves the old keys in force."""
    notifier.reloading()
    try:
        state.keyring.use(await asyncio.to_thread(state.keyring.read))
    except UsageError as error:
        log.error("the keys stay as they were: %s", error)
    else:
        forget_revoked(state)
        log.info("%d keys are in force", len(state.keyring.callers))
    notifier.notify("READY=1")


def has_failed_engine(state: ServerState) -> bool:
    """Whether an engine has failed for good: only a new server process helps."""
    return any(model.client.status == "failed" for model in state.rows)


async def wait_all_ready(state: ServerState) -> None:
    """Wait until every engine is ready; raises the error that keeps one from starting."""
    await asyncio.gather(*(model.client.wait_ready() for model in state.rows))
