"""Notifications to systemd: sd_notify(3), which sends one datagram.

The socket is that of the environment; without one nothing is sent. Units of `Type=notify` get
READY, RELOADING, STOPPING and a status line. A unit with `WatchdogSec=` gets two signs of life in
that time, as long as the server works.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, MutableMapping


class Notifier:
    """Notification socket of the unit; `notify` sends one state."""

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = "\0" + address[1:] if address.startswith("@") else address

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> "Notifier":
        """Create the notifier and remove its variables, because no child process is the unit."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        owner = environment.pop("WATCHDOG_PID", "") or str(os.getpid())
        is_for_us = microseconds.isdecimal() and int(microseconds) > 0 and owner == str(os.getpid())
        return cls(address, int(microseconds) / 1e6 if is_for_us else None)

    def notify(self, *lines: str) -> None:
        """Send lines such as READY=1; a socket without a reader is not an error."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unit:
            unit.setblocking(False)
            unit.sendto("\n".join(lines).encode(), self._address)

    def ready(self) -> None:
        self.notify("READY=1", "STATUS=Serving.")

    def reloading(self) -> None:
        self.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self.notify("STOPPING=1", "STATUS=Running requests may finish; new ones are refused.")

    async def watch(self, is_alive: Callable[[], bool]) -> None:
        """Send WATCHDOG=1 in time, as long as the event loop runs and `is_alive` is true."""
        while self.watchdog_s is not None:
            if is_alive():
                self.notify("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)
