"""What the tests of the native kernels are given."""

import pytest

from headway.runtime.native.library import NativeLibrary
from parity.native_sets import loaded


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    """The kernels of one instruction set, from `native_sets.each_instruction_set`."""
    return loaded(*request.param)
