"""Processes of Headway that begin as forks of a parent which has imported its modules.

A fresh interpreter spends up to four seconds of a core on imports, and the tests start hundreds. A
fork is a process of its own all the same, and a child of who started it: its own descriptors,
folder, environment, signals and exit status. `Forked` has what the tests and
`runtime.parallel.leader` use of `subprocess.Popen`. Tests of starting itself start real
interpreters.

A command that needs other modules, or variables that Python itself reads, has to be a real one: the
parent was started with those of the tests.
"""

import array
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
        *("headway.cli.bench", "headway.cli.doctor", "headway.cli.engines"),
    ),
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
PR_SET_CHILD_SUBREAPER = 36


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

    def __init__(self) -> None:
        self._orders, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ORDER)
        self._lock = threading.Lock()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
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
        self._process.wait()


def adopt_orphans(is_on: bool) -> None:
    """Whether orphans among our descendants become our children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


_parents: dict[int, Parent] = {}
_starting = threading.Lock()


def parent() -> Parent:
    """The one of this process, started when it is needed."""
    with _starting:
        if os.getpid() not in _parents:
            _parents[os.getpid()] = Parent()
        return _parents[os.getpid()]


def serve(orders: socket.socket) -> Callable[[], int] | None:
    """Fork for each order; None at the end of orders, in a fork what it is to run."""
    for module, others in COMMANDS.items():
        for name in (module, *others):
            import_module(name)
    gc.freeze()  # a fork that ends collects its own garbage alone
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
    sys.argv = [order["module"], *order["arguments"]]
    command: Callable[[], int] = import_module(order["module"]).main
    return command


if __name__ == "__main__":
    run = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(0 if run is None else run())
