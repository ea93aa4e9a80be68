"""Deadline of a shutdown: the process ends at it, whatever its threads do.

Python's exit waits for a thread that runs for ever, and a thread that holds the interpreter's lock
keeps the event loop from seeing the signal at all. So two timers run without that lock. After the
signal faulthandler's C thread counts down, and ends the process with the stack of every thread on
stderr. Until the event loop has seen a signal, `watchdog.py`, a small child process, checks whether
the byte that the signal wrote for the loop is still unread.
"""

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

STDERR = 2
GRACE_S = 10.0
"""Seconds after the drain for closing connections, engines and files."""


class Deadline:
    """Shutdown deadline, armed by the first signal; the watchdog runs from `watch` to `close`."""

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
