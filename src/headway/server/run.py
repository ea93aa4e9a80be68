"""The server process: bind, start the engine's client, serve until a signal, then drain.

Given a state it listens, and promises that a port in use is a clean error before anything is
loaded, that `/health` answers at once, and that no child process or socket is left behind.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable

from headway.batches import open_runner
from headway.core.errors import UsageError
from headway.core.supervision import supervise
from headway.edge.connection import ConnectionLimiter
from headway.edge.deadline import Deadline
from headway.edge.notify import Notifier
from headway.edge.serving import allowed_connections, end_on_signals, http_server
from headway.server.app import make_app
from headway.server.forgetting import forget_revoked
from headway.server.models import State
from headway.telemetry.request_log import MINUTE_S, log_minute

log = logging.getLogger(__name__)

SILENT = Notifier()


async def serve(
    state: State,
    listener: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
    notifier: Notifier = SILENT,
) -> None:
    """Serve until SIGINT or SIGTERM; raises the HeadwayError that keeps an engine from starting."""
    limiter = ConnectionLimiter(allowed_connections(state.options.max_connections))
    runner = open_runner(state)
    server = http_server(make_app(state, runner), limiter, state.options)
    deadline = Deadline(state.options.drain_timeout)
    loop = asyncio.get_running_loop()
    end_on_signals(server, deadline)
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(reload_keys(state, notifier))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    deadline.watch()
    watchers = [
        supervise("connection sweep", limiter.watch),
        supervise("systemd watchdog", lambda: notifier.watch(lambda: not any_failed(state))),
        supervise("log of totals", lambda: log_minutes(state)),
    ]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await runner.start()
        await asyncio.gather(*(model.client.start() for model in state.rows))
        forget_revoked(state)
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
        log.info("draining, %d left", sum(model.telemetry.num_live for model in state.rows))
        await runner.stop()
        await asyncio.gather(
            *(model.client.drain(state.options.drain_timeout) for model in state.rows)
        )
    finally:
        server.should_exit = True
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await runner.stop()
        if state.upstream is not None:
            await state.upstream.close()
        await asyncio.gather(*(model.client.stop() for model in state.rows))
        for model in state.rows:
            if model.scorer is not None:
                model.scorer.close()
        await serving
        deadline.close()


async def log_minutes(state: State) -> None:
    """A line a minute for each model that had something to do, where totals are logged."""
    while state.log_stats:
        await asyncio.sleep(MINUTE_S)
        for model in state.rows:
            log_minute(model.telemetry)


async def reload_keys(state: State, notifier: Notifier) -> None:
    """SIGHUP: read the key file again; with one that cannot be used the old keys stay."""
    notifier.reloading()
    try:
        state.keyring.use(await asyncio.to_thread(state.keyring.read))
    except UsageError as error:
        log.error("the keys stay as they were: %s", error)
    else:
        forget_revoked(state)
        log.info("%d keys are in force", len(state.keyring.callers))
    notifier.notify("READY=1")


def any_failed(state: State) -> bool:
    """Whether an engine has been given up: then only a new server helps."""
    return any(model.client.status == "failed" for model in state.rows)


async def all_settled(state: State) -> None:
    """Wait until every engine is ready; raises what keeps one from starting."""
    await asyncio.gather(*(model.client.settled() for model in state.rows))
