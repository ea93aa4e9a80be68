"""A steady decode is let pass at once, and nothing tells it from one that is looked at each step.

Two engines are given the same requests; in one of them no sequence is ever steady. All that the
runtime is told, all that clients are told and all that is recorded is the same, whatever happens.
"""

import logging
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import EXAMPLES, World, additions, make_settings, perform, shapes, swap_settings
from headway.core.terms import Terms
from headway.engine.sequence import Sequence

TERMS = Terms(ttft_s=0.5, tpot_s=0.05)
operations = st.lists(
    st.one_of(
        additions,
        additions,
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.sampled_from([None, 0, 1])),
        st.tuples(st.just("raise"), st.sampled_from(["submit", "sample", "collect"])),
        st.tuples(st.just("fail"), st.frozensets(st.integers(0, 3), min_size=1, max_size=2)),
    ),
    min_size=4,
    max_size=20,
)


class Told(World):
    """A world that keeps every plan, update and record, and counts steady rows."""

    def __init__(self, *given, **how) -> None:
        super().__init__(*given, **how)
        self.told: list[bytes] = []
        self.num_steady = 0

    def step(self):
        scheduler = self.engine.scheduler
        self.num_steady += sum(s.computed < s.steady_until for s in scheduler.running)
        updates, record = super().step()
        self.told.append(msgspec.msgpack.encode([self.plan, updates, record]))
        return updates, record


def run(shape, chosen) -> Told:
    """A world in which all of these operations were done."""
    world = Told(shape)
    for operation in chosen:
        perform(world, operation)
    world.drain()
    return world


def both(shape, chosen) -> tuple[Told, Told]:
    """The same world twice; in the second nobody is steady."""
    with patch.object(Sequence, "settle", lambda self, block_size: None):
        slow = run(shape, chosen)
    return run(shape, chosen), slow


@settings(max_examples=max(EXAMPLES // 2, 1))
@given(shapes, operations)
def test_steady_or_not_all_is_the_same(shape, chosen):
    """Also where blocks are short, siblings fork, clients leave and steps fail."""
    logging.disable(logging.CRITICAL)
    try:
        fast, slow = both(shape, chosen)
    finally:
        logging.disable(logging.NOTSET)
    assert fast.told == slow.told
    assert not slow.num_steady


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority", "slo"])
@pytest.mark.parametrize("kind", ["plain", "swap", "uncached"])
def test_most_decodes_are_steady(policy, kind):
    """Answers of 60 tokens in blocks of 8, so few blocks that some are preempted, and one client
    that leaves: the two are the same, and three of four rows or more are steady between."""
    how = {"policy": policy, "num_blocks": (40,), "block_size": 8, "max_model_len": 100}
    how |= {"max_num_seqs": 6, "budget": 32}
    shape = swap_settings(**how) if kind == "swap" else make_settings(**how)
    if kind == "uncached":
        shape = make_settings(**how, prefix_cache="")
    asked = {"n": 1, "max_tokens": 60, "ignore_eos": True, "stop_token_ids": []}
    chosen = [("add", [k] * (5 + 3 * k), asked, 0, "ab"[k % 2], TERMS) for k in range(9)]
    chosen += [("step", 30), ("abort", 3, None)]
    fast, slow = both(shape, chosen)
    assert fast.told == slow.told
    rows = sum(len(msgspec.msgpack.decode(told)[0][2]) for told in fast.told)
    assert fast.num_steady > rows / 2
    assert fast.engine.scheduler.num_preemptions or kind == "swap"


def test_who_is_watched_is_looked_at_in_each_step():
    """Log-probabilities, and an end within the answer's length: no step of it is taken unseen."""
    world = World(make_settings(block_size=8, num_blocks=(40,), max_model_len=100))
    world.add([1, 2, 3], max_tokens=30, ignore_eos=True, logprobs=1)
    world.add([1, 2, 3], max_tokens=30, ignore_eos=True)
    world.step()
    world.step()
    watched, plain = world.engine.scheduler.running
    assert watched.steady_until == 0
    assert plain.steady_until == 8 and plain.computed < 8
    world.drain()
