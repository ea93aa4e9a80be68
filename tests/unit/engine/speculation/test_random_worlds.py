"""Random requests and operations with draft tokens in some steps: answers are as without them.

The speculator is the real one, with a backoff that skips steps at random, so its state has to stay
right over steps without draft tokens, preemptions, aborts and failures.
"""

import logging
import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import EXAMPLES, VOCAB, World, additions, perform, shapes
from fakes import make_settings
from headway.config.speculation_config import SpeculationConfig
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.backoff import Backoff
from headway.engine.speculation.proposers.proposal import Proposal
from headway.engine.speculation.proposers.suffix import SuffixProposer

advances = st.tuples(st.just("step"), st.integers(1, 12))
operations = st.lists(
    st.one_of(
        *(additions, additions, advances, advances),
        st.tuples(st.just("abort"), st.integers(0, 20), st.sampled_from([None, 0, 1])),
        st.tuples(st.just("raise"), st.sampled_from(["submit", "sample", "collect"])),
        st.tuples(st.just("fail"), st.frozensets(st.integers(0, 3), min_size=1, max_size=2)),
    ),
    min_size=4,
    max_size=20,
)


@pytest.fixture(autouse=True)
def quiet():
    """Planted failures are not logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class RandomBackoff(Backoff):
    """A backoff that skips a random number of steps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng, self._skipped = random.Random(seed), 0

    is_active = property(lambda self: self._skipped > 3)

    def is_due(self, max_interval=inf):
        self._skipped -= 1
        if self._skipped < 0:
            self._skipped = self.rng.choice((0, 0, 1, 2, 5, 9, 20))
            return True
        return False


class AnswerProposer:
    """A proposer that knows the answer but for a wrong token now and then."""

    name = "lookup"

    def __init__(self, truth, seed: int) -> None:
        self.truth, self.rng = truth, random.Random(seed)

    def propose(self, sequence, most):
        drafts = self.truth(sequence)[sequence.num_generated :][: self.rng.randint(0, most)]
        if drafts and self.rng.random() < 0.3:
            drafts[-1] = (drafts[-1] + 1) % VOCAB
        return Proposal(drafts, len(drafts))

    def observe(self, sequence, drafts, sample):
        pass

    def forget(self, sequence):
        pass


def speculating_world(shape, seed: int) -> World:
    """Return a world whose speculator has three proposers, or two without a drafter."""
    world = World(shape)
    sources = ("lookup", "suffixes", "draft") if seed % 3 else ("lookup", "suffixes")
    config = SpeculationConfig(sources=sources, num_speculative_tokens=4, draft_share=0.01)
    speculation = AdaptiveSpeculator(config, world.engine.cost)
    speculation.backoff = RandomBackoff(seed)
    others = speculation.proposers[:-2]
    speculation.proposers = [*others, AnswerProposer(world._truth, seed), SuffixProposer()]
    world.engine.scheduler.drafts.speculator = speculation
    rng = random.Random(seed)
    world.executor.propose = lambda count: [rng.randrange(VOCAB) for _ in range(count)]
    world._guessed = lambda: verified(speculation)  # type: ignore[method-assign]
    return world


def verified(speculation: AdaptiveSpeculator) -> tuple[int, int]:
    """Return how many draft tokens were verified and accepted so far."""
    counts = speculation.counts.values()
    return sum(count for count, _ in counts), sum(accepted for _, accepted in counts)


@settings(max_examples=max(EXAMPLES // 2, 1))
@given(shapes, operations, st.integers(0, 1000))
def test_answers_are_as_without_draft_tokens(shape, chosen, seed):
    """`World.drain` compares every answer with the one computed without an engine."""
    world = speculating_world(shape, seed)
    for operation in chosen:
        perform(world, operation)
    world.drain()


def test_draft_tokens_are_verified_and_accepted_in_such_worlds():
    """The worlds above would prove nothing without them."""
    total = (0, 0)
    for seed in range(6):
        policy = ("slo", "fcfs")[seed % 2]
        shape = make_settings(
            block_size=8, num_blocks=(40,), max_model_len=100, max_num_seqs=6, policy=policy
        )
        world = speculating_world(shape, seed)
        for number in range(8):
            world.add([number] * (5 + 3 * number), max_tokens=60, ignore_eos=True)
        world.drain()
        total = tuple(map(sum, zip(total, verified(world.engine.scheduler.drafts.speculator))))
    assert total[0] > total[1] > 100
