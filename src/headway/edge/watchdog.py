"""Ends a server that does not hear its signals: a program of its own, started by `deadline.py`.

Arguments: the descriptor that the C handler of a signal writes to, seconds, the process id of the
server. What lies unread for so long was never taken by the event loop: a thread holds the
interpreter's lock. It needs nothing but the standard library, and ends with its parent.
"""

import fcntl
import os
import signal
import struct
import sys
import time

SIOCOUTQ = 0x5411
"""Linux: how many bytes of a socket its other end has not read."""
POLL_S = 0.5


def unread(descriptor: int) -> bool:
    """Whether a signal's byte waits for the loop."""
    (size,) = struct.unpack("i", fcntl.ioctl(descriptor, SIOCOUTQ, b"\0" * 4))
    return bool(size)


def main() -> None:
    """Look twice a second until the parent has ended, or is ended here."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the server, which ends this one
    descriptor, limit_s, parent = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    num_looks = 0
    while os.getppid() == parent:
        num_looks = num_looks + 1 if unread(descriptor) else 0
        if num_looks * POLL_S > limit_s:  # looks, not a clock: a paused machine counts for nothing
            os.kill(parent, signal.SIGKILL)
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
