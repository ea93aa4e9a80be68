"""Processes of Headway that begin as forks of a parent which has imported its modules.

A fresh interpreter spends up to four seconds of a core on imports, and the tests start hundreds. A
fork is a process of its own all the same, and a child of who started it: its own descriptors,
folder, environment, signals and exit status. `Forked` has what the tests and
`runtime.parallel.leader` use of `subprocess.Popen`. Tests of starting itself start real
interpreters.

A server's engine has to be the server's child, which no fork of our parent can become. So a server
that is a fork begins with a parent of its own, a fork of itself, and starts engines there.

A command that needs other modules, or variables that Python itself reads, has to be a real one: the
parent was started with those of the tests.
"""

import array
import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

COMMANDS: dict[str, tuple[str, ...]] = {
    "headway.cli.main": (
        *("headway.assemble", "headway.frontend.local", "headway.runtime.executor"),
        *("headway.llm", "headway.cli.serve", "headway.cli.generate", "headway.server.app"),
        *("headway.server.run", "headway.frontend.pools", "headway.cli.hub"),
        *("headway.cli.bench", "headway.cli.doctor", "headway.cli.engines"),
        *("headway.cli.gateway", "headway.gateway.run", "headway.gateway.state"),
        "uvicorn.lifespan.off",
    ),
    "headway.assemble": ("headway.runtime.null", "headway.runtime.cuda.executor"),
    "headway.runtime.parallel.follow": ("headway.runtime.parallel.distributed",),
}
"""Module whose `main` a fork runs → what is imported beforehand beside it."""
HIGH = 400
"""Received descriptors move above this number, out of the way of those that they become."""
FULL = 1 << 16
"""Bytes that a pipe takes without a reader."""
ORDER = 1 << 18
"""Bytes that an order may have: arguments and environment."""
HAS_FORKS = sys.platform == "linux"
"""Elsewhere nobody but the first process adopts orphans, and real interpreters are started."""
ADOPTED_S = 120.0
"""How long a fork may take to become our child; the first waits for the imports."""
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
PARENT_NAME = "headway-forks"
"""Name of a server's own parent of forks in /proc/PID/stat: it is none of the server's children."""
ARGUMENT_ROOM = 2000
"""Bytes of the parent's command line, which a fork overwrites with its own."""


class Forked:
    """A fork that runs `python -m MODULE …`, as its arguments say; the module is a row above.

    `stdin` is /dev/null, and `stdout` and `stderr` are ours, where no file is given.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        starts_engines: bool = False,
    ) -> None:
        python, flag, module, *arguments = args
        assert (python, flag) == (sys.executable, "-m") and module in COMMANDS, args
        self.args = list(args)
        self.returncode: int | None = None
        order = {
            "module": module,
            "arguments": arguments,
            "folder": cwd or os.getcwd(),
            "environment": dict(os.environ if env is None else env),
            "targets": [0, 1, 2, *pass_fds],
            "parent": os.getpid(),
            "starts_engines": starts_engines,
        }
        with open(os.devnull, "rb") as null:
            given = (null if stdin is None else stdin, stdout or 1, stderr or 2)
            shown = [file if isinstance(file, int) else file.fileno() for file in given]
            self.pid = parent().fork(order, [*shown, *pass_fds])
        self._pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """The exit status, minus the signal that ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; `subprocess.TimeoutExpired` where it does not end in time."""
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send one to a fork that has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_be_forked(command: Sequence[str], environment: dict[str, str]) -> bool:
    """Whether it is one of ours with this interpreter, whose own variables are those of the tests.

    >>> can_be_forked([sys.executable, "-m", "headway.cli.main", "serve"], {})
    True
    """
    if list(command[:2]) != [sys.executable, "-m"] or command[2] not in COMMANDS:
        return False
    its_own = [(k, v) for k, v in environment.items() if k.startswith(("PYTHON", "OMP", "LD_"))]
    return HAS_FORKS and all(os.environ.get(name) == value for name, value in its_own)


def run_forked(
    args: Sequence[str], data: bytes, env: dict[str, str], timeout_s: float
) -> tuple[int, bytes, bytes]:
    """(exit status, stdout, stderr) of a command that reads `data`, run to its end."""
    assert len(data) < FULL
    (given, giving), (out, outs), (err, errs) = (os.pipe() for _ in range(3))
    try:
        os.write(giving, data)
        os.close(giving)
        process = Forked(args, stdin=given, stdout=outs, stderr=errs, env=env)
    finally:
        for end in (given, outs, errs):
            os.close(end)
    found: dict[int, bytes] = {}
    readers = [threading.Thread(target=read_all, args=(fd, found)) for fd in (out, err)]
    for reader in readers:
        reader.start()
    try:
        process.wait(timeout_s)
    finally:
        process.kill()
        for reader in readers:
            reader.join()
    return process.wait(), found[out], found[err]


def read_all(fd: int, found: dict[int, bytes]) -> None:
    """Keep all that comes out of `fd`, and close it."""
    with open(fd, "rb") as file:
        found[fd] = file.read()


# ── the parent ──────────────────────────────────────────────────────────────────────────────


class Parent:
    """The process that forks, and our end of its socket; it ends when that is closed."""

    def __init__(self, orders: socket.socket, wait: Callable[[], object]) -> None:
        """`wait` waits for its end."""
        self._orders, self._wait = orders, wait
        self._lock = threading.Lock()
        atexit.register(self.close)

    def fork(self, order: dict[str, Any], descriptors: list[int]) -> int:
        """Have a process forked, and its id.

        Of an orphan the next ancestor that adopts some becomes the parent, and meanwhile we do.
        """
        told, its = socket.socketpair()
        with self._lock, told, its:
            rights = array.array("i", [its.fileno(), *descriptors])
            adopt_orphans(True)
            try:
                self._orders.sendmsg(
                    [json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                )
                its.close()
                told.settimeout(ADOPTED_S)
                return int(told.recv(16))
            finally:
                adopt_orphans(False)

    def close(self) -> None:
        """Let it end."""
        self._orders.close()
        self._wait()


def order_sockets() -> tuple[socket.socket, socket.socket]:
    """The ends of a connection for orders: ours and the parent's."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ORDER)
    return ours, its


def start_parent() -> Parent:
    """A new interpreter that imports what a row above names."""
    ours, its = order_sockets()
    with its:
        program = [sys.executable, str(Path(__file__).resolve()), str(its.fileno())]
        process = subprocess.Popen(
            [*program, "-" * ARGUMENT_ROOM],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return Parent(ours, process.wait)


def adopt_orphans(is_on: bool) -> None:
    """Whether orphans among our descendants become our children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


_parents: dict[int, Parent] = {}
_starting = threading.Lock()


def parent() -> Parent:
    """The one of this process, started when it is needed."""
    with _starting:
        if os.getpid() not in _parents:
            _parents[os.getpid()] = start_parent()
        return _parents[os.getpid()]


def import_commands() -> None:
    """Import what the commands need."""
    for module, others in COMMANDS.items():
        for name in (module, *others):
            import_module(name)
    gc.freeze()  # a fork that ends collects its own garbage alone


def serve(orders: socket.socket) -> Callable[[], int] | None:
    """Fork for each order; None at the end of orders, in a fork what it is to run."""
    signal.signal(signal.SIGCHLD, reap)
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, ORDER, 64)
        if not data:
            return None
        if os.fork() == 0:
            orders.close()
            return leave(json.loads(data), descriptors)
        for fd in descriptors:
            os.close(fd)


def reap(*_: object) -> None:
    """Collect those of our children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def leave(order: dict[str, Any], descriptors: list[int]) -> Callable[[], int]:
    """Fork once more, and end: the fork is an orphan then, and its command is returned."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if os.fork():
        os._exit(0)
    while os.getppid() != order["parent"]:
        time.sleep(0.0005)
    with socket.socket(fileno=descriptors[0]) as told:
        told.send(str(os.getpid()).encode())
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in descriptors[1:]]
    for fd in descriptors[1:]:
        os.close(fd)
    for fd, target in zip(moved, order["targets"], strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # TMPDIR is its own
    sys.argv = [order["module"], *order["arguments"]]
    show_arguments([sys.executable, "-m", *sys.argv])
    set_name(Path(sys.executable).name)
    if order["starts_engines"]:
        ours, its = order_sockets()
        pid = os.fork()
        if pid == 0:
            ours.close()
            set_name(PARENT_NAME)
            return serve(its)
        its.close()
        _parents[os.getpid()] = Parent(ours, lambda: os.waitpid(pid, 0))
        asyncio.create_subprocess_exec = start_in_loop
    command: Callable[[], int] = import_module(order["module"]).main
    return command


def set_name(name: str) -> None:
    """Give this process a name for /proc/PID/stat."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def show_arguments(arguments: list[str]) -> None:
    """Write them where others read the command line of this process."""
    begin, end = map(int, Path("/proc/self/stat").read_text().split()[47:49])
    line = "".join(f"{argument}\0" for argument in arguments).encode()
    ctypes.memmove(begin, line[: end - begin].ljust(end - begin, b"\0"), end - begin)


# ── in a server ─────────────────────────────────────────────────────────────────────────────

_start = asyncio.create_subprocess_exec


class ForkedInLoop:
    """What an engine's client uses of `asyncio.subprocess.Process`."""

    def __init__(self, process: Forked) -> None:
        self._process, self.pid = process, process.pid
        self.send_signal = process.send_signal

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        while (status := self.returncode) is None:
            await asyncio.sleep(0.01)
        return status


async def start_in_loop(*command: str, **options: Any) -> Any:
    """`asyncio.create_subprocess_exec`, with forks of those that can be some."""
    if not can_be_forked(command, options["env"]):
        return await _start(*command, **options)
    return ForkedInLoop(Forked(command, env=options["env"], pass_fds=options["pass_fds"]))


def end() -> None:
    """End as an interpreter does, but for its modules: taking them apart would copy them first."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    status = 1
    atexit.register(end)  # the first, so that it is called last
    import_commands()
    run = serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        status = 0 if run is None else run()
    except SystemExit as raised:
        status = raised.code if isinstance(raised.code, int) else int(raised.code is not None)
        raise
