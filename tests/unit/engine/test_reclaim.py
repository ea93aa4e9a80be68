"""Slots and KV blocks that a user above its share gives back to one below it (engine/reclaim)."""

import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from admission_house import House, request_of, step
from engine_world import EXAMPLES, World, make_settings, swap_settings
from headway.admit.forecast import Forecast, QueueEntry
from headway.core.errors import OverloadedError
from headway.core.request import Request, SamplingParams, SequenceUpdate
from headway.core.terms import Terms
from headway.engine import reclaim
from headway.engine.policy import POLICIES as ENGINE_POLICIES
from headway.engine.sequence import Sequence
from headway.frontend.answer import OutputProcessor, Stream

CHAT = Terms(ttft_s=0.2, tpot_s=0.05)
STEP_S = 1e-3  # of the world's clock
POLICIES = ("slo", "fair", "priority")


def crowded(
    policy: str, *, rows: int = 8, n: int = 1, count: int = 8, tokens: int = 800, **changes
) -> World:
    """An engine whose rows user A has taken with long streams; nobody else is here."""
    shape = {"num_blocks": (4000,), "max_model_len": 900, "max_num_seqs": rows, "budget": 64}
    world = World(make_settings(policy=policy, **{**shape, **changes}))
    for number in range(count):
        world.add([number] * 12, user="A", terms=CHAT, n=n, max_tokens=tokens, ignore_eos=True)
    for _ in range(30):
        world.step()
    assert len(running(world)) == min(rows, count * n)
    return world


def running(world: World) -> list[Sequence]:
    return world.engine.scheduler.running


def rows_of(world: World) -> Counter:
    """User → the slots it holds."""
    return Counter(s.request.principal.name for s in running(world))


def ask(world: World, user: str = "B", *, tokens: int = 2, terms: Terms = CHAT, length=9) -> int:
    number = len(world.requests)
    prompt = [number % 40, number // 40] + [1] * (length - 2)
    return world.add(prompt, user=user, terms=terms, max_tokens=tokens, ignore_eos=True)


def seconds_to_end(world: World, request_id: int, most: int = 400) -> float:
    """Virtual seconds until a request has ended, and five steps for who gave its slot."""
    began_s = world.clock.now_s()
    while request_id not in world.finished_at:
        world.step()
        most -= 1
        assert most > 0, "it starves"
    took_s = world.clock.now_s() - began_s
    for _ in range(5):
        world.step()
    return took_s


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["streams", "wide"])
def test_a_user_below_its_share_has_a_slot_within_its_objective(policy, case):
    """Eight streams of 800 tokens, or four requests of sixteen sequences, hold all rows: B's short
    requests come within their 200 ms, again and again, and A's end with their own tokens."""
    world = crowded(policy) if case == "streams" else crowded(policy, n=16, count=2, tokens=300)
    for _ in range(6):
        assert seconds_to_end(world, ask(world)) < CHAT.ttft_s
    assert world.engine.scheduler.num_preemptions == 6
    world.drain(limit=20_000)


def test_first_come_first_served_takes_nothing_back():
    """Under fcfs the order of arrival is all there is."""
    world = crowded("fcfs")
    late = ask(world)
    world.drain()
    assert world.finished_at[late] > 700 and not world.engine.scheduler.num_preemptions


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_takes_beyond_its_share(policy):
    """B asks for everything at once and gets half of the slots; C comes and gets a third."""
    world = crowded(policy, rows=12, count=30)
    for _ in range(30):
        ask(world, tokens=300)
    for _ in range(150):
        world.step()
    assert rows_of(world) == {"A": 6, "B": 6}
    for _ in range(30):
        ask(world, "C", tokens=300)
    for _ in range(150):
        world.step()
    assert rows_of(world) == {"A": 4, "B": 4, "C": 4}
    assert world.engine.scheduler.num_preemptions == 6 + 4
    for request_id in list(world.requests):
        world.abort(request_id)
    world.drain()


def test_shares_are_by_weight():
    """A user of three times the weight takes three of four slots."""
    world = crowded("fair", rows=12, count=30)
    heavy = replace(CHAT, weight=3.0)
    for _ in range(30):
        ask(world, tokens=300, terms=heavy)
    for _ in range(150):
        world.step()
    assert rows_of(world) == {"A": 3, "B": 9}


def test_blocks_are_held_as_slots_are():
    """Two long contexts fill the KV memory and hold two of eight slots: one makes way."""
    world = World(
        make_settings(num_blocks=(101,), max_num_seqs=8, budget=64, policy="slo", prefix_cache="")
    )
    for number in range(2):
        world.add([number] * 150, user="A", terms=CHAT, max_tokens=49, ignore_eos=True)
    for _ in range(10):
        world.step()
    assert seconds_to_end(world, ask(world, length=120)) < CHAT.ttft_s
    assert world.engine.scheduler.num_preemptions == 1
    world.drain()


def test_a_better_priority_gives_nothing():
    """Under `priority` only those whose priority is no better than the new request's give."""
    world = World(make_settings(num_blocks=(4000,), max_num_seqs=4, budget=64, policy="priority"))
    for number in range(4):
        terms = replace(CHAT, priority=number % 2)
        world.add([number] * 12, user="A", terms=terms, max_tokens=800, ignore_eos=True)
    for _ in range(5):
        world.step()
    asked = [ask(world, terms=replace(CHAT, priority=1), tokens=300) for _ in range(3)]
    for _ in range(300):
        world.step()
    urgent = [s for s in running(world) if s.request.terms.priority == 0]
    assert len(urgent) == 2 and rows_of(world) == {"A": 2, "B": 2}
    for request_id in (*range(4), *asked):
        world.abort(request_id)
    world.drain()


def test_who_gave_last_is_asked_last():
    """B asks twenty times beside A's eight: each gives two or three times, none again and again."""
    world = crowded("slo")
    for _ in range(20):
        seconds_to_end(world, ask(world))
    assert sorted(s.num_reclaimed for s in running(world)) == [2] * 4 + [3] * 4


def test_what_is_lost_is_bounded(monkeypatch):
    """Without a prefix cache every slot that is given back costs a context: a tenth of the time
    may go there, and then B waits for a slot to come free."""
    monkeypatch.setattr(reclaim, "RECOMPUTE_BURST_S", 0.05)
    world = crowded("slo", prefix_cache="")
    engine = world.engine
    engine.scheduler.reclaim._credit_s = 0.05
    began_s, lost, asked = world.clock.now_s(), 0, ask(world)
    for number in range(600):
        if asked in world.finished_at and number % 5 == 0:
            asked = ask(world)
        _, record = world.step()
        lost += record.num_lost_tokens
    lost_s = engine.scheduler.transfers.predict_prefill_s(lost)
    longest_s = engine.scheduler.transfers.predict_prefill_s(900)
    assert 0 < lost_s < 0.1 * (world.clock.now_s() - began_s) + 0.05 + longest_s
    assert engine.scheduler.num_preemptions > 3
    world.drain(limit=20_000)


def test_idle_work_reclaims_nothing():
    """A batch of B waits until there is room; A's idle sequences are the first to go for B."""
    world = crowded("fair", count=7)
    world.add([9] * 12, user="A", terms=Terms(idle_only=True), max_tokens=800, ignore_eos=True)
    for _ in range(3):
        world.step()
    batch = ask(world, terms=Terms(idle_only=True))
    for _ in range(300):
        world.step()
    assert batch not in world.finished_at and not world.engine.scheduler.num_preemptions
    ask(world, tokens=200)
    for _ in range(100):
        world.step()
    assert not any(s.request.terms.idle_only for s in running(world))


# ── what admission says of it ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", POLICIES)
def test_the_predicted_wait_is_what_it_takes(policy):
    """Nobody waits and all rows are taken: B is told how long it will be, and so it is."""
    world = crowded(policy)
    forecast = Forecast(world.clock, order=ENGINE_POLICIES[policy].queue_order, lane_share=0.1)
    forecast.on_record(world.step()[1])
    entry = QueueEntry(user="B", due_s=world.clock.now_s() + CHAT.ttft_s)
    forecast.set_prompts(entry, [9])
    asked = ask(world)
    predicted_s = forecast.wait_s(entry)
    assert predicted_s > 10 * STEP_S, "the rows are not his at once"
    assert seconds_to_end(world, asked) == pytest.approx(predicted_s, abs=8 * STEP_S)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_predicted_wait_of_more_prompts_than_may_reclaim_at_once(policy):
    """Of the eight rows of A B may have four: its other three prompts follow its first answers."""
    world = crowded(policy)
    forecast = Forecast(world.clock, order=ENGINE_POLICIES[policy].queue_order, lane_share=0.1)
    forecast.on_record(world.step()[1])
    entry = QueueEntry(user="B", due_s=world.clock.now_s() + CHAT.ttft_s, answer=100)
    forecast.set_prompts(entry, [9] * 7)
    asked = [ask(world, tokens=tokens) for tokens in (100, 100, 100, 100, 1, 1, 1)]
    predicted_s, began_s = forecast.wait_s(entry), world.clock.now_s()
    while not world.finished_at.keys() >= set(asked[4:]):
        world.step()
    assert predicted_s > 100 * STEP_S, "four first tokens, 99 more of each, three first tokens"
    assert world.clock.now_s() - began_s == pytest.approx(predicted_s, rel=0.05)


@pytest.mark.parametrize(
    ("held", "weight", "rows"),
    [
        ([8], 1, 4),
        ([8, 3], 1, 4),
        ([8, 8], 1, 5),
        ([8] * 8, 1, 7),
        ([8], 3, 6),
        ([1, 1], 1, 0),
        ([0.5], 1, 0),
        ([], 1, 0),
    ],
)
def test_how_many_rows_one_may_reclaim(held, weight, rows):
    """As in the engine: from the user with most, and none has less than the taker afterwards."""
    house = House()
    slots = {f"u{number}": (float(each), 1.0) for number, each in enumerate(held)}
    house.forecast.on_record(step(10, 0.01, user_slots=slots))
    entry = QueueEntry(user="B", weight=float(weight))
    house.forecast.set_prompts(entry, [100])
    assert house.forecast._num_reclaimable(entry) == rows


def test_what_users_hold_is_not_counted_in_each_step():
    """Rows are full and nobody waits: all is told in each record, counted every 20 ms."""
    world = crowded("slo")
    scheduler, counted = world.engine.scheduler, []
    held = scheduler.reclaim.holdings
    scheduler.reclaim.holdings = lambda running: counted.append(1) or held(running)
    began_s, steps = world.clock.now_s(), 60
    for _ in range(steps):
        assert world.step()[1].user_slots == {"A": (8.0, 1.0)}
    most = (world.clock.now_s() - began_s) / reclaim.HOLDINGS_MAX_AGE_S + 1
    assert 2 <= len(counted) <= most < steps / 4


def test_who_may_not_reclaim_is_told_of_the_rows():
    """A row comes free every 2 s: so long waits a user who has as many as the others, or whose
    work is idle; one who has less waits for a quarter of what its objective leaves."""
    house = House()
    slots = {"A": (6.0, 1.0), "B": (5.0, 1.0), "C": (1.0, 1.0)}
    house.forecast.on_record(step(10, 0.01, slot_s=2.0, user_slots=slots))
    waits = {}
    for user in ("A", "B", "C", "new"):
        entry = QueueEntry(user=user, due_s=house.clock.now_s() + 1.5)
        house.forecast.set_prompts(entry, [100])
        waits[user] = house.forecast.wait_s(entry)
    patience_s = pytest.approx(0.25 * (1.5 - 0.1))
    assert waits == {"A": 2.0, "B": 2.0, "C": patience_s, "new": patience_s}
    idle = QueueEntry(user="new", idle_only=True)
    house.forecast.set_prompts(idle, [100])
    assert house.forecast.wait_s(idle) == 2.0


def test_a_wide_request_fills_the_queue_for_its_own_user_alone():
    """One request of 300 prompts beside a queue of 16: others still get their places."""
    house = House(max_queue=16)
    wide = request_of(20)
    wide = replace(wide, lengths=[20] * 300)
    house.arrive(caller=house.caller("A")).set_prompts(wide)
    house.ask(20, caller=house.caller("B"))
    with pytest.raises(OverloadedError):
        house.ask(20, caller=house.caller("A"))


async def test_a_slow_reader_is_not_counted_as_waiting():
    """Nobody reads the answers of a request, and the queue knows that they have begun."""
    began = []
    stream = Stream(OutputProcessor(Request(1, [1], SamplingParams(n=2)), None), lambda index: None)
    stream.on_begin = lambda: began.append(1)
    stream.put(SequenceUpdate(1, 0, [5], first_scheduled_s=0.5))
    stream.put(SequenceUpdate(1, 0, [6]))
    assert began == [1]


# ── whatever happens ────────────────────────────────────────────────────────────────────────────

shapes = st.builds(
    make_settings,
    block_size=st.integers(1, 8),
    num_blocks=st.lists(st.integers(6, 40), min_size=1, max_size=2).map(tuple),
    windows=st.lists(st.sampled_from([0, 8]), max_size=2).map(tuple),
    max_model_len=st.integers(8, 48),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(8, 64),
    policy=st.sampled_from(POLICIES),
    prefix_cache=st.sampled_from(["", "lru"]),
    aging_tokens=st.sampled_from([20, 1000]),
    host_blocks=st.just(()),
)
arrivals = st.lists(
    st.tuples(
        st.sampled_from(["A", "A", "B", "C"]),
        st.integers(1, 30),
        st.integers(1, 40),
        st.sampled_from([1, 1, 3]),
        st.sampled_from([0.001, 0.01, None]),
        st.integers(0, 6),
    ),
    min_size=4,
    max_size=16,
)


@settings(max_examples=max(EXAMPLES // 10, 1))
@given(shapes, arrivals, st.integers(-1, 1))
def test_whoever_gives_back_ends_with_its_own_tokens(shape, chosen, priority):
    """Two or three users, few slots and blocks: everybody ends, with the tokens it has alone, and
    a giver holds no less than the taker afterwards."""
    logging.disable(logging.CRITICAL)
    try:
        world = World(shape)
        scheduler = world.engine.scheduler
        victims = scheduler.reclaim.victims

        def checked(taker, running, promised):
            users = scheduler.policy.users
            chosen = victims(taker, running, promised)
            left = scheduler.reclaim.holdings([s for s in running if s not in chosen])
            taking = taker.request.principal.name
            for giver in {s.request.principal.name for s in chosen}:
                slots = {u: left[u].slots if u in left else 0 for u in (giver, taking)}
                assert giver != taking
                part = max(
                    scheduler.reclaim.dominant_share(left[giver]) * shape.max_num_seqs, slots[giver]
                )
                enough = (slots[taking] + 1) / users.weight(taking)
                assert part / users.weight(giver) >= enough - 1e-9
            return chosen

        scheduler.reclaim.victims = checked
        for user, length, tokens, n, ttft_s, steps in chosen:
            terms = Terms(ttft_s=ttft_s, tpot_s=0.01, priority=priority if user == "B" else 0)
            prompt = [length % 7] * min(length, shape.max_model_len - 1)
            world.add(prompt, user=user, terms=terms, n=n, max_tokens=tokens, ignore_eos=True)
            for _ in range(steps):
                world.step()
        world.drain(limit=20_000)
        scheduler.policy.users.check_integrity([])
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("policy", POLICIES)
def test_room_made_by_a_copy_is_the_claimants(policy):
    """The KV of who gives is copied out for a step or more: nobody else starts in its place."""
    room = {"host": (300,), "num_blocks": (101,), "max_num_seqs": 8, "budget": 64}
    world = World(swap_settings(**room, policy=policy, prefix_cache=""))
    for number in range(9):
        world.add([number] * 150, user="A", terms=CHAT, max_tokens=49, ignore_eos=True)
    for _ in range(10):
        world.step()
    asked = world.add([30] * 120, user="B", terms=CHAT, max_tokens=2, ignore_eos=True)
    for _ in range(200):
        if asked in world.finished_at:
            break
        world.step()
    assert asked in world.finished_at
    assert world.engine.scheduler.num_preemptions == 1
