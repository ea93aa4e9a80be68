"""A Headway server as a child process that ends with its parent, even if that is killed.

    python -m headway.cluster.child SECONDS -- headway serve FOLDER …

runs the command until its own parent ends or it gets SIGTERM or SIGINT. It then sends SIGTERM to
the command, and SIGKILL after SECONDS. `Child` starts such a process and waits for its greeting.
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
MAX_OUTPUT_LINES = 40


class Child:
    """A process that ends with this one, and the URL in its greeting."""

    def __init__(self, command: Sequence[str], *, drain_s: float, ready_s: float) -> None:
        """Start it and wait for the greeting. Raises HeadwayError with its last output."""
        self.drain_s = drain_s
        self._output: deque[str] = deque(maxlen=MAX_OUTPUT_LINES)
        self._url = ""
        self._greeted = threading.Event()
        supervised = [sys.executable, "-m", "headway.cluster.child", str(drain_s), "--", *command]
        self.process = subprocess.Popen(
            supervised,
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
                f"{command[0]} did not come up: {' '.join(self._output)[-500:]}",
                "Try the same command by hand.",
            )

    def _listen(self) -> None:
        """Read the output until it ends, so that the pipe never fills."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._output.append(line.strip())
                greeting = GREETING.search(line.strip())
                if greeting and not self._url:
                    self._url = greeting[1]
                    self._greeted.set()
        self._greeted.set()

    @property
    def url(self) -> str:
        """The URL at which it listens, without /v1."""
        return self._url

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def hang_up(self) -> None:
        """Make it read its configuration again."""
        if self.is_alive:
            self.process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """Stop it and wait; a second call has no effect."""
        if self.is_alive:
            self.process.terminate()
        try:
            self.process.wait(self.drain_s + 4 * POLL_S + 5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join(POLL_S)


def supervise(parent: int, drain_s: float, command: Sequence[str]) -> int:
    """Run `command` until it ends, a signal asks to stop, or `parent` is gone; return its status.

    The status is 128 plus the signal's number if the command was killed.
    """
    stopping, hung_up = threading.Event(), threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: hung_up.set())  # until there is a child to send it to
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGINT, lambda *_: stopping.set())
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGHUP, lambda *_: child.send_signal(signal.SIGHUP))
    if hung_up.is_set():
        child.send_signal(signal.SIGHUP)
    while child.poll() is None and not stopping.is_set() and os.getppid() == parent:
        stopping.wait(POLL_S)
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
    """Run the command after `--`."""
    at = list(arguments).index("--")
    return supervise(os.getppid(), float(arguments[0]), list(arguments[at + 1 :]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
