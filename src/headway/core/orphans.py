"""A process that was started by another and ends with it, though it was stopped before.

Engines, their ranks and the trials of their grammars look at their parent's id, or at the end of a
pipe, and end when it is gone. One that is stopped looks at nothing: an engine that was stopped with
all its children (SIGSTOP to the group), and then killed, left these stopped for ever. So the kernel
wakes each when its parent ends.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def wake_when_orphaned() -> None:
    """From now on this process goes on when its parent, or the thread of it that started this one,
    ends: SIGCONT, which is nothing to a process that runs. Linux alone has it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
