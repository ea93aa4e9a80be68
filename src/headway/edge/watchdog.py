"""Watchdog that kills a server whose event loop does not see signals; started by `deadline.py`.

Arguments: the descriptor that the C signal handler writes to, seconds, and the server's process id.
A byte that is unread for that long means that a thread holds the interpreter's lock. The program
uses only the standard library, and ends with its parent.
"""

import fcntl
import os
import signal
import struct
import sys
import time

SIOCOUTQ = 0x5411
"""Linux ioctl: number of bytes that the other end of a socket has not read."""
POLL_S = 0.5


def is_unread(descriptor: int) -> bool:
    """Return whether a signal's byte waits for the event loop."""
    (size,) = struct.unpack("i", fcntl.ioctl(descriptor, SIOCOUTQ, b"\0" * 4))
    return bool(size)


def main() -> None:
    """Check twice a second until the parent has ended, or kill it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the server, which ends this process
    descriptor, limit_s, parent = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    num_looks = 0
    while os.getppid() == parent:
        num_looks = num_looks + 1 if is_unread(descriptor) else 0
        if num_looks * POLL_S > limit_s:  # checks, not a clock: a suspended machine does not count
            os.kill(parent, signal.SIGKILL)
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
