"""The scheduler makes the very plans that were recorded (`golden_plans`), block by block."""

import logging

import pytest

from golden_plans import NUM_WORLDS, PLANS_PER_WORLD, RECORDED, digests


@pytest.fixture(autouse=True)
def quiet():
    """Planted failures are not logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_plans_are_those_recorded():
    """A line for each world, then one for all. A change on purpose: `python tests/golden_plans.py`
    writes them again, in a commit that says which decision changed."""
    recorded = RECORDED.read_text(encoding="utf-8").split()
    assert len(recorded) == NUM_WORLDS + 1 and NUM_WORLDS * PLANS_PER_WORLD == 10_000
    computed = digests()
    changed = [n for n, (new, old) in enumerate(zip(computed, recorded, strict=True)) if new != old]
    assert changed == [], "worlds with other plans; the last number is all of them"
