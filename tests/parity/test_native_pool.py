"""The threads of the native kernels: one caller at a time, and none of them in a forked child."""

import subprocess
import sys
import threading
import time

import torch

from headway.runtime.native.linear import NativeLinear
from parity.native_sets import each_instruction_set, operands

CHILD = """
import os, sys, torch
from headway.runtime.native.linear import NativeLinear
from headway.runtime.native.load import load

torch.set_num_threads(1)  # threads of torch do not outlive a fork either
library, why = load(3)
kernel = NativeLinear(library)
x, weight = torch.ones(40, 512), torch.ones(3000, 512)
packed = kernel.prepare(weight)
before = kernel(x, packed, None)
child = os.fork()
again = kernel(x, packed, None)
del kernel, library
if child:
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status))
sys.exit(0 if torch.equal(again, before) else 1)
"""


@each_instruction_set
def test_a_forked_child_computes_and_ends(library):
    """Its parent's threads are not there: it does not wait for them, when it computes or exits."""
    done = subprocess.run([sys.executable, "-c", CHILD], timeout=60, capture_output=True, text=True)
    assert done.stdout == "child 0\n", done.stderr
    assert done.returncode == 0


@each_instruction_set
def test_two_callers_at_once_are_an_error_or_take_turns(library):
    """Never a wrong number: a call is right, or it is refused in words."""
    x, weight, _ = operands(64, 512, 2000, torch.float32, False)
    kernels = [NativeLinear(library) for _ in range(2)]
    packed = kernels[0].prepare(weight)
    expected = kernels[0](x, packed, None)
    refused, wrong = [], []

    ends_s = time.monotonic() + 30

    def call(kernel: NativeLinear) -> None:
        """At least 60 times, and on until the calls have met: one core lets them meet seldom."""
        number = 0
        while number < 60 or not (refused or wrong or time.monotonic() > ends_s):
            number += 1
            try:
                if not torch.equal(kernel(x, packed, None), expected):
                    wrong.append(kernel)
            except ValueError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=call, args=(kernel,)) for kernel in kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert set(refused) <= {"two threads call the same kernels at once"}
    assert refused, "the calls never met"
    assert torch.equal(kernels[0](x, packed, None), expected)
