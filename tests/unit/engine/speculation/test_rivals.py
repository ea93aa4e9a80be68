"""Which other guesses ride beside the first, and what is learned of them."""

import random
from math import inf

import pytest

from guessing import ask
from headway.core.plan import Sample
from headway.core.request import Request, SamplingParams
from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import Prior, StepCost, Work, work_of
from headway.engine.sequence import Sequence
from headway.engine.speculation import Drafts
from headway.engine.speculation.acceptance import Acceptance, Own
from headway.engine.speculation.controller import PlainStep
from headway.engine.speculation.drafts import NO_DRAFTS, num_alike, outcomes
from headway.engine.speculation.lookup import Guess
from headway.engine.speculation.paths import COPY_S, Rival, choose_rivals, find_rival, observe
from headway.engine.speculation.speculation import Speculation

FIRST = Drafts([1, 2, 3], "lookup", 4)


class Priced(StepCost):
    """A step takes a second, and each row but the first a share of one."""

    def __init__(self, share: float) -> None:
        super().__init__(Prior(attended_s=1e-15))
        self.share = share

    def seconds(self, work: Work) -> float:
        return 1 + self.share * (work.num_tokens - 1)


# ── who competes ────────────────────────────────────────────────────────────────────────────────


def test_a_rival_counts_where_the_first_is_wrong():
    """0.6 - 0.5 is the chance that the first token is right and the second wrong."""
    acceptance, own = Acceptance(), Own()
    rival = find_rival(
        FIRST, [0.6, 0.5, 0.4], [FIRST, Drafts([1, 5, 6], "suffixes", 3)], acceptance, own
    )
    expected = acceptance.chances("suffixes instead", 4, 2, own)
    assert rival.shared == 1 and rival.drafts.token_ids == [1, 5, 6]
    assert rival.chances == pytest.approx([0.1 * chance for chance in expected])


@pytest.mark.parametrize("token_ids", [[1], [1, 2, 3], [1, 2, 3, 4]])
def test_what_only_repeats_the_first_is_no_rival(token_ids: list[int]):
    others = [FIRST, Drafts(token_ids, "suffixes", 9)]
    assert find_rival(FIRST, [0.6, 0.5, 0.4], others, Acceptance(), Own()) is None


def test_what_the_first_leaves_no_chance_is_no_rival():
    others = [Drafts([7, 8], "suffixes", 9)]
    assert find_rival(FIRST, [0.99, 0.9, 0.9], others, Acceptance(), Own()) is None


class Heard(Acceptance):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple] = []

    def observe(self, source, match, num_guessed, num_kept, own, beside=""):
        self.heard.append((source, match, num_guessed, num_kept))


@pytest.mark.parametrize(
    ("came", "heard"),
    [
        ([1, 2, 3, 9], []),
        ([9], []),
        ([1, 9], [(1, 0)]),
        ([1, 5], [(1, 1)]),
        ([1, 5, 6, 7], [(2, 2)]),
        ([1, 5, 9], [(2, 1)]),
        ([1], []),
    ],
)
def test_it_is_judged_only_where_it_was_reached(came: list[int], heard: list[tuple[int, int]]):
    """The first was right, wrong before it, or wrong where the rival says something else."""
    acceptance = Heard()
    rival = Rival(Drafts([1, 5, 6], "suffixes", 3), 1, [0.1, 0.05])
    observe(rival, FIRST, came, acceptance, Own())
    assert acceptance.heard == [("suffixes instead", 4, *each) for each in heard]


def test_what_became_of_each_path():
    drafts = Drafts([1, 2, 3], "a", others=[Drafts([1, 5, 6], "b"), Drafts([1, 5, 7], "c")])
    assert outcomes(drafts, []) == [("a", 3, 0), ("b", 2, 0), ("c", 2, 0)]
    assert outcomes(drafts, [1, 2]) == [("a", 3, 2), ("b", 2, 0), ("c", 2, 0)]
    assert outcomes(drafts, [1, 5]) == [("a", 3, 1), ("b", 2, 1), ("c", 2, 0)]
    assert outcomes(drafts, [1, 5, 7]) == [("a", 3, 1), ("b", 2, 0), ("c", 2, 2)]


# ── how many of its guesses ─────────────────────────────────────────────────────────────────────


def test_as_many_as_bring_the_most_tokens_a_second():
    """Every number of them is compared; a row for the last known token and a copy are counted."""
    rng = random.Random(2)
    taken = []
    for _ in range(300):
        share = rng.choice([0.001, 0.01, 0.05])
        cost, count = Priced(share), rng.randint(1, 4)
        first = sorted([rng.random() for _ in range(4)], reverse=True)
        shared = rng.randrange(count)
        chances = sorted([rng.random() / 4 for _ in range(4)], reverse=True)
        plain = PlainStep([100], work_of([99], (0,)), work_of([99], (0,)), rng.choice([9, 512]))
        rival = Rival(Drafts([0] * (shared + 4)), shared, chances)
        room = plain.budget - count - shared - 1
        rates = [(1 + sum(first[:count])) / (1 + share * count)]
        for more in range(1, min(4, max(room, 0)) + 1):
            seconds = 1 + share * (count + 1 + shared + more) + COPY_S
            rates.append((1 + sum(first[:count]) + sum(chances[:more])) / seconds)
        (found,) = choose_rivals([rival], [first], [count], plain, cost)
        assert rates[found] == pytest.approx(max(rates))
        taken.append(found)
    assert set(taken) == {0, 1, 2, 3, 4}


def test_the_objective_and_the_budget_bound_all_of_them_together():
    plain = PlainStep([9, 9], work_of([9, 9], (0,)), work_of([9, 9], (0,)), 10)
    rivals = [Rival(Drafts([0] * 3), 0, [0.3, 0.2, 0.2]), Rival(Drafts([0] * 3), 0, [0.9] * 3)]
    values = [[0.5], [0.5]]
    cost = Priced(0.001)
    assert choose_rivals(rivals, values, [1, 1], plain, cost) == [3, 3]
    assert choose_rivals(rivals, values, [1, 1], plain._replace(budget=8), cost) == [1, 3]
    assert choose_rivals(rivals, values, [1, 1], plain._replace(budget=6), cost) == [0, 3]
    assert choose_rivals(rivals, values, [0, 1], plain, cost) == [0, 3]
    most_s = cost.seconds(Work(4 + 4, 0, 0, 0)) + 1.5 * COPY_S
    assert choose_rivals(rivals, values, [1, 1], plain._replace(most_s=most_s), cost) == [0, 3]


# ── the speculator ──────────────────────────────────────────────────────────────────────────────


class Foreseen:
    """Knows what comes, and says it where a number for each place is within `low` … `high`."""

    def __init__(self, name: str, low: float, high: float) -> None:
        self.name, self.low, self.high = name, low, high
        self.heard = 0

    def guess(self, sequence: Sequence, most: int) -> Guess:
        at = len(sequence.tokens)
        right = self.low <= random.Random(at).random() < self.high
        return Guess([place if right else -place for place in range(at, at + 5)], 4)

    def came(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        self.heard += num_alike(drafts.token_ids, sample.token_ids) == len(sample.token_ids) - 1

    def left(self, sequence: Sequence) -> None:
        pass


def replay(share: float, max_paths: int) -> tuple[float, int, int]:
    """(tokens a second, paths, adopted): of two sources the second is right in most places where
    the first is wrong. Each token is the number of its place."""
    cost, most = Priced(share), 1500
    config = SpeculationConfig(sources=("lookup", "suffixes"), max_paths=max_paths)
    speculation = Speculation(config, cost)
    speculation.sources = [Foreseen("lookup", 0.0, 0.6), Foreseen("suffixes", 0.6, 0.95)]
    request = Request(1, [0, 1], SamplingParams(temperature=0))
    sequence = Sequence(1, request, 0, num_groups=1, stop_ids=frozenset(), max_len=most, seed=0)
    seconds = steps = paths = adopted = 0
    while len(sequence.tokens) < most:
        known = sequence.computed = len(sequence.tokens) - 1
        plain = work_of([known], (0,))
        drafts = ask(speculation, [sequence], plain, 512, inf).get(1, NO_DRAFTS)
        others = [other.token_ids for other in drafts.others]
        following = list(range(known + 1, min(known + 9, most)))
        kept = max(num_alike(each, following[:-1]) for each in [drafts.token_ids, *others])
        seconds += 1 + share * (len(drafts.token_ids) + sum(1 + len(o) for o in others))
        paths, steps = paths + len(others), steps + 1
        adopted += num_alike(drafts.token_ids, following[:kept]) < kept
        path = next(
            i
            for i, p in enumerate([drafts.token_ids, *others])
            if num_alike(p, following[:kept]) == kept
        )
        sample = Sample(1, following[: kept + 1], path=path)
        sequence.take(sample, 0.0)
        speculation.came(sequence, drafts, sample)
    assert sum(kept for _, kept in speculation.counts.values()) == most - 2 - steps
    assert all(source.heard == steps for source in speculation.sources), "told of another path"
    return (most - 2) / seconds, paths, adopted


def test_both_ride_where_rows_are_cheap_and_one_where_they_are_dear():
    rate, paths, adopted = replay(0.02, 2)
    alone, none, _ = replay(0.02, 1)
    assert paths > 100 and adopted > 50 and none == 0
    assert rate > 1.2 * alone
    assert replay(0.6, 2)[1] == 0
