"""Kernels that were compiled from other sources are not used, and the reason is told."""

import sys
from types import ModuleType

import pytest

from headway.runtime.native.available import (
    GROUP_BYTES,
    NUM_CODES,
    OPERATION_BYTES,
    best_instruction_set,
)


@pytest.mark.parametrize("size", [None, OPERATION_BYTES - 16])
def test_kernels_of_another_version_are_not_used(monkeypatch, size):
    module = ModuleType("headway.runtime.native._native")
    module.instruction_sets = lambda: ["avx2"]
    module.group_bytes, module.num_codes = GROUP_BYTES, NUM_CODES
    if size is not None:
        module.operation_bytes = size
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("headway.runtime.native._native", module, raising=False)
    name, why = best_instruction_set()
    assert name == "" and "install Headway again" in why
    module.operation_bytes = OPERATION_BYTES
    assert best_instruction_set()[0] == "avx2"
    module.group_bytes = GROUP_BYTES - 8
    assert best_instruction_set()[0] == ""
    module.group_bytes, module.num_codes = GROUP_BYTES, NUM_CODES - 1
    assert best_instruction_set()[0] == ""
