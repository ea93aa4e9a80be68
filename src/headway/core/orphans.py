"""Child processes that end with their parent, even if they are stopped (SIGSTOP).

Engines, their ranks and the trials of their grammars watch their parent's id, or the end of a pipe,
and end when it is gone. A stopped process watches nothing: an engine that was stopped with all its
children (SIGSTOP to the group), and then killed, left these stopped for ever. So the kernel wakes
each child when its parent ends.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def wake_when_orphaned() -> None:
    """Let the kernel send SIGCONT to this process when its parent, or the parent's thread, ends.

    SIGCONT has no effect on a running process. Only Linux has this.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
