"""What the compiler made of the native kernels' innermost loops."""

import itertools
import re
import shutil
import subprocess

import pytest

from headway.runtime.native.available import best_instruction_set

pytestmark = [
    pytest.mark.skipif(not best_instruction_set()[0], reason="no native kernels here"),
    pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump here"),
]

ADDING = re.compile(r"\s(vdpbf16ps|vpdpbusd)\s.*,(%zmm\d+)$")
"""A product that is added to a register, the last operand."""


def stored_at_once(code: list[str]) -> tuple[int, int]:
    """(products that are added, those whose sum goes to the stack in the next instruction)."""
    found, stored = 0, 0
    for line, following in itertools.pairwise(code):
        if adding := ADDING.search(line):
            found += 1
            stored += bool(re.search(rf"\svmov\w+\s+{adding[2]},.*\(%rsp\)", following))
    return found, stored


def test_a_sum_that_goes_to_the_stack_is_seen():
    product = " 2cfec:\tvdpbf16ps %zmm9,%zmm0,%zmm3"
    assert stored_at_once([product, " 2cff2:\tvmovaps %zmm3,0x88(%rsp)"]) == (1, 1)
    assert stored_at_once([product, " 2cff2:\tvmovaps %zmm2,0x88(%rsp)"]) == (1, 0)
    assert stored_at_once([product, product, " 2cff2:\tvmovaps %zmm3,0x40(%rdi)"]) == (2, 0)


def test_sums_stay_in_registers():
    """A sum that goes to the stack and back at each step costs more than half of the speed."""
    from headway.runtime.native import _native

    command = ["objdump", "--disassemble", "--no-show-raw-insn", _native.__file__]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found, stored = stored_at_once(code)
    assert stored <= found // 20
