"""What is freed is kept for what comes next."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from headway.runtime.memory import keep_freed

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        np.full(1 << 22, 1.0, np.float32)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if KEEP:
    keep_freed()
faults(1)
print(faults(8))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="thresholds are glibc's")
def test_what_is_freed_is_kept_for_what_comes_next():
    """16 MB eight times: 4,096 pages each where the system takes them back, none where it does not.

    An array of numpy's of 4 MB and more may have huge pages, so a round counts 8 faults at least. A
    few of those kept may be others': a system that is short of memory takes back pages anywhere.
    """
    fresh, kept = (
        int(subprocess.check_output([sys.executable, "-c", f"KEEP = {keep}\n{FAULTS}"]))
        for keep in (False, True)
    )
    if fresh < 8 * 8:
        pytest.skip("this C library keeps it unasked")
    assert kept < fresh / 4
