"""Several paths of guesses of one sequence: each a row over blocks of its own, the best adopted."""

import logging
import random

import pytest

from engine_world import VOCAB, World, make_settings, swap_settings
from guessing import Guesser
from headway.engine.kv.eviction import POLICIES
from headway.engine.speculation import Drafts
from headway.engine.speculation.drafts import fitting


class Told(Guesser):
    """Verifies the paths that `paths(following)` makes of what will come, for everybody."""

    def __init__(self, world: World, paths) -> None:
        super().__init__(random.Random(), VOCAB, world._truth)
        self.paths = paths

    def plan(self, decodes, beside, budget, most_s, *, prompts_wait=False):
        found = {}
        for sequence in decodes:
            following = self.truth(sequence)[sequence.num_generated :]
            first, *others = [
                Drafts(fitting(sequence, p, 8), "test") for p in self.paths(following)
            ]
            others = [each for each in others if each.token_ids]
            found[sequence.sequence_id] = first._replace(others=others)
        return found


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def second_is_right(following: list[int]) -> list[list[int]]:
    """One right guess and then wrong ones; and five right ones."""
    return [[*following[:1], *map(wrong, following[1:4])], following[:5]]


def world_of(paths, **how) -> World:
    world = World(make_settings(**how))
    world.guesser = world.engine.scheduler.drafts.speculator = Told(world, paths)
    return world


@pytest.mark.parametrize("length", range(4, 12))
def test_the_path_that_is_right_is_adopted(length: int):
    """At each place in a block: six tokens come in a step, and its blocks are the sequence's."""
    world = world_of(second_is_right, num_blocks=(12,), budget=32)
    world.add(list(range(length)), max_tokens=13, ignore_eos=True)
    world.step()
    (sequence,) = world.engine.scheduler.running
    before = list(sequence.block_tables[0])
    updates, record = world.step()
    assert len(updates[0].token_ids) == 6
    assert record.verified == (("test", 4, 1), ("test", 4, 4)) and record.num_paths == 1
    first, rest = divmod(length, 4)
    own, path = world.plan.scheduled
    assert (own.path, path.path, path.sample) == (0, 1, False)
    assert path.token_ids[:2] == own.token_ids[:2] and path.start == own.start == length
    copied = [(copy.source, copy.target) for copy in world.plan.copies]
    assert copied == ([(before[first], path.new_blocks[0][0])] if rest else [])
    assert sequence.block_tables[0] == before[:first] + path.new_blocks[0]
    assert sequence.computed == length + 6
    world.drain()
    assert world.num_steps == 4, "the prompt, two steps of six tokens, and the runtime is told"


def test_where_the_first_is_as_good_nothing_moves():
    def as_good(following: list[int]) -> list[list[int]]:
        return [following[:2], [*following[:2], *map(wrong, following[2:3])]]

    world = world_of(as_good, budget=32)
    world.add([1, 2, 3, 4, 5], max_tokens=8, ignore_eos=True)
    world.step()
    (sequence,) = world.engine.scheduler.running
    before = list(sequence.block_tables[0])
    _, record = world.step()
    assert sequence.block_tables[0] == before and record.num_kept_drafts == 2
    assert world.engine.kv.num_used == 2
    world.drain()


@pytest.mark.parametrize("num_blocks", range(7, 14))
def test_paths_take_only_what_nobody_needs(num_blocks: int):
    """With paths nobody is preempted who is not without: they have what is left of blocks."""
    counts = []
    for paths in (second_is_right, lambda following: second_is_right(following)[:1]):
        world = world_of(paths, block_size=2, num_blocks=(num_blocks,), budget=12)
        for number in range(2):
            world.add([number, 2, 3], max_tokens=3, ignore_eos=True)
        world.step()
        world.step()
        counts.append((world.engine.scheduler.num_preemptions, world.plan.num_tokens <= 12))
        world.drain()
    assert counts[0] == counts[1]


def test_the_budget_and_full_pools_leave_paths_out():
    """Five tokens of the sequence's own row and six of its path are eleven."""
    seen = {}
    for budget in (10, 11):
        world = world_of(second_is_right, num_blocks=(12,), budget=budget)
        world.add([1, 2, 3, 4], max_tokens=12, ignore_eos=True)
        world.step()
        world.step()
        seen[budget] = [len(row.token_ids) for row in world.plan.scheduled]
        world.drain()
    assert seen == {10: [5], 11: [5, 6]}
    world = world_of(second_is_right, num_blocks=(4,), budget=32)
    world.add([1, 2, 3, 4, 5], max_tokens=7, ignore_eos=True)
    world.step()
    world.step()
    assert [row.path for row in world.plan.scheduled] == [0], "three blocks, and no fourth"
    world.drain()


def test_a_step_that_raises_is_run_again_without_paths(caplog):
    """What a path copies is the sequence's own and still there: nobody is put back for it."""
    caplog.set_level(logging.CRITICAL)
    world = world_of(second_is_right, num_blocks=(12,), budget=32)
    world.add([1, 2, 3, 4, 5], max_tokens=12, ignore_eos=True)
    world.step()
    world.executor.fail_at = "sample"
    updates, record = world.step()
    assert world.plan.copies and len(updates[0].token_ids) == 1
    assert record.num_preemptions == 0 and world.engine.kv.num_used == 3
    world.drain()


def test_whatever_happens_beside_them(caplog):
    """Random paths beside prefix hits, windows, swaps, aborts, failures and steps that raise."""
    caplog.set_level(logging.CRITICAL)
    num_paths = num_adopted = num_preemptions = 0
    for number in range(60):
        rng = random.Random(number)
        how = {
            "block_size": rng.choice([1, 3, 4, 16]),
            "num_blocks": (rng.randint(12, 40),),
            "max_model_len": 40,
            "budget": rng.choice([12, 40, 64]),
            "max_num_seqs": rng.randint(1, 6),
            "windows": rng.choice([(), (), (5,)]),
        }
        if number % 3 == 0:
            how["prefix_cache"] = rng.choice(sorted(POLICIES))
        world = World(swap_settings(**how) if number % 3 == 1 else make_settings(**how), rng)
        for _ in range(rng.randint(2, 12)):
            longest = world.settings.max_model_len // 2
            prompt = [rng.randrange(4) for _ in range(rng.randint(1, longest))]
            request_id = world.add(
                prompt, n=rng.choice([1, 1, 3]), max_tokens=rng.randint(2, 19), ignore_eos=True
            )
            for _ in range(rng.randint(0, 6)):
                world.step()
            if rng.random() < 0.1:
                world.abort(request_id)
            if rng.random() < 0.15:
                world.executor.fail_at = rng.choice(["submit", "sample", "collect"])
        world.drain()
        num_paths += world.num_paths
        num_adopted += world.guesser.num_adopted
        num_preemptions += world.engine.scheduler.num_preemptions
    assert num_paths > 500 and num_adopted > 100 and num_preemptions > 20
