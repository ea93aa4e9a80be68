"""A Headway server that is started for a measurement and stopped by its own process id.

It runs under `cluster.child`, so it also ends where the measuring process is killed.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from headway.core.errors import HeadwayError

START_S, STOP_S, POLL_S = 300.0, 20.0, 0.1
LOG_TAIL_LINES = 3


class DiedError(HeadwayError):
    """A server did not start, or ended by itself."""


class ServerProcess:
    """`headway serve FOLDER FLAGS…` on a free loopback port, ready inside its context."""

    def __init__(self, folder: Path, flags: Sequence[str] = (), start_s: float = START_S) -> None:
        self._folder, self._flags, self._start_s = folder, flags, start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path()
        self.url = ""

    def __enter__(self) -> Self:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with tempfile.NamedTemporaryFile(prefix="headway-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            self._process = subprocess.Popen(
                [*self._command(), f"--port={port}", "--log-level=error", *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for us; we stop it ourselves
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _command(self) -> list[str]:
        """Return the command of the server below its watcher, without options."""
        watcher = ["headway.cluster.child", str(STOP_S), "--", sys.executable]
        serve = ["headway.cli.main", "serve", str(self._folder)]
        return [sys.executable, "-m", *watcher, "-m", *serve]

    def _wait(self) -> None:
        until_s = time.monotonic() + self._start_s
        while not is_ready(self.url):
            self.check()
            if time.monotonic() > until_s:
                raise DiedError(f"It was not ready within {self._start_s:.0f} s.", self.log_tail())
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raise DiedError where the process has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise DiedError(f"It ended with status {self._process.returncode}.", self.log_tail())

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " ".join(lines[-LOG_TAIL_LINES:])

    def stop(self) -> None:
        """Terminate it; kill its whole session where it does not end, or where this is
        interrupted."""
        if self._process is None:
            return
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S + 5)
        finally:
            if self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._log.unlink(missing_ok=True)

    def __exit__(self, *error: object) -> None:
        self.stop()


def free_port() -> int:
    """Return a free port of the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_ready(url: str) -> bool:
    """Return whether the server answers requests."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
