"""Which upstream is asked: breakers, budgets, beginnings of prompts, what fits, policies."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_world import Stub, world
from headway.core.clock import VirtualClock
from headway.edge.relayed import LoadReport, decode_load
from headway.gateway.bodies import needs_of
from headway.gateway.breaker import Breaker, RetryBudget
from headway.gateway.choose import Pool, RoutingQuery
from headway.gateway.config import UpstreamRow
from headway.gateway.events import Event, EventCutter
from headway.gateway.prefix import PAGE_BYTES, PageHistory, page_keys
from headway.gateway.speed import DEFAULT_ROWS, Speed
from headway.gateway.upstream import Upstream


def upstream(clock: VirtualClock, name: str = "a", **fields: Any) -> Upstream:
    made = Upstream(UpstreamRow(url=f"http://{name}:1/v1", name=name, **fields), clock)
    made.was_reached = True
    return made


# ── breakers ────────────────────────────────────────────────────────────────────────────────


def test_a_breaker_opens_and_one_request_tries_it() -> None:
    clock = VirtualClock()
    breaker = Breaker(clock)
    for _ in range(5):
        assert breaker.allows
        breaker.begin()
        breaker.failed()
    assert breaker.state == "open" and not breaker.allows
    clock.advance(1.0)
    assert breaker.state == "half open" and breaker.allows
    breaker.begin()
    assert not breaker.allows, "one request is enough to try"
    breaker.failed()
    clock.advance(1.5)
    assert breaker.state == "open", "it rests twice as long"
    breaker.allow_trial()
    breaker.begin()
    breaker.succeeded()
    assert breaker.state == "closed"


def test_a_breaker_opens_at_half_of_ten() -> None:
    breaker = Breaker(VirtualClock())
    for number in range(9):
        (breaker.failed if number % 2 else breaker.succeeded)()
    assert breaker.state == "closed"
    breaker.failed()
    assert breaker.state == "closed" or breaker.num_opened == 1
    breaker.failed()
    assert breaker.state == "open"


@given(
    st.lists(
        st.sampled_from(["begin", "failed", "succeeded", "record_abort", "allow_trial", "wait"])
    )
)
def test_a_breaker_that_is_asked_again_always_comes_back(steps: list[str]) -> None:
    clock = VirtualClock()
    breaker = Breaker(clock)
    for step in steps:
        if step == "wait":
            clock.advance(0.7)
        else:
            getattr(breaker, step)()
        breaker.check_integrity()
    breaker.record_abort()
    clock.advance(31.0)
    assert breaker.allows


def test_retries_are_a_tenth_of_requests_and_three() -> None:
    clock = VirtualClock()
    budget = RetryBudget(clock)
    for _ in range(50):
        budget.request()
    assert sum(budget.take() for _ in range(50)) == 8
    clock.advance(10.1)
    assert sum(budget.take() for _ in range(50)) == 3


def test_the_better_half_is_never_taken_away() -> None:
    clock = VirtualClock()
    pool = Pool([upstream(clock, name) for name in "abcd"], "round_robin")
    for each in pool.upstreams[:2]:
        for _ in range(5):
            each.breaker.failed()
    chosen = {pool.choose(RoutingQuery(model="m")).name for _ in range(8)}  # type: ignore[union-attr]
    assert chosen == {"c", "d"}
    for _ in range(5):
        pool.upstreams[2].breaker.failed()
    chosen = {pool.choose(RoutingQuery(model="m")).name for _ in range(8)}  # type: ignore[union-attr]
    assert chosen == {"a", "b", "c", "d"}, "with most of them open all are tried"
    pool.upstreams[0].num_failed_checks = 3
    chosen = {pool.choose(RoutingQuery(model="m")).name for _ in range(8)}  # type: ignore[union-attr]
    assert chosen == {"b", "c", "d"}, "but who is down is down"


# ── time ────────────────────────────────────────────────────────────────────────────────────


def test_the_replica_that_knows_the_beginning_is_asked_until_its_queue_is_longer() -> None:
    clock = VirtualClock()
    pool = Pool([upstream(clock, "a"), upstream(clock, "b")])
    prompt = b"x" * 4096
    asked = RoutingQuery(model="m", keys=page_keys("", prompt), num_bytes=4096, answer=10)
    first = pool.choose(asked)
    assert first is not None
    first.pages.add(list(asked.keys))
    names = []
    for _ in range(DEFAULT_ROWS + 8):
        chosen = pool.choose(asked)
        assert chosen is not None
        names.append(chosen is first)
        chosen.speed.begin(1024.0 if chosen is not first else 0.0, 100)
    assert names == [True] * DEFAULT_ROWS + [False] * 8, "with no row free an answer must end first"


def test_answers_that_run_beside_take_a_token_of_the_step_each() -> None:
    speed = Speed(VirtualClock())
    for count in range(1, DEFAULT_ROWS):
        speed.begin(0.0, 100)
        assert speed.queue_s == pytest.approx(count * speed.answer_s)
    speed.begin(0.0, 100)
    assert speed.queue_s == pytest.approx(DEFAULT_ROWS * 100 * speed.answer_s)
    assert speed.take(LoadReport(max_rows=DEFAULT_ROWS + 1, boot="1")) is False
    assert speed.queue_s == pytest.approx(DEFAULT_ROWS * speed.answer_s), "as it tells"


def test_speeds_are_learned_and_what_a_server_says_goes_first() -> None:
    clock = VirtualClock()
    speed = Speed(clock)
    for _ in range(40):
        flight = speed.begin(100.0, 10)
        clock.advance(0.2)
        speed.began(flight)
        clock.advance(0.9)
        speed.end(flight, prompt_bytes=300, prompt=100, answer=10)
        speed.check_integrity()
    assert speed.token_s == pytest.approx(0.002)
    assert speed.answer_s == pytest.approx(0.1, rel=0.01)
    assert speed.bytes_per_token == pytest.approx(3.0, rel=0.01)
    assert not speed.take(LoadReport(queue_s=2.0, token_s=0.5, boot="1")) and speed.token_s == 0.5
    clock.advance(0.5)
    assert speed.queue_s == pytest.approx(1.5)
    speed.take(decode_load(b'{"queue_s": 1.5, "token_s": 0.5, "answer_s": 5e-324, "boot": "1"}'))
    assert speed.answer_s == pytest.approx(0.1, rel=0.01), "answers are charged by it"
    clock.advance(3.0)
    assert speed.queue_s == 0.0, "what was told is too old"
    assert speed.take(LoadReport(boot="2")), "another process has another cache"


def test_what_waits_counts_from_the_moment_it_is_chosen() -> None:
    speed = Speed(VirtualClock())
    flight = speed.begin(1000.0, 0)
    assert speed.queue_s == pytest.approx(1000 * speed.token_s)
    speed.began(flight)
    assert speed.queue_s == 0.0
    speed.end(flight)
    speed.end(flight)
    assert not speed.flights


# ── beginnings ──────────────────────────────────────────────────────────────────────────────


@given(st.binary(max_size=2000), st.binary(max_size=2000), st.binary(max_size=600))
def test_equal_keys_are_equal_beginnings(common: bytes, one: bytes, other: bytes) -> None:
    first, second = common + one, common + other
    seen = PageHistory(2**20)
    seen.add(page_keys("salt", first))
    found = seen.prefix_bytes(page_keys("salt", second))
    assert first[:found] == second[:found]
    assert found >= len(common) // PAGE_BYTES * PAGE_BYTES
    assert seen.prefix_bytes(page_keys("another", second)) == 0


def test_pages_are_forgotten_last_ones_first() -> None:
    seen = PageHistory(10 * PAGE_BYTES)
    old, new = (page_keys("", text * 8 * PAGE_BYTES) for text in (b"a", b"b"))
    seen.add(old)
    seen.add(new)
    assert len(seen) == 10
    assert seen.prefix_bytes(new) == 8 * PAGE_BYTES
    assert seen.prefix_bytes(old) == 2 * PAGE_BYTES, "what is left is a beginning"
    seen.forget()
    assert seen.prefix_bytes(new) == 0


async def test_chats_with_shared_beginnings_stay_together() -> None:
    """Twenty system prompts at three replicas: each is computed at few, and the load is even."""
    stubs = [Stub(name, headway=True) for name in "abc"]
    async with world(*stubs) as live:
        for number in range(60):
            system = {"role": "system", "content": f"{number % 20} " * 500}
            user = {"role": "user", "content": f"question {number}"}
            await live.chat(messages=[system, user], max_tokens=2)
        loads = [len(stub.asked) for stub in stubs]
        homes = Counter()
        for stub in stubs:
            homes.update({body["messages"][0]["content"] for body in stub.asked})
    assert sum(homes.values()) <= 22, "each beginning is computed once"
    assert max(loads) <= 1.3 * 20, loads


def test_one_hot_replica_leaves_the_others_their_beginnings() -> None:
    """Whoever is known elsewhere goes there; the queue of one is nobody else's."""
    pool = Pool([upstream(VirtualClock(), name) for name in "abc"])
    prompts = {each.name: each.name.encode() * 4096 for each in pool.upstreams}
    asked = {
        name: RoutingQuery(model="m", keys=page_keys("", prompt), num_bytes=4096, answer=1)
        for name, prompt in prompts.items()
    }
    for each in pool.upstreams:
        each.pages.add(list(asked[each.name].keys))
    pool.upstreams[0].speed.take(LoadReport(queue_s=9.0, boot="1"))
    chosen = {name: pool.choose(request) for name, request in asked.items()}
    assert chosen["b"] is pool.upstreams[1] and chosen["c"] is pool.upstreams[2]
    assert chosen["a"] is not pool.upstreams[0]


async def test_a_replica_that_is_stuck_draws_no_traffic() -> None:
    """It takes requests and says nothing: its cache stays the smallest, and its queue does not."""
    stubs = [Stub("a", headway=True, fault=lambda number: "stall"), Stub("b", headway=True)]
    async with world(*stubs) as live:
        texts = [f"{number} " * 2000 for number in range(12)]
        asked = [
            asyncio.create_task(live.chat(messages=[{"role": "user", "content": text}]))
            for text in texts
        ]
        while sum(task.done() for task in asked) + len(stubs[0].asked) < len(texts):
            await asyncio.sleep(0.02)
        held = len(stubs[0].asked)
        for number in range(8):
            await live.chat(messages=[{"role": "user", "content": f"again {number} " * 500}])
        assert len(stubs[0].asked) == held <= len(texts) / 2
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_restarted_replica_is_known_to_have_forgotten() -> None:
    stub = Stub("a", headway=True)
    async with world(stub) as live:
        upstream = live.state.upstreams["a"]
        await live.chat(messages=[{"role": "user", "content": "x" * 1000}])
        assert len(upstream.pages) > 0
        stub.boot = "2"
        await upstream.check_health()
        assert len(upstream.pages) == 0


# ── what fits ───────────────────────────────────────────────────────────────────────────────


def test_only_what_understands_a_request_is_asked() -> None:
    clock = VirtualClock()
    plain = upstream(clock, "plain", kind="openai", can=[], context=1000)
    tools = upstream(clock, "tools", kind="headway", context=100)
    images = upstream(clock, "images", kind="vllm", context=100)
    pool = Pool([plain, tools, images])

    def fitting(**fields: Any) -> set[str]:
        return {each.name for each in pool.fitting(RoutingQuery(model="m", **fields))}

    assert fitting() == {"plain", "tools", "images"}
    assert fitting(needs=needs_of({"tools": [{}]})) == {"tools", "images"}
    schema = {"response_format": {"type": "json_schema"}}
    assert fitting(needs=needs_of(schema)) == {"tools", "images"}
    assert fitting(needs=needs_of({"text": {"format": {"type": "json_schema"}}})) == {
        *("tools", "images"),
    }
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    assert fitting(needs=needs_of({"messages": picture})) == {"images"}
    assert fitting(num_bytes=2000) == {"plain"}
    assert fitting(num_bytes=100, answer=200) == {"plain"}
    assert fitting(num_bytes=80_000) == {"plain"}, "the largest may say that it is too long"
    assert fitting(pinned="tools") == {"tools"}
    assert fitting(needs=frozenset({"embeddings"})) == {"images"}


def test_policies() -> None:
    clock = VirtualClock()
    rows = {"a": 1.0, "b": 3.0, "c": 1.0}
    ups = [upstream(clock, name, weight=weight) for name, weight in rows.items()]

    def chosen(policy: str, count: int = 300, **fields: Any) -> Counter[str]:
        pool = Pool(ups, policy)
        found = [pool.choose(RoutingQuery(model="m", **fields)) for _ in range(count)]
        return Counter(each.name for each in found if each)

    assert set(chosen("round_robin").values()) == {100}
    assert 130 < chosen("weighted")["b"] < 230
    assert len(chosen("pinned", keys=[7])) == 1
    flight = ups[0].speed.begin(0.0, 1)
    assert set(chosen("least")) == {"b", "c"} == set(chosen("time"))
    ups[0].speed.end(flight)
    full = upstream(clock, "full", max_at_once=1)
    full.speed.begin(0.0, 1)
    assert Pool([full]).choose(RoutingQuery(model="m")) is None


# ── events ──────────────────────────────────────────────────────────────────────────────────

LINES = st.sampled_from(
    [b"data: {}", b"data:[1,", b"event: x", b"id: 3", b": c", b"", b"data: 2]", b"retry: 1", b"x"]
)


@given(st.lists(LINES, max_size=20), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data())
def test_events_are_the_same_however_they_are_cut(
    lines: list[bytes], newline: bytes, data: st.DataObject
) -> None:
    text = newline.join([*lines, b"", b""])
    whole = EventCutter().feed(
        b"".join(text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").splitlines(True))
    )
    cutter, found, rest = EventCutter(), list[Event](), text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        found += cutter.feed(rest[:size])
        rest = rest[size:]
    found += cutter.feed(b"\n")  # the second half of a \r that may have been held
    assert found[: len(whole)] == whole and len(found) <= len(whole) + 1


def test_an_event_keeps_its_name_and_data_alone() -> None:
    raw = b"id: 7\r\nevent: message_start\r\ndata: {\r\ndata: }\r\nretry: 5\r\n\r\n"
    (event,) = EventCutter().feed(raw)
    assert event.encoded() == b"event: message_start\ndata: { }\n\n"
    (odd,) = EventCutter().feed(b"event: a\x00b\ndata: 1\n\n")
    assert odd.encoded() == b"data: 1\n\n"
