"""The claims that are arithmetic, beside the same numbers worked by hand."""

import pytest

from headway.spec import ModelSpec
from literature import arithmetic, shapes
from literature.claim import HOLDS, NOT_HERE
from literature.subject import Subject

NOBODY = Subject()
FOUND = {claim.key: claim.measure(NOBODY) for claim in arithmetic.CLAIMS}


def headline(key: str) -> float:
    return FOUND[key].figures[0].value


def test_kv_bytes_are_those_counted_by_hand():
    """2 · layers · heads · head size · 2 bytes, a token."""
    assert headline("kv-13b") == pytest.approx(2 * 40 * 5120 * 2 * 32 * 2048 / 1e9)
    assert headline("kv-500b") == pytest.approx(2 * 118 * 48 * 128 * 2 * 512 * 2048 / 1e12)
    assert headline("kv-window") == pytest.approx(100 * (1024 + 16) / 10240)


def test_money_and_bandwidth():
    assert headline("dollars") == pytest.approx(2 / (100 * 3600) * 1e6)
    assert headline("mbu") == pytest.approx(100 * 7e9 * 2 * 100 / 2e12)


def test_each_means_makes_keys_and_values_smaller():
    grouped, mqa, windows, int8 = FOUND["kv-twenty"].figures
    assert mqa.value == 8  # 8 KV heads become one
    assert mqa.value < windows.value < grouped.value < int8.value


def test_the_sizes_are_those_of_the_models():
    sizes = {
        name: shapes.spec_of(config).num_parameters / 1e9
        for name, config in (("7b", shapes.LLAMA_2_7B), ("13b", shapes.LLAMA_2_13B))
    }
    assert sizes == {"7b": pytest.approx(6.74, abs=0.01), "13b": pytest.approx(13.02, abs=0.01)}
    assert shapes.spec_of(shapes.LLAMA_3_8B).num_parameters == pytest.approx(8.03e9, rel=0.01)


def test_our_own_fault_would_be_told(monkeypatch):
    """Were a token counted at half its bytes, the claim would not hold."""
    assert FOUND["kv-13b"].verdict == HOLDS
    real = arithmetic.held
    monkeypatch.setattr(arithmetic, "held", lambda *of: real(*of) // 2)
    assert arithmetic.kv_13b(NOBODY).verdict == NOT_HERE


def test_half_the_bytes_by_the_formats_themselves():
    """int4 by 64 takes half a byte and a scale for 64, int8 a byte and a scale a row."""
    times, int8, int4, _ = FOUND["half-bytes"].figures
    assert 1.9 < int8.value < 2 and 1.75 < int4.value < 2
    assert times.value == pytest.approx(int8.value * int4.value)
    assert isinstance(shapes.spec_of(shapes.HALF_B), ModelSpec)
