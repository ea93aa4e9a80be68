"""Policies: who goes first, what each user gets, and that nobody waits for ever.

`World` runs the real engine on a virtual clock against a runtime that checks every plan; all
policies pass its random histories in test_engine.py. Here is what each promises beyond that.
"""

import logging
from itertools import combinations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import EXAMPLES, World, make_settings
from headway.core.terms import Terms
from headway.engine.policy.on_time import Due, choose_on_time
from headway.engine.policy.slo_state import misses_objectives
from headway.engine.sequence import Sequence
from headway.perf.model import Work

CHAT = Terms(ttft_s=0.2, tpot_s=0.05)
STEP_S, TOKEN_S = 1e-3, 1e-4  # of the world's clock


def by_brute_force(jobs: list[Due]) -> int:
    """The most jobs of any subset that all end in time, one after the other by deadline."""
    for count in range(len(jobs), 0, -1):
        for chosen in combinations(sorted(jobs), count):
            end = 0.0
            if all((end := end + job.duration_s) <= job.deadline_s for job in chosen):
                return count
    return 0


@given(
    st.lists(
        st.builds(Due, st.integers(-2, 20).map(float), st.integers(0, 8).map(float)), max_size=7
    )
)
def test_as_many_in_time_as_possible(jobs):
    """Hodgson's choice is one that no subset beats, and each it keeps makes it."""
    kept, given_up, end_s, spare_s = choose_on_time([(job, i) for i, job in enumerate(jobs)], 0.0)
    assert sorted(kept + given_up) == list(range(len(jobs)))
    assert len(kept) == by_brute_force(jobs)
    now_s, spared_s = 0.0, [inf]
    for index in kept:
        now_s += jobs[index].duration_s
        spared_s.append(jobs[index].deadline_s - now_s)
    assert now_s == end_s
    assert min(spared_s) == spare_s >= 0


def roomy(policy: str, **changes) -> World:
    """An engine with memory for everybody."""
    shape = {"num_blocks": (4000,), "max_model_len": 600, "max_num_seqs": 16, "budget": 64}
    return World(make_settings(policy=policy, **{**shape, **changes}))


def ends(world: World, request_id: int) -> int:
    """The step in which a request ended."""
    return world.finished_at[request_id]


def test_a_smaller_priority_goes_first():
    """Of three that wait the most urgent runs first; equal ones as they came."""
    world = roomy("priority", max_num_seqs=1)
    first = world.add([1] * 9, terms=Terms(priority=5), max_tokens=3, ignore_eos=True)
    world.step()
    late = [world.add([2] * 9, terms=Terms(priority=p), max_tokens=3) for p in (1, -1, 1)]
    world.drain()
    assert ends(world, late[1]) < ends(world, late[0]) < ends(world, late[2]) < ends(world, first)
    assert world.engine.scheduler.num_preemptions == 1, "the one running had to make way"


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0, 4.0)])
def test_tokens_are_shared_by_weight(weights):
    """Everybody wants more than there is: each gets its share of tokens within 5%."""
    world = roomy("fair", max_num_seqs=4)
    had = dict.fromkeys(range(len(weights)), 0)
    for number in range(40 * len(weights)):
        user = number % len(weights)
        # the first asks for much at once, the others for little at a time
        world.add(
            [number % 40, number // 40, *[user] * (60 if user == 0 else 12)],
            user=str(user),
            terms=Terms(weight=weights[user]),
            max_tokens=30 if user == 0 else 6,
            ignore_eos=True,
        )
    policy = world.engine.scheduler.policy
    took = policy.on_scheduled

    def count(sequence, num_tokens):
        price = 2 if sequence.computed >= sequence.num_prompt else 1
        had[int(sequence.request.principal.name)] += num_tokens * price
        took(sequence, num_tokens)

    policy.on_scheduled = count
    for _ in range(4000):
        world.step()
        waiting = {int(s.request.principal.name) for s in world.engine.scheduler.waiting}
        if len(waiting) < len(weights):
            break
    total = sum(had.values())
    for user, weight in enumerate(weights):
        assert had[user] / total == pytest.approx(weight / sum(weights), rel=0.05, abs=0.01)


def test_nobody_elses_share_lies_idle():
    """A user alone gets every step whole, whatever it had before."""
    world = roomy("fair")
    for number in range(8):
        world.add([number] * 64, user="heavy", max_tokens=1)
    for _ in range(8):
        _, record = world.step()
        assert record.num_tokens == 64
    world.drain()
    world.check_end()


def test_a_short_prompt_passes_a_long_one():
    """A chat that comes in the middle of a long prompt has its first token in a few steps."""
    world = roomy("slo", long_prefill_s=0.02)
    long = world.add([1] * 500, terms=Terms(ttft_s=10.0), max_tokens=2)
    world.step()
    chat = world.add([2] * 20, terms=CHAT, max_tokens=2, ignore_eos=True)
    world.drain()
    assert ends(world, chat) <= 4 < ends(world, long)


def test_without_objectives_a_step_takes_the_whole_budget():
    """Offline nobody comes in the middle; with an objective a step of a slow machine is shorter."""
    sizes = []
    for terms in (Terms(), CHAT):
        world = roomy("slo", budget=512)
        for number in range(4):
            world.add([number] * 500, terms=terms, max_tokens=2)
        for _ in range(40):  # a token takes a millisecond here, and the policy has learned it
            world.engine.cost.learn(Work(64, 1, 2080, 64), 0.064)
        world.step()
        sizes.append(world.plan.num_tokens)
    assert sizes[0] == 512 > sizes[1]


@pytest.mark.parametrize("given_s", [0.065, 5.0])
def test_who_cannot_make_it_lets_others_pass(given_s):
    """A request whose deadline is gone comes behind one that can still meet its own, but goes
    first where that one has time to spare: 8 ms are not twice the 12 ms it takes, 4.9 s are."""
    world = roomy("slo", max_num_seqs=1, prefix_cache="")
    busy = world.add([1] * 100, terms=CHAT, max_tokens=40, ignore_eos=True)
    world.step()
    late = world.add([2] * 100, terms=Terms(ttft_s=0.001), max_tokens=2, ignore_eos=True)
    fresh = world.add([3] * 100, terms=Terms(ttft_s=given_s), max_tokens=2, ignore_eos=True)
    world.drain()
    first, second = (late, fresh) if given_s == 5.0 else (fresh, late)
    assert ends(world, busy) < ends(world, first) < ends(world, second)


def test_late_ones_are_shed_where_that_is_asked():
    """One error, 503 with a time to come back, and the engine forgets it."""
    world = roomy("slo", max_num_seqs=1, late="shed")
    world.add([1] * 100, terms=CHAT, max_tokens=40, ignore_eos=True)
    world.step()
    late = world.add([2] * 100, terms=Terms(ttft_s=0.001), max_tokens=2)
    world.gained[late, 0].dropped = True
    world.step()
    [(request_id, error)] = world.engine.drain_refusals()
    assert (request_id, error.status, error.code) == (late, 503, "overloaded")
    assert error.retry_after_s
    world.drain()
    assert world.engine.drain_refusals() == []


def test_idle_classes_take_what_is_left():
    """A batch computes beside nobody's prompt, decodes only where the chat's next token can bear
    it, and gives up its row to a newcomer."""
    world = roomy("slo", max_num_seqs=2)
    batch = [
        world.add([n] * 50, terms=Terms(idle_only=True), max_tokens=20, ignore_eos=True)
        for n in (1, 2, 3)
    ]
    world.step()
    world.step()
    chats = [world.add([9, n] * 20, terms=CHAT, max_tokens=5, ignore_eos=True) for n in (4, 5)]
    world.step()
    in_plan = {
        world.engine.scheduler.by_id(row.sequence_id).request.request_id
        for row in world.plan.scheduled
        if len(row.token_ids) > 1
    }
    assert in_plan <= set(chats)
    world.drain()
    assert max(ends(world, chat) for chat in chats) < min(ends(world, one) for one in batch)


def test_a_greedy_user_comes_behind_a_modest_one():
    """Policy slo: forty prompts of one user wait; one of another is served at once."""
    world = roomy("slo", max_num_seqs=2)
    terms = Terms(ttft_s=100.0, tpot_s=1.0)
    greedy = [
        world.add([n % 40, *[7] * 200], user="greedy", terms=terms, max_tokens=2, ignore_eos=True)
        for n in range(60)
    ]
    for _ in range(150):
        world.step()
    modest = world.add([8] * 100, user="modest", terms=terms, max_tokens=2, ignore_eos=True)
    before = len(world.finished_at)
    world.drain()
    passed = sum(ends(world, one) < ends(world, modest) for one in greedy)
    assert passed - before <= 3


@pytest.mark.parametrize("users", [("ann",), ("ann", "bob")])
def test_a_token_is_charged_by_its_kind_and_the_weight_of_its_user(users):
    """A token of a prompt costs one, a token of an answer two, divided by the weight."""
    world = roomy("fair", budget=12)
    for number, weight in enumerate((3.0, 1.0, 1.0)):
        user = users[number % len(users)]
        terms = Terms(weight=weight if len(users) > 1 else 3.0)
        world.add([number] * (30 if number else 4), user=user, terms=terms, max_tokens=9)
    for _ in range(2):
        world.step()
    rows, paid = world.engine.scheduler.running, world.engine.scheduler.policy.users
    assert {s.computed < s.num_prompt for s in rows} == {True, False}
    before = {user: paid._counters[user] for user in users}
    for sequence in rows:
        paid.charge(sequence, 2)
    each = {user: paid._counters[user] - before[user] for user in users}
    assert sum(each[user] * paid.weight(user) for user in users) == pytest.approx(
        sum(4 if s.computed >= s.num_prompt else 2 for s in rows)
    )


def test_a_free_row_goes_to_who_has_had_less():
    """Rows are short, and one user has sixty requests waiting: theirs is the row of whoever else
    comes, however many came before and however long these have waited."""
    world = roomy("slo", max_num_seqs=2, aging_tokens=150, prefix_cache="")
    policy = world.engine.scheduler.policy
    policy.credit = 100.0
    policy.users.credit = 100.0
    terms = Terms(ttft_s=0.5, tpot_s=1.0)
    for number in range(60):
        world.add([number % 40] * 20, user="heavy", terms=terms, max_tokens=10, ignore_eos=True)
    modest: dict[int, int] = {}
    for step in range(240):
        if step >= 36 and step % 12 == 0:
            user = f"modest {step // 12 % 3}"
            one = world.add([step % 40] * 20, user=user, terms=terms, max_tokens=5, ignore_eos=True)
            modest[one] = step
        world.step()
    assert len(world.finished_at) > len(modest), "what they leave is the heavy user's"
    took = [world.finished_at[one] - came for one, came in modest.items() if came < 215]
    assert max(took) <= 10 + 5 + 2, "a row came free within ten steps, and five were its own"


def test_a_row_takes_as_long_as_the_last_ones_took():
    """Two rows, and three steps for two prompts of eight tokens and three of answer."""
    world = roomy("slo", max_num_seqs=2, prefix_cache="")
    for number in range(20):
        world.add([number] * 8, max_tokens=3, ignore_eos=True)
    seconds = []
    while world.engine.scheduler.has_work:
        _, record = world.step()
        seconds.append(record.slot_s)
    rows = [s for s in seconds if s]
    two_s = 3 * STEP_S + 2 * (8 + 2) * TOKEN_S
    assert len(rows) > 20 and rows[-3] == pytest.approx(two_s / 2, rel=0.1)
    assert seconds[-1] == 0.0, "nobody waits any more"


def test_who_crowds_the_queue_waits_longer():
    """Forty sequences beside four users with one each: forty times the bound; alone, one."""
    world = roomy("slo", aging_tokens=100)
    policy = world.engine.scheduler.policy
    crowd = [world.add([1] * 8, user="heavy", max_tokens=2) for _ in range(40)]
    heavy = world.engine.scheduler.waiting[0]
    assert policy.aging_bound(heavy) == 100
    for user in "abcd":
        world.add([1] * 8, user=user, max_tokens=2)
    assert policy.aging_bound(heavy) == 4000
    assert policy.aging_bound(world.engine.scheduler.waiting[-1]) == 100
    for one in crowd[9:]:
        world.abort(one)
    assert policy.aging_bound(heavy) == 900


streams = st.lists(
    st.tuples(
        st.integers(1, 100),
        st.sampled_from(["", "a", "b"]),
        st.sampled_from(
            [CHAT, Terms(), Terms(ttft_s=0.01), Terms(ttft_s=5.0), Terms(idle_only=True)]
        ),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=max(EXAMPLES // 6, 1))
@given(
    streams,
    streams,
    st.sampled_from([0.1, 0.25, 0.5]),
    st.integers(1, 400),
    st.sampled_from([30, 100, 400]),
    st.sampled_from([1, 4]),
)
def test_nobody_is_overtaken_beyond_the_bound(first, later, share, aging, num_blocks, max_num_seqs):
    """An endless stream of later prompts: each of the first is passed by its bound at most.

    Beyond the bound come only prompts that had already begun when it could not. The bound grows
    while its user has more than its share here, and shrinks when others are gone.
    """
    logging.disable(logging.CRITICAL)
    world = roomy(
        "slo",
        num_blocks=(num_blocks,),
        max_model_len=110,
        max_num_seqs=max_num_seqs,
        lane_share=share,
        aging_tokens=aging,
        long_prefill_s=0.004,
    )
    logging.disable(logging.NOTSET)
    capacity = (num_blocks - 1) * world.settings.cache.block_size
    watched = [world.add([1] * n, user=u, terms=t, max_tokens=2) for n, u, t in first]
    policy = world.engine.scheduler.policy
    longest: dict[Sequence, float] = {}
    for number in range(400):
        if all(one in world.finished_at for one in watched):
            break
        length, user, terms = later[number % len(later)]
        world.add([number % 40] * length, user=user, terms=terms, max_tokens=2)
        world.step()
        for sequence in [*world.engine.scheduler.running, *world.engine.scheduler.waiting]:
            most = (
                policy.hard_aging_bound(sequence) + capacity + world.settings.max_num_batched_tokens
            )
            longest[sequence] = max(longest.get(sequence, 0), most)
            assert sequence.policy_state.num_overtaken <= longest[sequence]
    for request_id in list(world.requests):
        world.abort(request_id)
    world.drain()
    policy.users.check_integrity([])


def test_the_victim_is_who_can_bear_it():
    """Of two in time the one with less to redo would miss its time per token: the other goes."""
    world = roomy("slo")
    patient, hurried = Terms(ttft_s=9, tpot_s=1), Terms(ttft_s=9, tpot_s=0.0015)
    lost = Terms(ttft_s=1e-3, tpot_s=0.05)
    for terms, length, num_steps in ((patient, 60, 3), (lost, 30, 3), (hurried, 20, 5)):
        left = 10 if terms is hurried else 40
        world.add([length // 10] * length, terms=terms, max_tokens=left, ignore_eos=True)
        for _ in range(num_steps):
            world.step()
    running = world.engine.scheduler.running
    victims = world.engine.scheduler.policy.victims(running)
    assert [v.request.terms for v in victims] == [lost, patient, hurried]


def test_time_per_token_counts_the_tokens_of_a_burst():
    """Where steps bring four tokens of a sequence each may last four times as long, and who is
    late by steps of one token is not given up."""
    world = roomy("slo")
    world.add([7] * 20, terms=Terms(ttft_s=9, tpot_s=0.01), max_tokens=100, ignore_eos=True)
    for _ in range(3):
        world.step()
    policy, (sequence,) = world.engine.scheduler.policy, world.engine.scheduler.running
    now_s = world.clock.now_s()
    single_s, calm_s = policy.step_limits([sequence], 9.0, now_s, 0.001)
    assert misses_objectives(sequence, now_s + 0.5, 0.009), "97 tokens save a millisecond each"
    for _ in range(100):
        policy.on_scheduled(sequence, 1)
        policy.on_drafts_accepted(sequence, 3)
    burst_s, burst_calm_s = policy.step_limits([sequence], 9.0, now_s, 0.001)
    assert burst_calm_s == pytest.approx(4 * calm_s, rel=0.01)
    assert burst_s == pytest.approx(max(single_s + 3 * 0.8 * 0.01, 4 * 0.65 * 0.01), rel=0.01)
    assert not misses_objectives(sequence, now_s + 0.5, 0.009)


def test_decodes_that_take_most_of_their_objective_leave_half_of_the_rest():
    """Objective 10 ms. Decodes of 5 ms leave the step its 8 ms; of 9 ms, 9.5 ms as long as it is
    not behind steps of that length; of 10 ms and more nothing is to spare."""
    world = roomy("slo")
    world.add([7] * 20, terms=Terms(ttft_s=9, tpot_s=0.01), max_tokens=100, ignore_eos=True)
    for _ in range(3):
        world.step()
    policy, (sequence,) = world.engine.scheduler.policy, world.engine.scheduler.running
    given = sequence.num_generated
    for pace_s, decode_s, bears_s in (
        (0.008, 0.005, 0.008),  # on the way that is aimed at
        (0.008, 0.009, 0.0095),
        (0.0095, 0.009, 0.0095),
        (0.0098, 0.009, 0.0095 - (given - 1) * 0.0003),  # a little behind
        (0.0098, 0.0099, 0.00995),
        (0.0098, 0.011, 0.0065),
    ):
        now_s = sequence.first_token_s + (given - 1) * pace_s
        bears, _ = policy.step_limits([sequence], 9.0, now_s, decode_s)
        assert bears == pytest.approx(bears_s), (pace_s, decode_s)


@pytest.mark.parametrize(("policy", "matched"), [("fcfs", 0), ("fair", 0), ("slo", 9)])
def test_what_a_policy_keeps_of_a_sequence_is_its_own(policy, matched):
    """Only the one that looks prefixes up tells of tokens in memory, and keeps what it saw."""
    world = roomy(policy, max_num_seqs=1, prefix_cache="lfu")
    prompt = list(range(10))
    world.add(prompt, max_tokens=2, ignore_eos=True)
    world.drain()
    world.add([30] * 9, max_tokens=4, ignore_eos=True)
    world.step()
    world.add(prompt, max_tokens=2)
    scheduler = world.engine.scheduler
    waiting = scheduler.waiting[0]
    assert scheduler.policy.num_matched_tokens(waiting) == matched
    assert (waiting.policy_state is None) == (policy != "slo")
    assert not {"expected", "missed_ttft", "num_overtaken"} & set(Sequence.__slots__)
