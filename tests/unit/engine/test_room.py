"""Who starts: where nobody is expected to be preempted for it, and nobody waits for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_world import World, make_settings
from headway.core.terms import Terms
from headway.engine import room
from headway.engine.growth import MAX_LENGTHS, MIN_LONGER, AnswerLengths, Growth, Profile
from headway.perf.model import Prior, StepModel

POLICIES = ["fcfs", "priority", "fair", "slo"]


def test_worked_example_of_growth():
    """The docstring's: 8 tokens and 2 to come, 4 and 6; a newcomer of 3 and 6 takes 6 more."""
    profile = Profile([(2, 8), (6, 4)])
    assert profile.peak(6, 3) == 6
    assert profile.peak(0, 3) == 4 - 3  # it ends at once, and gives back what it holds
    assert profile.peak(50, 3) == 50 - 8 - 4 + 0 * 3
    assert Profile([]).peak(7, 3) == 7


rows = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=8)


@given(rows, st.tuples(st.integers(0, 9), st.integers(1, 9)))
def test_most_is_what_counting_step_by_step_finds(rows, newcomer):
    """Who still runs has grown by a token a step; who has ended has given back what it held."""
    everybody = [*rows, newcomer]
    after = [sum(step if left >= step else -held for left, held in everybody) for step in range(10)]
    assert Profile(rows).peak(*newcomer) == max(0, *after)


def test_lengths_are_told_by_those_that_were_longer():
    lengths = AnswerLengths()
    for length in (40, 10, 30):
        lengths.add(length)
    assert lengths.quantile(0, 0.5) == 0, "three tell nothing"
    lengths.add(20)
    assert [lengths.quantile(0, part) for part in (0, 0.3, 0.6, 0.9)] == [10, 20, 30, 40]
    assert lengths.quantile(10, 0.5) == 10, "three are longer"
    for _ in range(MAX_LENGTHS):
        lengths.add(7)
    assert lengths.quantile(0, 0.99) == 7, "the oldest are forgotten"


def dear(world: World) -> World:
    """A world where nothing pays to be computed again."""
    world.engine.scheduler.room.predict_prefill_s = lambda num_tokens: 1e9
    return world


def running_at_most(world: World) -> int:
    """To the end; how many ran at once."""
    most = 0
    while world.engine.has_work:
        world.step()
        most = max(most, len(world.engine.scheduler.running))
    world.check_end()
    return most


def two_of_twelve(num_blocks: int) -> World:
    """Each takes 8 blocks of 2 in the end, and 2 to begin with."""
    world = dear(World(make_settings(block_size=2, num_blocks=(num_blocks,), max_num_seqs=2)))
    for number in range(2):
        world.add([number] * 3, max_tokens=12, ignore_eos=True)
    return world


def test_nobody_starts_to_be_preempted():
    """Two answers of known length that do not fit together come one after the other."""
    world = two_of_twelve(9)
    assert running_at_most(world) == 1
    assert world.engine.scheduler.num_preemptions == 0
    blind = two_of_twelve(9).expect_nothing()
    assert running_at_most(blind) == 2
    assert blind.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("weights_s", "token_s", "rows"),
    [(1.0, 1e-3, 2), (1e-3, 1.0, 1)],
    ids=["a step reads the weights", "a row takes its arithmetic"],
)
def test_who_costs_little_starts_all_the_same(weights_s, token_s, rows):
    """Beside one row another takes 1 ms in place of 1 s: that is worth what is computed again."""
    world = two_of_twelve(9)
    room = world.engine.scheduler.room
    room.cost = StepModel(Prior(weights_s=weights_s, token_s=token_s))
    room.predict_prefill_s = lambda num_tokens: room.cost.predict_prefill_s(num_tokens, 0, 16)
    assert running_at_most(world) == rows


def test_who_fits_to_the_end_starts_at_once():
    """16 blocks hold both to their ends."""
    assert running_at_most(two_of_twelve(17)) == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [8 * 14 + 1, 8 * 8 + 9], ids=["plenty", "hardly more"])
def test_where_blocks_suffice_as_many_run(policy, num_blocks):
    """20 answers that become 60 tokens of the 112 that any may: 8 rows take 64 blocks of 8. Nobody
    waits who would not wait if nothing were expected."""
    num_steps = []
    for expects in (True, False):
        shape = make_settings(
            block_size=8, num_blocks=(num_blocks,), max_model_len=112, max_num_seqs=8, budget=512,
            policy=policy,
        )  # fmt: skip
        world = dear(World(shape))
        world.engine.scheduler.room.predicts_growth = expects
        for _ in range(20):
            world.add([1] * 50, max_tokens=10, min_tokens=10, stop_token_ids=[39])
        assert running_at_most(world) == 8
        assert world.engine.scheduler.num_preemptions == 0
        num_steps.append(world.num_steps)
    assert num_steps[0] == num_steps[1]


def test_blocks_that_come_free_count():
    """One that ends soon leaves its blocks: the next may begin beside it and grow into these."""
    world = World(make_settings(block_size=1, num_blocks=(24,), max_num_seqs=3, budget=32))
    world.add([1] * 10, max_tokens=2, ignore_eos=True)  # ends after 2 steps with 11 blocks
    world.add([2] * 4, max_tokens=16, ignore_eos=True)  # 19 in the end
    world.step()
    assert len(world.engine.scheduler.running) == 2
    world.drain()
    assert world.engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_takes_all_starts_alone(policy):
    """A context as long as all blocks, and then one behind it."""
    world = World(make_settings(block_size=4, num_blocks=(9,), policy=policy, max_num_seqs=4))
    long = world.add([1] * 4, max_tokens=28, ignore_eos=True)
    world.add([2] * 30, max_tokens=2, ignore_eos=True)
    world.step()
    assert [s.request.request_id for s in world.engine.scheduler.running] == [long]
    world.drain()
    assert world.engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_one_does_not_wait_for_ever(policy):
    """Small ones come in each step and would fit beside each other at any time: the large one's
    turn comes when those before it have ended, or it was overtaken by 60 tokens."""
    shape = make_settings(
        block_size=1, num_blocks=(41,), policy=policy, max_num_seqs=8, budget=32, aging_tokens=60
    )
    world = World(shape)
    for _ in range(4):
        world.add([1] * 4, max_tokens=8, ignore_eos=True)
    world.step()
    large = world.add([2] * 20, max_tokens=12, ignore_eos=True)
    for _ in range(120):
        world.add([3] * 2, max_tokens=3, ignore_eos=True)
        world.step()
    assert world.of(large)[0].reason == "length"
    world.drain()


@pytest.mark.parametrize("n", [2, 4])
def test_siblings_that_are_to_start_count(n):
    """A request of n answers holds a prompt and n answers in the end."""
    needed = 8 + n * 11
    for num_blocks, expected in ((needed + 20, 1 + n), (needed + 10, n)):
        world = dear(World(make_settings(block_size=1, num_blocks=(num_blocks,), max_num_seqs=8)))
        world.add([1] * 8, n=n, max_tokens=12, ignore_eos=True)
        world.add([2] * 5, max_tokens=12, ignore_eos=True)
        for _ in range(3):
            world.step()
        assert len(world.engine.scheduler.running) == expected
        world.drain()
        assert world.engine.scheduler.num_preemptions == 0


def test_who_makes_way_does_not_keep_others_out():
    """Idle work grows into all blocks; one of another class starts beside it, and it makes way."""
    shape = make_settings(block_size=1, num_blocks=(41,), policy="slo", max_num_seqs=4, budget=32)
    world = dear(World(shape))
    world.add([1] * 4, terms=Terms(idle_only=True), max_tokens=34, ignore_eos=True)
    for _ in range(14):
        world.step()
    request = world.add([2] * 10, terms=Terms(ttft_s=1.0), max_tokens=20, ignore_eos=True)
    world.step()
    assert request in {s.request.request_id for s in world.engine.scheduler.running}
    world.drain()


def test_classes_are_learned_apart():
    """Short answers of one class say nothing of another's."""
    world = World(make_settings(num_blocks=(99,)))
    short, other = Terms(service_class="short"), Terms(service_class="other")
    for _ in range(MIN_LONGER):
        world.add([1], terms=short, max_tokens=3, stop_token_ids=[39], min_tokens=3)
    world.drain()
    growth: Growth = world.engine.scheduler.room.growth
    for promised, expected in ((short, 2), (other, 0)):
        world.add([1, 2], terms=promised, max_tokens=9, stop_token_ids=[39], min_tokens=9)
        assert growth.predict_remaining(world.engine.scheduler.waiting[-1]) == expected
    world.drain()


def test_a_refusal_is_not_counted_anew_in_each_step(monkeypatch):
    """While nobody leaves, rows are sorted once in `RETRY_STEPS` steps, for all who wait."""
    counted = []

    class Counted(Profile):
        def __init__(self, rows):
            counted.append(1)
            super().__init__(rows)

    monkeypatch.setattr(room, "Profile", Counted)
    world = dear(World(make_settings(block_size=1, num_blocks=(60,), max_num_seqs=9, policy="slo")))
    world.add([1] * 9, max_tokens=40, ignore_eos=True)
    world.step()
    for _ in range(6):
        world.add([2] * 9, max_tokens=40, ignore_eos=True)
    counted.clear()
    for _ in range(24):
        world.step()
    assert len(world.engine.scheduler.running) == 1
    assert len(counted) <= 24 // room.RETRY_STEPS + 1
    world.drain()


@pytest.mark.parametrize("policy", ["priority", "slo"])
def test_where_only_the_weaker_run_they_make_way(policy):
    """One that takes all blocks, beside idle work of a low priority: it starts at once."""
    shape = make_settings(block_size=4, num_blocks=(9,), policy=policy, max_num_seqs=4, budget=32)
    world = dear(World(shape))
    weak = Terms(idle_only=True, priority=1)
    for number in range(2):
        world.add([number] * 3, terms=weak, max_tokens=9, ignore_eos=True)
    for _ in range(3):
        world.step()
    strong = world.add([5] * 5, max_tokens=27, ignore_eos=True)
    world.step()
    assert strong in {s.request.request_id for s in world.engine.scheduler.running}
    world.drain()


def test_who_leaves_for_another_engine_is_not_expected_to_grow():
    """It goes with its first token, and what it was until then is no length of an answer."""
    world = World(make_settings(num_blocks=(99,)))
    for _ in range(MIN_LONGER):
        world.add([1], max_tokens=30, stop_token_ids=[39], min_tokens=30)
    growth: Growth = world.engine.scheduler.room.growth
    world.step()
    for sequence in list(world.engine.scheduler.running):
        sequence.parcel_id = b"parcel"
        assert growth.predict_remaining(sequence) == 0
        world.abort(sequence.request.request_id)
    world.add([1], max_tokens=30, stop_token_ids=[39], min_tokens=30)
    assert growth.predict_remaining(world.engine.scheduler.waiting[-1]) == 0
    world.drain()
