"""What a step teaches: the compiled filter has the bits of the one in Python."""

import random
import sys
from copy import deepcopy
from types import ModuleType

import numpy as np
import pytest

from headway.perf import filter as learning
from headway.perf.filter import (
    BREAKPOINTS,
    NUM_BREAKPOINTS,
    NUM_PARTS,
    FilterState,
    compiled_learner,
    learner,
)
from headway.perf.model import StepModel, Work


def work(rng: random.Random) -> Work:
    """Anything: on knots, between and beyond them, with and without samples, long contexts."""
    tokens = rng.choice((rng.choice(BREAKPOINTS), rng.randint(1, 600), rng.randint(1, 10**5)))
    sampled = rng.choice((0, rng.randint(1, tokens)))
    return Work(tokens, sampled, rng.randrange(10**7), rng.randrange(10**7))


@pytest.mark.parametrize("seed", range(4))
def test_compiled_and_in_python_it_has_the_same_bits(seed):
    """Some steps take ten times as long, so that outliers are clipped; curves fall and meet."""
    pytest.importorskip("headway.perf._learning")
    rng, reference, other = random.Random(seed), StepModel(), StepModel()
    reference._learn = reference._state.learn
    assert other._learn is not None and other._learn != other._state.learn
    fell = clipped = 0
    for _ in range(1500):
        asked = work(rng)
        late = rng.random() < 0.02
        actual_s = reference.seconds(asked) * rng.lognormvariate(0.0, 0.3) * (10 if late else 1)
        told = [cost.learn(asked, actual_s) for cost in (reference, other)]
        assert told[0] == told[1] and reference._parts == other._parts
        assert reference._state.array.tobytes() == other._state.array.tobytes()
        clipped += late
        fell += len({*reference._parts[:NUM_BREAKPOINTS]}) < NUM_BREAKPOINTS
    assert fell > 10 and clipped > 10
    other.check_integrity()


def test_a_step_moves_the_parts_by_their_covariance():
    """The worked example: two knots known alike but for a tenth; half of the step is each's."""
    begun = FilterState.empty(clip=2.0, noise=0.05**0.5, surprised=0.0, forget=0.0)
    begun.covariance[:] = np.eye(NUM_PARTS)
    begun.covariance[:2, :2] = [[1.0, 0.9], [0.9, 1.0]]
    begun.logs[2:NUM_BREAKPOINTS] = 5.0
    begun.settle()
    for learns in (compiled_learner, lambda state: state.learn):
        state = FilterState(begun.array.copy())
        learn = learns(state)
        if learn is None:
            continue
        parts = learn(1, 2, 1, 0, 0, 0, 1.0, 1.0)  # half-way from the first knot to the second
        assert np.log(parts[:3]) == pytest.approx([0.95, 0.95, 5.0])
        assert parts == state.seconds.tolist()
        left = state.covariance[:2, :2] - begun.covariance[:2, :2]
        assert left == pytest.approx(np.full((2, 2), -0.9025))


def test_a_copy_learns_apart():
    cost = StepModel()
    cost.learn(Work(4, 4, 100, 100), 0.01)
    twin = deepcopy(cost)
    assert twin.parts == cost.parts
    before = cost.parts
    twin.learn(Work(4, 4, 100, 100), 0.05)
    assert cost.parts == before != twin.parts
    twin.check_integrity()
    cost.check_integrity()


def test_what_is_compiled_of_another_version_is_not_used(monkeypatch):
    other = ModuleType("headway.perf._learning")
    other.layout = learning.LAYOUT + 1
    monkeypatch.setitem(sys.modules, other.__name__, other)
    monkeypatch.setattr("headway.perf._learning", other, raising=False)
    state = FilterState.empty(2.0, 0.08, 0.02, 4e-4)
    assert compiled_learner(state) is None and learner(state) == state.learn
    monkeypatch.setitem(sys.modules, other.__name__, None)  # as where nothing was compiled
    monkeypatch.delattr("headway.perf._learning")
    assert compiled_learner(state) is None


def test_it_refuses_what_is_no_state():
    module = pytest.importorskip("headway.perf._learning")
    state = FilterState.empty(2.0, 0.08, 0.02, 4e-4).array
    step = (1, 1, 0, 1, 1, 1, 1.0, 0.1)
    for wrong in (state[:-1], np.zeros(0), np.zeros(len(state))):
        with pytest.raises(ValueError, match="no state"):
            module.learn(wrong, *step)
    for knot in (0, NUM_BREAKPOINTS, -1):
        with pytest.raises(ValueError, match="no knot"):
            module.learn(state, knot, *step[1:])
    with pytest.raises(TypeError, match="not 9"):
        module.learn(state)
    state.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        module.learn(state, *step)
