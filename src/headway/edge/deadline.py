"""The end of a server that was asked to end: at its deadline, whatever its threads do.

A thread that runs for ever is waited for by Python's own exit, and one that holds the interpreter's
lock keeps the event loop from hearing the signal at all. So two clocks run that need no lock. From
the signal on faulthandler's C thread counts down, and ends the process with every thread's place on
stderr. Until the loop has heard of a signal, `watchdog.py`, a small process beside this one, looks
whether what the signal wrote for the loop still lies unread.
"""

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

STDERR = 2
GRACE_S = 10.0
"""What ends after the drain has this long: connections, engines, files."""


class Deadline:
    """Armed by the first signal; the watchdog runs from `watch` to `close`."""

    def __init__(self, drain_s: float) -> None:
        self._after_s = drain_s + GRACE_S
        self._watchdog: subprocess.Popen[bytes] | None = None

    def watch(self) -> None:
        """Start the watchdog; call it when the loop has its signal handlers."""
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
        """From now on the process has only so long to end by itself."""
        nowhere = sys.__stderr__ is None or sys.__stderr__.closed
        descriptor = os.open(os.devnull, os.O_WRONLY) if nowhere else STDERR
        faulthandler.dump_traceback_later(self._after_s, exit=True, file=descriptor)

    def close(self) -> None:
        """End the watchdog; the deadline stays, for the interpreter has yet to end."""
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog = None
