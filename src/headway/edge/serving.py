"""A listening process: its socket, its HTTP server with our limits, its signals and its loop.

It promises that a port in use is a clean error before anything is loaded.
"""

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.core.errors import PortInUseError, ShutdownError, UsageError
from headway.edge import tls, unix_socket
from headway.edge.auth import is_loopback
from headway.edge.connection import ConnectionLimiter
from headway.edge.deadline import Deadline

MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75
SPARE_FILES = 64
SWITCH_INTERVAL_S = 0.001
"""So long a thread that parses or tokenizes may keep the event loop waiting; Python says 5 ms."""


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


class ListenOptions(Protocol):
    """Options of a listening socket: address or Unix socket, TLS files."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def uds(self) -> str: ...

    @property
    def ssl_certfile(self) -> str: ...

    @property
    def ssl_keyfile(self) -> str: ...


def check_place(
    options: ListenOptions, sources: Mapping[str, str], *, has_key: bool, insecure: bool
) -> None:
    """Refuse an address that cannot be meant, or reaches beyond this machine without a key."""
    tls.check_files(options.ssl_certfile, options.ssl_keyfile)
    if not options.uds:
        check_address(options.host, has_key, insecure)
        return
    given = [f"--{name}" for name in ("host", "port") if sources.get(name) == "flag"]
    if given:
        raise UsageError(
            f"--uds {options.uds} is given together with {' and '.join(given)}.",
            "A server listens on a socket or on an address; leave one of them out.",
        )


@contextlib.contextmanager
def open_listener(options: ListenOptions) -> Iterator[tuple[socket.socket, str]]:
    """The listening socket, and where it is asked; raises PortInUseError or UsageError."""
    if options.uds:
        with unix_socket.open_socket(options.uds) as listener:
            yield listener, f"unix:{options.uds}"
        return
    listener = bind(options.host, options.port)
    with contextlib.closing(listener):
        host = options.host if ":" not in options.host else f"[{options.host}]"
        scheme = "https" if options.ssl_certfile else "http"
        yield listener, f"{scheme}://{host}:{listener.getsockname()[1]}"


def is_guarded(options: ListenOptions, insecure: bool) -> bool:
    """Whether a web page of this machine's browser could ask it without a key."""
    return is_loopback(options.host) and not (insecure or options.uds)


class HttpServer(uvicorn.Server):
    """uvicorn server that drains before it stops.

    Once it is asked to end it refuses what is posted; all else is answered as before.
    """

    def __init__(self, config: uvicorn.Config, limiter: ConnectionLimiter) -> None:
        super().__init__(config)
        self._limiter = limiter
        self.asked_to_end = asyncio.Event()
        self._app: Any = config.app
        config.app = self._answer

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; TLS is the limiter's, which counts a connection before its handshake is over."""
        self._limiter.context, self.config.ssl = self.config.ssl, None
        await super().startup(sockets)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.asked_to_end.is_set() and scope.get("method") == "POST":
            scope["refusal"] = ShutdownError()  # `AuthMiddleware` answers with it
        await self._app(scope, receive, send)

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Signals are handled in `serve`."""
        yield


def ask_to_end(server: HttpServer, deadline: Deadline) -> None:
    """The first signal drains, with a deadline; a second one ends at once."""
    if server.asked_to_end.is_set():
        server.should_exit = server.force_exit = True
        raise SystemExit(130)
    deadline.arm()
    server.asked_to_end.set()


def http_server(app: ASGIApp, limiter: ConnectionLimiter, place: ListenOptions) -> HttpServer:
    """uvicorn around `app`, its connections held to our limits; HTTPS where there are files."""
    return HttpServer(
        uvicorn.Config(
            app,
            interface="asgi3",
            http=limiter.protocol,  # type: ignore[arg-type]
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            ws="none",
            ssl_certfile=place.ssl_certfile or None,
            ssl_keyfile=place.ssl_keyfile or None,
        ),
        limiter,
    )


def end_on_signals(server: HttpServer, deadline: Deadline) -> None:
    """SIGINT and SIGTERM ask the server to end; call it in the server's loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask_to_end, server, deadline)


def allowed_connections(requested: int) -> int:
    """Return `requested`, at most what the limit on open files allows, which is raised for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, requested + SPARE_FILES)
    if soft < min(hard, requested + SPARE_FILES):
        soft = min(hard, requested + SPARE_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(2, min(requested, soft - SPARE_FILES))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run the server's coroutine on uvloop where there is one."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if sys.platform == "win32":
        asyncio.run(main)
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
