"""Settings that change while an engine runs: bounds, what is in force at once, what stays whole."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import World
from fakes import make_settings
from headway.core.errors import UsageError
from headway.core.live_settings import (
    LIVE,
    check_retunable,
    difference,
    live_values,
    with_changes,
)
from headway.core.options import EngineOptions, ServerOptions
from headway.core.speculation_config import SpeculationConfig
from headway.core.terms import Terms
from headway.engine.live import change_settings
from headway.engine.messages import Change, Changed, decode_from_engine, decode_to_engine, encode

SHAPE = {"num_blocks": (65,), "block_size": 4, "max_num_seqs": 8, "budget": 32, "max_model_len": 64}


def shape(policy="slo", **how):
    return make_settings(**{**SHAPE, "policy": policy, **how})


def test_each_is_an_option_and_where_it_says():
    options = set(EngineOptions.__dataclass_fields__)
    assert LIVE.keys() <= options
    started = shape()
    assert live_values(started)["max_num_seqs"] == 8
    assert "max_drafts" not in live_values(started), "nobody guesses"
    guessing = with_speculation(started)
    assert live_values(guessing)["max_drafts"] == 8
    assert live_values(shape("fcfs")).keys() == {"max_num_seqs", "max_num_batched_tokens"}


def with_speculation(started):
    from dataclasses import replace

    return replace(started, speculation=SpeculationConfig(sources=("lookup",)))


def test_there_and_back():
    started = shape()
    changes = {"max_num_seqs": 3, "lane_share": 0.4, "late": "shed", "aging": 99}
    then = with_changes(started, changes, started)
    assert difference(started, then) == changes
    assert with_changes(then, difference(then, started), started) == started


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_num_seqs": 9}, "more than the 8"),
        ({"max_num_batched_tokens": 33}, "more than the 32"),
        ({"max_num_batched_tokens": 7}, "is below max_num_seqs"),
        ({"max_num_seqs": 0}, "out of range"),
        ({"max_num_seqs": "many"}, "not an integer"),
        ({"late": "never"}, "not one of"),
        ({"lane_share": 2.0}, "out of range"),
        ({"block_size": 8}, "cannot change while a server runs"),
    ],
)
def test_what_cannot_be_changes_nothing(changes, says):
    world = World(shape())
    before = world.engine.settings
    with pytest.raises(UsageError) as refused:
        change_settings(world.engine, {"aging": 5, **changes})
    assert says in str(refused.value)
    assert world.engine.settings is before and world.engine.scheduler.policy.config.aging_tokens > 5


def test_fewer_rows_let_those_run_end_and_nobody_start():
    world = World(shape())
    for _ in range(8):
        world.add([1, 2, 3], max_tokens=6, ignore_eos=True)
    world.step()
    assert len(world.engine.scheduler.running) == 8
    change_settings(world.engine, {"max_num_seqs": 2})
    late = world.add([1, 2, 3], max_tokens=2, ignore_eos=True)
    most = []
    while world.engine.has_work:
        world.step()
        most.append(len(world.engine.scheduler.running))
        if world.gained[late, 0].tokens:
            assert most[-1] <= 2
    assert world.engine.settings.max_num_seqs == 2 and world.gained[late, 0].reason == "length"
    change_settings(world.engine, {"max_num_seqs": 8})
    for _ in range(8):
        world.add([1, 2, 3], max_tokens=2, ignore_eos=True)
    world.step()
    assert len(world.engine.scheduler.running) == 8


def test_a_smaller_budget_cuts_the_next_chunk():
    world = World(shape("fcfs"))
    world.add(list(range(1, 31)), max_tokens=1, ignore_eos=True)
    change_settings(world.engine, {"max_num_batched_tokens": 10})
    world.step()
    assert world.plan.num_tokens == 10


VALUES = {
    "max_num_seqs": st.integers(1, 8),
    "max_num_batched_tokens": st.integers(8, 32),
    "late": st.sampled_from(["serve", "shed"]),
    "lane_share": st.floats(0.01, 0.99),
    "aging": st.integers(1, 200),
}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(["slo", "fair", "fcfs"]), data=st.data())
def test_every_request_ends_with_its_tokens_whatever_changes(seed, policy, data):
    """The world checks each token and each block after every operation."""
    rng = random.Random(seed)
    world = World(shape(policy, num_blocks=(33,)))
    for _ in range(12):
        for _ in range(rng.randrange(3)):
            prompt = [rng.randrange(10, 40) for _ in range(rng.randrange(1, 20))]
            terms = Terms(idle_only=rng.random() < 0.3)
            world.add(
                prompt, user=rng.choice("abc"), terms=terms, max_tokens=6, n=rng.choice((1, 1, 3))
            )
        name = rng.choice(sorted(VALUES))
        change_settings(world.engine, {name: data.draw(VALUES[name])})
        if world.engine.has_work:
            world.step()
    while world.engine.has_work:
        world.step()
    reasons = {gained.reason for gained in world.gained.values() if not gained.dropped}
    assert reasons <= {"stop", "length"}


def test_messages_survive_the_wire():
    assert decode_to_engine(encode(Change({"late": "shed", "lane_share": 0.5}))).changes == {
        "late": "shed",
        "lane_share": 0.5,
    }
    then = with_changes(shape(), {"max_num_seqs": 3}, shape())
    assert decode_from_engine(encode(Changed(then))).plan == then


@pytest.mark.parametrize(
    ("engine", "server", "names"),
    [
        ({"tensor_parallel_size": 2}, {}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, {}, "--pipeline-parallel-size"),
        ({"decode_context_parallel_size": 2}, {}, "--decode-context-parallel-size"),
        ({"batching": "static"}, {}, "--batching static"),
        ({"batching": "dynamic:80ms"}, {}, "--batching dynamic:80ms"),
        ({"policy": "priority"}, {}, "--policy priority"),
        ({}, {"prefill_replicas": 1, "decode_replicas": 1}, "--prefill-replicas"),
        ({}, {"fallback_model": "http://127.0.0.1:1/v1"}, "--fallback-model"),
    ],
)
def test_what_cannot_stand_beside_retuning_is_named(engine, server, names):
    with pytest.raises(UsageError) as refused:
        check_retunable(EngineOptions(**engine), ServerOptions(**server))
    assert names in refused.value.cause and refused.value.fix
    check_retunable(EngineOptions(), ServerOptions(replicas=2))
