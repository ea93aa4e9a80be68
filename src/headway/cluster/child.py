"""A server of ours as the child of a process that somebody else may kill.

    python -m headway.cluster.child SECONDS -- headway serve FOLDER …

runs the command until its own parent is gone, or until it is asked to end: then it asks the command
to end, and kills it after so many seconds. `Child` starts one and waits for the greeting.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

from headway.core.errors import HeadwayError

POLL_S = 0.5
GREETING = re.compile(r"ready: (http://\S+?)(/v1)?$")
KEPT_LINES = 40


class Child:
    """A process that ends with this one, and the URL that it greeted with."""

    def __init__(self, command: Sequence[str], *, drain_s: float, ready_s: float) -> None:
        """Start it and wait for the greeting. Raises HeadwayError with its last words."""
        self.drain_s = drain_s
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._url = ""
        self._greeted = threading.Event()
        watched = [sys.executable, "-m", "headway.cluster.child", str(drain_s), "--", *command]
        self.process = subprocess.Popen(
            watched,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        if not self._greeted.wait(ready_s) or not self._url:
            self.stop()
            raise HeadwayError(
                f"{command[0]} did not come up: {' '.join(self._said)[-500:]}",
                "Try the same command by hand.",
            )

    def _listen(self) -> None:
        """Read what it says until it ends, so that no pipe is ever full."""
        assert self.process.stdout is not None
        with self.process.stdout as said:
            for line in said:
                self._said.append(line.strip())
                found = GREETING.search(line.strip())
                if found and not self._url:
                    self._url = found[1]
                    self._greeted.set()
        self._greeted.set()

    @property
    def url(self) -> str:
        """Where it listens, without /v1."""
        return self._url

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def hang_up(self) -> None:
        """Let it read its configuration again."""
        if self.is_alive:
            self.process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """Ask it to end, and wait; safe to call twice."""
        if self.is_alive:
            self.process.terminate()
        try:
            self.process.wait(self.drain_s + 4 * POLL_S + 5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join(POLL_S)


def watch(parent: int, drain_s: float, command: Sequence[str]) -> int:
    """Run `command` until it ends, somebody asks to end, or `parent` is gone; its status, 128 and
    the signal's number where it was killed."""
    asked, hung_up = threading.Event(), threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: hung_up.set())  # before there is anybody to tell
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    signal.signal(signal.SIGINT, lambda *_: asked.set())
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGHUP, lambda *_: child.send_signal(signal.SIGHUP))
    if hung_up.is_set():
        child.send_signal(signal.SIGHUP)
    while child.poll() is None and not asked.is_set() and os.getppid() == parent:
        asked.wait(POLL_S)
    if child.poll() is None:
        child.terminate()
        until_s = time.monotonic() + drain_s
        while child.poll() is None and time.monotonic() < until_s:
            time.sleep(POLL_S / 5)
    if child.poll() is None:
        child.kill()
    status = child.wait()
    return status if status >= 0 else 128 - status


def main(arguments: Sequence[str]) -> int:
    """Run what stands behind `--`."""
    at = list(arguments).index("--")
    return watch(os.getppid(), float(arguments[0]), list(arguments[at + 1 :]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
