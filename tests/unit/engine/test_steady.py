"""A steady decode is let pass at once, and nothing tells it from one that is looked at each step.

Two engines are given the same requests; in one of them no sequence is ever steady. All that the
runtime is told, all that clients are told and all that is recorded is the same, whatever happens;
also where sources and a drafter guess in some steps, and in others nobody.
"""

import logging
import random
from math import inf
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import (
    EXAMPLES,
    VOCAB,
    World,
    additions,
    make_settings,
    perform,
    shapes,
    swap_settings,
)
from headway.core.speculation_config import SpeculationConfig
from headway.core.terms import Terms
from headway.engine.scheduler import Scheduler
from headway.engine.sequence import Sequence
from headway.engine.speculation.backoff import Backoff
from headway.engine.speculation.proposers.proposal import Proposal
from headway.engine.speculation.proposers.suffix import SuffixProposer
from headway.engine.speculation.speculation import Speculation
from late_world import LateWorld

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

    def _guessed(self):
        speculation = self.engine.scheduler.drafts.speculator
        counts = speculation.counts.values() if speculation is not None else ()
        return sum(count for count, _ in counts), sum(kept for _, kept in counts)

    def step(self):
        scheduler = self.engine.scheduler
        self.num_steady += sum(s.computed < s.steady_until for s in scheduler.running)
        updates, record = super().step()
        self.told.append(msgspec.msgpack.encode([self.plan, updates, record]))
        return updates, record


class ToldLate(Told, LateWorld):
    """The same with steps in flight."""


class Dozing(Backoff):
    """Asks and skips at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng, self.num_due, self._skipped = random.Random(seed), 0, 0

    is_active = property(lambda self: self._skipped > 3)

    def is_due(self, max_interval=inf):
        self._skipped -= 1
        if self._skipped >= 0:
            return False
        self._skipped = self.rng.choice((0, 0, 1, 2, 5, 9, 20))
        self.num_due += 1
        return True


class Knowing:
    """A source that knows the answer up to a wrong token now and then."""

    name = "lookup"

    def __init__(self, truth, seed: int) -> None:
        self.truth, self.rng = truth, random.Random(seed)

    def propose(self, sequence, most):
        found = self.truth(sequence)[sequence.num_generated :][: self.rng.randint(0, most)]
        if found and self.rng.random() < 0.3:
            found[-1] = (found[-1] + 1) % VOCAB
        return Proposal(found, len(found))

    def observe(self, sequence, drafts, sample):
        pass

    def forget(self, sequence):
        pass


def let_guess(world: World, seed: int) -> Speculation:
    """Give `world` a speculator that rests and wakes at random."""
    sources = ("lookup", "suffixes", "draft") if seed % 3 else ("lookup", "suffixes")
    config = SpeculationConfig(sources=sources, max_drafts=4, draft_share=0.01)
    speculation = Speculation(config, world.engine.cost)
    speculation.backoff = Dozing(seed)
    free = [Knowing(world._truth, seed), SuffixProposer()]
    speculation.proposers = [*speculation.proposers[:-2], *free]
    world.engine.scheduler.drafts.speculator = speculation
    rng = random.Random(seed)
    world.executor.propose = lambda count: [rng.randrange(VOCAB) for _ in range(count)]
    return speculation


def run(shape, chosen, seed: int | None = None) -> Told:
    """A world in which all of these operations were done; with a `seed` somebody guesses."""
    world = ToldLate(shape) if shape.scheduler.overlap else Told(shape)
    if seed is not None:
        let_guess(world, seed)
    for operation in chosen:
        perform(world, operation)
    world.drain()
    return world


def both(shape, chosen, seed: int | None = None) -> tuple[Told, Told]:
    """The same world twice; in the second nobody is steady."""
    with patch.object(Sequence, "settle", lambda self, block_size: None):
        slow = run(shape, chosen, seed)
    return run(shape, chosen, seed), slow


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


@settings(max_examples=max(EXAMPLES // 2, 1))
@given(shapes, operations, st.integers(0, 1000))
def test_steady_or_not_guesses_are_the_same(shape, chosen, seed):
    """Who is asked is not steady until it is heard what came; what nobody heard of is made up for
    when it is asked again, or has ended."""
    logging.disable(logging.CRITICAL)
    try:
        fast, slow = both(shape, chosen, seed)
    finally:
        logging.disable(logging.NOTSET)
    assert fast.told == slow.told
    assert not slow.num_steady
    learned, other = (world.engine.scheduler.drafts.speculator for world in (fast, slow))
    assert learned.counts == other.counts


@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("kind", ["plain", "swap", "late"])
def test_between_looks_decodes_are_steady(kind, seed):
    """Long answers, some of which are preempted, and looks between rests: guesses are verified and
    kept, the two are the same, and many rows are steady nevertheless."""
    how = {"num_blocks": (40,), "block_size": 8, "max_model_len": 100, "max_num_seqs": 6}
    how |= {"budget": 64, "policy": ["slo", "fcfs"][seed % 2], "overlap": int(kind == "late")}
    shape = swap_settings(**how) if kind == "swap" else make_settings(**how)
    asked = {"n": 1, "max_tokens": 60, "ignore_eos": True, "stop_token_ids": []}
    chosen = [("add", [k] * (5 + 3 * k), asked, 0, "ab"[k % 2], TERMS) for k in range(9)]
    chosen += [("step", 30), ("abort", 3, None)]
    fast, slow = both(shape, chosen, seed)
    assert fast.told == slow.told
    rows = sum(len(msgspec.msgpack.decode(told)[0][2]) for told in fast.told)
    assert fast.num_steady > rows / 8
    speculation = fast.engine.scheduler.drafts.speculator
    assert speculation.backoff.num_due > 5
    assert sum(kept for _, kept in speculation.counts.values()) > 20


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


@pytest.mark.parametrize("prefix_cache", ["", "lru"])
def test_who_only_needs_a_block_is_steady(prefix_cache):
    """40 tokens in blocks of 4: the prompt is planned by itself, and of the answer the first token
    and the last are looked at."""
    shape = make_settings(
        block_size=4, num_blocks=(64,), max_model_len=100, prefix_cache=prefix_cache
    )
    world = World(shape)
    asked = world.add([1, 2, 3], max_tokens=40, ignore_eos=True, stop_token_ids=[])
    planned, taken = Scheduler._schedule, Scheduler._take
    with (
        patch.object(Scheduler, "_schedule", autospec=True, side_effect=planned) as plan,
        patch.object(Scheduler, "_take", autospec=True, side_effect=taken) as take,
    ):
        world.drain()
    assert plan.call_count == 1 and take.call_count == 2
    assert len(world.of(asked)[0].tokens) == 40
