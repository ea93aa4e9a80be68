"""Two engines and what passes between them: the right tokens, whatever is lost, late or refused.

The fake runtime keeps in each slot what keys and values depend on, so a block of another sequence,
or of another place, is seen in the step that reads it.
"""

import logging
import os

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cached_world import CachedWorld, prompts
from engine_world import CHEAP, DEAR, Gained, make_settings
from headway.core.parcel import decode_parcel, encode
from headway.core.principal import Principal
from headway.core.request import Request, SamplingParams
from headway.engine.handover import MAX_PARCEL_IDS, Handover

EXAMPLES = int(os.environ.get("HEADWAY_EXAMPLES", "60"))
PROMPT = list(range(1, 21))
MARK = b"m" * 32


class Two:
    """A world that prefills, one that decodes, and the requests that go from one to the other."""

    def __init__(self, block_bytes=CHEAP, windows=(0,), **how) -> None:
        num_blocks = how.pop("num_blocks", 40)
        shape = make_settings(
            num_blocks=(num_blocks,) * len(windows),
            windows=windows,
            prefix_cache="lfu",
            block_bytes=(block_bytes,) * len(windows),
            **how,
        )
        self.worlds = [CachedWorld(shape) for _ in range(2)]
        self.sides = [Handover(world.engine, MARK, "a") for world in self.worlds]
        self.worlds[1].executor.exports = self.worlds[0].executor.exports
        self.number = 100

    def prefill(self, prompt, count=1, *, salt="", **sampling) -> tuple[Request, list[int], bytes]:
        """(the request, its first tokens, the parcel); it may be over before."""
        world, self.number = self.worlds[0], self.number + 1
        chosen = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "seed": 3, **sampling})
        request = Request(self.number, list(prompt), chosen, Principal(cache_salt=salt))
        number = request.request_id
        world.requests[number], world.gained[number, 0] = request, Gained()
        world.engine.add(request)
        self.sides[0].offer(number)
        while len(world.gained[number, 0].tokens) < count:
            world.step()
        frame = self.sides[0].hand_over(number)
        world.gained[number, 0].dropped = True
        world.drain()
        return request, list(world.gained[number, 0].tokens), frame

    def decode(self, request: Request, tokens: list[int], frame: bytes) -> str:
        """The refusal; what is gained begins with what the first engine has told."""
        world = self.worlds[1]
        number = request.request_id
        world.requests[number], world.gained[number, 0] = request, Gained(list(tokens))
        refusal = self.sides[1].take_over(request, frame, [list(tokens)])
        world.engine.check_integrity()
        return refusal


def both(two: Two, prompt=PROMPT, count=1, **sampling) -> tuple[str, list[int]]:
    """(refusal, all tokens) of a request that is handed over and ends: `drain` checks them."""
    request, tokens, frame = two.prefill(prompt, count, **sampling)
    refusal = two.decode(request, tokens, frame)
    two.worlds[1].drain()
    return refusal, two.worlds[1].gained[request.request_id, 0].tokens


@pytest.mark.parametrize("windows", [(0,), (0, 6), (6,)])
@pytest.mark.parametrize("count", [1, 3])
def test_it_goes_on_and_computes_the_open_block_alone(windows, count):
    two, starts = Two(windows=windows), []
    schedule = two.worlds[1].engine.scheduler.schedule

    def kept():
        plan = schedule()
        starts.extend(row.start for row in plan.scheduled)
        return plan

    two.worlds[1].engine.scheduler.schedule = kept
    assert both(two, count=count)[0] == ""
    assert min(starts) == (len(PROMPT) + count - 1) // 4 * 4


def test_blocks_leave_while_the_next_chunk_computes():
    two = Two(budget=8)
    world, request = two.worlds[0], Request(0, PROMPT, SamplingParams(max_tokens=2, seed=1))
    world.requests[0], world.gained[0, 0] = request, Gained()
    world.engine.add(request)
    two.sides[0].offer(0)
    sent = []
    for _ in range(3):
        world.step()
        sent.append(len(world.executor.exports))
    assert sent == [0, 2, 4]
    world.abort(0)
    world.drain()


def test_where_computing_is_faster_nothing_is_fetched():
    two = Two(DEAR)
    assert both(two)[0] == ""
    assert not [t for t in two.worlds[1].plan.transfers if t.peer.startswith("engine:")]


def test_what_does_not_come_is_computed_behind_what_was_told():
    two = Two()
    two.worlds[1].executor.bring = lambda: False
    assert both(two, count=3)[0] == ""


def test_a_refused_one_goes_on_behind_what_was_told():
    two = Two()
    request, tokens, frame = two.prefill(PROMPT, 3)
    bad = encode(msgspec.structs.replace(decode_parcel(frame), fingerprint=bytes(32)))
    assert two.decode(request, tokens, bad) == "fingerprint"
    two.worlds[1].drain()


def test_others_go_on_while_one_is_fetched():
    two = Two()
    two.worlds[1].executor.delay = lambda: 5
    request, tokens, frame = two.prefill(PROMPT)
    assert two.decode(request, tokens, frame) == ""
    quick = two.worlds[1].ask([30, 31], max_tokens=3)
    for _ in range(4):
        two.worlds[1].step()
    assert two.worlds[1].gained[quick, 0].reason == "length"
    assert two.worlds[1].gained[request.request_id, 0].tokens == tokens
    two.worlds[1].drain()


def test_an_abort_on_the_way_leaves_no_block_behind():
    two = Two()
    two.worlds[1].executor.delay = lambda: 3
    request, tokens, frame = two.prefill(PROMPT)
    two.decode(request, tokens, frame)
    two.worlds[1].step()
    two.worlds[1].abort(request.request_id)
    assert two.worlds[1].engine.kv.num_used == 5
    two.worlds[1].drain()
    assert two.worlds[1].engine.kv.num_used == 0


def test_without_a_seed_it_goes_on_with_the_draws_of_the_first_engine():
    two = Two()
    request, _, frame = two.prefill(PROMPT, 2, seed=None, temperature=1)
    moved = msgspec.structs.replace(request, request_id=99)
    assert two.sides[1].take_over(moved, frame) == ""
    (sequence,) = two.worlds[1].engine.sequences_of(99)
    assert sequence.seed == two.worlds[0].engine._seed(request)
    two.worlds[1].engine.abort(99)
    while two.worlds[1].engine.has_work:
        two.worlds[1].engine.step()


def test_parcels_that_were_taken_are_remembered_to_a_bound():
    two = Two()
    side = two.sides[1]
    for number in range(MAX_PARCEL_IDS + 5):
        side._parcel_ids[number.to_bytes(16, "big")] = None
    assert both(two)[0] == ""
    assert len(side._parcel_ids) == MAX_PARCEL_IDS


class TwoMachine(RuleBasedStateMachine):
    """Hand over, lose, delay, preempt, abort, in any order; all invariants of both after each."""

    @initialize(
        windows=st.sampled_from([(0,), (0, 6), (6,), (9, 0, 1)]),
        block_size=st.sampled_from([1, 2, 4, 5]),
        num_blocks=st.integers(14, 30),
        budget=st.integers(4, 24),
    )
    def begin(self, windows, block_size, num_blocks, budget):
        logging.disable(logging.CRITICAL)
        self.two = Two(
            windows=windows,
            block_size=block_size,
            num_blocks=num_blocks,
            budget=budget,
            max_model_len=40,
        )

    @rule(prompt=prompts, salt=st.sampled_from(["", "a"]), count=st.integers(1, 5))
    def go(self, prompt, salt, count):
        limit = self.two.worlds[0].settings.max_model_len - 7
        request, tokens, frame = self.two.prefill(prompt[:limit], count, salt=salt)
        assert self.two.decode(request, tokens, frame) == ""

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.two.worlds[1].step()

    @rule(share=st.integers(1, 3))
    def lose(self, share):
        exports = self.two.worlds[0].executor.exports
        for place in list(exports)[::share]:
            del exports[place]

    @rule(steps=st.integers(0, 4), brings=st.booleans())
    def wire(self, steps, brings):
        self.two.worlds[1].executor.delay = lambda: steps
        self.two.worlds[1].executor.bring = lambda: brings

    @rule()
    def preempt(self):
        running = self.two.worlds[1].engine.scheduler.running
        if running and running[-1].state == "running":
            self.two.worlds[1].engine.scheduler.preempt(running[-1])

    @rule(number=st.integers(0, 30))
    def abort(self, number):
        requests = list(self.two.worlds[1].requests)
        if requests:
            self.two.worlds[1].abort(requests[number % len(requests)])

    @invariant()
    def holds(self):
        if hasattr(self, "two"):
            for world in self.two.worlds:
                world.engine.check_integrity()

    def teardown(self):
        try:
            if hasattr(self, "two"):
                for world in self.two.worlds:
                    world.drain()
        finally:
            logging.disable(logging.NOTSET)


TestTwoMachine = TwoMachine.TestCase
TestTwoMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=20)
