"""The same tokens whatever is guessed, on each instruction set that this CPU runs.

The best of them runs in the other tests; here are the rest, with rounded weights and KV as well.
"""

import pytest

from headway.engine.engine import Engine
from parity.cobatch import check_mix, rounded_engines
from parity.native_sets import NAMES, only

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(len(NAMES) < 2, reason="this CPU runs no second instruction set"),
]

FORMATS = {
    "bf16": {"dtype": "bfloat16"},
    "bf16, KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4", "quantization_group": 32},
    "int4, KV int8": {
        "quantization": "int4",
        "quantization_group": 32,
        "kv_cache_dtype": "int8",
    },
}
IN_THE_SUITE = ("bf16", "int4, KV int8")
CASES = [
    pytest.param(
        (name, formats),
        id=f"{name}, {formats}",
        marks=() if formats in IN_THE_SUITE else pytest.mark.hardening,
    )
    for name in NAMES[1:]
    for formats in FORMATS
]


@pytest.fixture(scope="module", params=CASES)
def mixed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Engine, list[Engine]]:
    """Instruction set, an engine for one request at a time, and some with little room."""
    name, formats = request.param
    with only(name):
        return name, *rounded_engines(tmp_path_factory.mktemp("mixed"), **FORMATS[formats])


def test_an_engine_has_the_kernels_of_its_set(mixed):
    name, *engines = mixed
    described = [engine.executor.describe().kernels for engine in (engines[0], *engines[1])]
    assert {kernels["attention"][1] for kernels in described} == {f"compiled for {name}"}


def test_tokens_do_not_depend_on_guesses(mixed):
    _, *engines = mixed
    kept: list[int] = []
    for number in range(6):
        check_mix(number, *engines, kept)
    assert sum(kept) > 50, "the guesses are too bad to prove much"


@pytest.mark.hardening
def test_tokens_do_not_depend_on_guesses_at_length(mixed):
    _, *engines = mixed
    kept: list[int] = []
    for number in range(60, 260):
        check_mix(number, *engines, kept)
    assert sum(kept) > 2000, "the guesses are too bad to prove much"
