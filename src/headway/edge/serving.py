"""Listening process: its socket, its HTTP server with limits, its signals and its event loop.

A port in use is reported before anything is loaded.
"""

import asyncio
import contextlib
import errno
import faulthandler
import os
import resource
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.core.errors import PortInUseError, ShutdownError, UsageError
from headway.core.supervision import supervise
from headway.edge.auth import is_loopback
from headway.edge.connection import ConnectionLimiter

MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75
SPARE_FILES = 64
STDERR = 2
GRACE_S = 10.0
"""Seconds after the drain for closing connections, engines and files."""
Work = Callable[[], Coroutine[Any, Any, None]]
SWITCH_INTERVAL_S = 0.001
"""Seconds for which a parsing or tokenizing thread may block the event loop; Python has 5 ms."""


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises PortInUseError or UsageError."""
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
    """Raise UsageError for an address beyond this machine without a key, unless `insecure`."""
    if not (is_loopback(host) or has_key or insecure):
        raise UsageError(
            f"--host {host} can be reached from other machines, and no key is required.",
            "Give --api-key KEY or --key-file FILE, or say --insecure to allow everybody.",
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


class ProcessOptions(ListenOptions, Protocol):
    """Options of a process that listens."""

    @property
    def max_connections(self) -> int: ...

    @property
    def drain_timeout(self) -> float: ...


def check_place(
    options: ListenOptions, sources: Mapping[str, str], *, has_key: bool, insecure: bool
) -> None:
    """Raise UsageError for options that contradict each other, or an open address without a key."""
    check_tls_files(options.ssl_certfile, options.ssl_keyfile)
    if not options.uds:
        check_address(options.host, has_key, insecure)
        return
    given = [f"--{name}" for name in ("host", "port") if sources.get(name) == "flag"]
    if given:
        raise UsageError(
            f"--uds {options.uds} is given together with {' and '.join(given)}.",
            "A server listens on a socket or on an address; leave one of them out.",
        )


def check_tls_files(certfile: str, keyfile: str) -> None:
    """Raise UsageError if the two files of TLS cannot be used."""
    files = {"--ssl-certfile": certfile, "--ssl-keyfile": keyfile}
    given = [name for name, file in files.items() if file]
    if not given:
        return
    if len(given) == 1:
        (missing,) = set(files) - set(given)
        raise UsageError(f"{given[0]} is given without {missing}.", "TLS needs both files, as PEM.")
    for name, file in files.items():
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise UsageError(
                f"{name} {file}: {error.strerror}.", "Give a PEM file that this user may read."
            ) from error
    check_tls_pair(certfile, keyfile)


def check_tls_pair(certfile: str, keyfile: str) -> None:
    """Raise UsageError unless the files are a certificate and its key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"--ssl-keyfile {keyfile} is not the key of --ssl-certfile {certfile}.",
                "Give the private key that the certificate was made with.",
            ) from error
        raise UsageError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} cannot be read as PEM.",
            "The first holds the certificate and its chain, the second its private key.",
        ) from error


def refuse_password() -> str:
    """Called for the password of a key that has one; raises UsageError."""
    raise UsageError(
        "--ssl-keyfile is encrypted with a password.",
        "Write it without one: openssl pkey -in KEY.pem -out PLAIN.pem",
    )


@contextlib.contextmanager
def open_unix_socket(path: str) -> Iterator[socket.socket]:
    """Yield the listening Unix socket of --uds; raises PortInUseError or UsageError.

    A leftover of a killed server is replaced; a socket in use is an error. The socket is removed
    at the end.
    """
    remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(listener):
        try:
            listener.bind(path)
            own = os.stat(path)
        except OSError as error:
            raise UsageError(
                f"Cannot listen on --uds {path}: {error.strerror or error}.",
                "Its folder has to be there and writable; a path has at most 107 bytes.",
            ) from error
        listener.listen(2048)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(path), own):
                    os.unlink(path)


def remove_stale(path: str) -> None:
    """Remove a socket without a listener; raises if there is one, or if it is a file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # `bind` reports errors of the folder
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"--uds {path} is a file, and no socket.", "Choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            pass  # its queue is full, or it belongs to another user: it has a listener
    raise PortInUseError(
        f"The socket {path} is in use.", "Stop what listens there, or choose another with --uds."
    )


@contextlib.contextmanager
def open_listener(options: ListenOptions) -> Iterator[tuple[socket.socket, str]]:
    """Yield the listening socket and its URL; raises PortInUseError or UsageError."""
    if options.uds:
        with open_unix_socket(options.uds) as listener:
            yield listener, f"unix:{options.uds}"
        return
    listener = bind(options.host, options.port)
    with contextlib.closing(listener):
        host = options.host if ":" not in options.host else f"[{options.host}]"
        scheme = "https" if options.ssl_certfile else "http"
        yield listener, f"{scheme}://{host}:{listener.getsockname()[1]}"


def is_guarded(options: ListenOptions, insecure: bool) -> bool:
    """Return whether a web page in a browser on this machine could reach it without a key."""
    return is_loopback(options.host) and not (insecure or options.uds)


class HttpServer(uvicorn.Server):
    """uvicorn server that drains before it stops.

    After a signal it refuses POST requests; all others are still answered.
    """

    def __init__(self, config: uvicorn.Config, limiter: ConnectionLimiter) -> None:
        super().__init__(config)
        self._limiter = limiter
        self.asked_to_end = asyncio.Event()
        self._app: Any = config.app
        config.app = self._answer

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; the limiter has the TLS context, to count connections before their handshake."""
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


class Deadline:
    """Deadline of a shutdown: the process ends at it, whatever its threads do.

    Python's exit waits for a thread that runs for ever, and a thread that holds the interpreter's
    lock keeps the event loop from seeing the signal at all. So two timers run without that lock.
    After the first signal faulthandler's C thread counts down, and ends the process with the stack
    of every thread on stderr. Until the event loop has seen a signal, `watchdog.py`, a small child
    process, checks whether the byte that the signal wrote for the loop is still unread; it runs
    from `watch` to `close`.
    """

    def __init__(self, drain_s: float) -> None:
        self._after_s = drain_s + GRACE_S
        self._watchdog: subprocess.Popen[bytes] | None = None

    def watch(self) -> None:
        """Start the watchdog; to be called after the loop has its signal handlers."""
        if sys.platform != "linux":
            return
        descriptor = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor)
        if descriptor < 0:
            return
        program = Path(__file__).with_name("watchdog.py")
        given = map(str, (program, descriptor, self._after_s, os.getpid()))
        command = [sys.executable, "-I", "-S", *given]
        self._watchdog = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[descriptor]
        )

    def arm(self) -> None:
        """Start the countdown to the forced end of the process."""
        nowhere = sys.__stderr__ is None or sys.__stderr__.closed
        descriptor = os.open(os.devnull, os.O_WRONLY) if nowhere else STDERR
        faulthandler.dump_traceback_later(self._after_s, exit=True, file=descriptor)

    def close(self) -> None:
        """Stop the watchdog; the countdown goes on, because the interpreter has yet to exit."""
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog = None


def ask_to_end(server: HttpServer, deadline: Deadline) -> None:
    """Drain on the first signal, with a deadline; end at once on the second."""
    if server.asked_to_end.is_set():
        server.should_exit = server.force_exit = True
        raise SystemExit(130)
    deadline.arm()
    server.asked_to_end.set()


def http_server(app: ASGIApp, limiter: ConnectionLimiter, place: ListenOptions) -> HttpServer:
    """Return uvicorn around `app` with the connection limits; HTTPS if there are files."""
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


@contextlib.asynccontextmanager
async def http_process(
    app: ASGIApp, options: ProcessOptions, reload: Work, tasks: Mapping[str, Work]
) -> AsyncIterator[HttpServer]:
    """Yield the HTTP server of this process, which the caller serves and ends.

    SIGINT and SIGTERM ask it to end, SIGHUP runs `reload`; `tasks` are supervised until then, by
    name.
    """
    limiter = ConnectionLimiter(allowed_connections(options.max_connections))
    server = http_server(app, limiter, options)
    deadline = Deadline(options.drain_timeout)
    end_on_signals(server, deadline)
    reload_on_hangup(reload)
    deadline.watch()
    watchers = [
        supervise(name, task) for name, task in {"connection sweep": limiter.watch, **tasks}.items()
    ]
    try:
        yield server
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        deadline.close()


def reload_on_hangup(reload: Work) -> None:
    """Run `reload` at each SIGHUP; to be called in the server's loop."""
    loop, running = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def begin() -> None:
        task = loop.create_task(reload())
        running.add(task)
        task.add_done_callback(running.discard)

    loop.add_signal_handler(signal.SIGHUP, begin)


def end_on_signals(server: HttpServer, deadline: Deadline) -> None:
    """Install the handlers of SIGINT and SIGTERM; to be called in the server's loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask_to_end, server, deadline)


def allowed_connections(requested: int) -> int:
    """Return `requested`, bounded by the limit on open files, which is raised for it."""
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
