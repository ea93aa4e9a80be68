"""Upstreams that live and serve nothing: they drain, load, or are named no more."""

import asyncio

import pytest

from gateway_world import Gateway, Stub, config_of, text_of, world

TURNS = ({"name": "tiny", "policy": "round_robin"},)


def three() -> tuple[Stub, Stub, Stub]:
    a, b, c = (Stub(name, headway=True) for name in "abc")
    return a, b, c


def unwatched(live: Gateway) -> None:
    """Nobody looks at its upstreams from now on: who asks them finds how they are."""
    for each in live.state.upstreams.values():
        assert each._watcher is not None
        each._watcher.cancel()


@pytest.mark.parametrize("policy", ["round_robin", "time"])
@pytest.mark.parametrize("stream", [True, False])
async def test_who_drains_loses_no_request_and_rests(stream: bool, policy: str) -> None:
    """Forty at once, two of three upstreams drain: more have to be asked elsewhere than the retry
    budget would let through, and it lends none of them anything."""
    a, b, c = three()
    async with world(a, b, c, models=({"name": "tiny", "policy": policy},)) as live:
        unwatched(live)
        a.drains = b.drains = True
        answers = await asyncio.gather(*(live.chat(stream) for _ in range(40)))
        assert [answer.status for answer in answers] == [200] * 40
        assert all(answer.text == text_of(8) for answer in answers)
        metrics = live.state.metrics
        assert metrics.of("retries_denied") == 0 and len(live.state.budget._retries) == 0
        assert metrics.of("attempts", upstream="a", outcome="away") == len(a.asked)
        before = len(a.asked) + len(b.asked)
        assert before > 0
        more = await asyncio.gather(*(live.chat(stream) for _ in range(20)))
        assert all(answer.status == 200 for answer in more)
        assert len(a.asked) + len(b.asked) == before, "they have said it"
        for name in "abc":
            assert live.state.upstreams[name].breaker.state == "closed"


async def test_a_look_finds_who_drains_and_who_is_back() -> None:
    a, b, _ = three()
    async with world(a, b, models=TURNS) as live:
        unwatched(live)
        upstream = live.state.upstreams["a"]
        a.drains = True
        await upstream.check_health()
        assert upstream.is_unavailable and not upstream.is_down, "one look is enough"
        for _ in range(4):
            assert (await live.chat()).headers["x-headway-upstream"] == "b"
        assert a.asked == []
        a.drains = False
        await upstream.check_health()
        assert not upstream.is_unavailable
        answers = [await live.chat() for _ in range(4)]
        assert {answer.headers["x-headway-upstream"] for answer in answers} == {"a", "b"}


async def test_where_all_drain_that_is_said() -> None:
    """They are asked all the same: one of them may be ready before a look has found it."""
    a = Stub("a", headway=True)
    async with world(a) as live:
        unwatched(live)
        a.drains = True
        answers = await asyncio.gather(*(live.chat() for _ in range(10)))
        assert {answer.status for answer in answers} == {503}
        assert {answer.json["error"]["code"] for answer in answers} == {"not_ready"}
        assert all(answer.headers["Retry-After"] == "1" for answer in answers)
        assert 10 <= len(a.asked) <= 15, "the budget is for those who do not help"
        assert live.state.takes_lines("tiny") is False
        a.drains = False
        assert (await live.chat()).is_complete


async def test_fallbacks_go_before_an_upstream_that_drains() -> None:
    a, b, _ = three()
    rows = (
        {"name": "tiny", "upstreams": ["a"], "fallbacks": ["other"]},
        {"name": "other", "upstreams": ["b"]},
    )
    async with world(a, b, models=rows) as live:
        unwatched(live)
        a.drains = True
        answers = [await live.chat() for _ in range(4)]
        assert {answer.headers["x-headway-upstream"] for answer in answers} == {"b"}
        assert len(a.asked) == 1


async def test_another_kind_of_503_takes_from_the_budget() -> None:
    bad = Stub("a", headway=True, fault=lambda number: "status503")
    async with world(bad, Stub("b", headway=True), models=TURNS) as live:
        assert all([(await live.chat()).is_complete for _ in range(2)])
        assert len(live.state.budget._retries) == 1 and not live.state.upstreams["a"].is_unavailable


async def test_small_endpoints_pass_those_who_drain() -> None:
    stubs = three()
    rows = {stub.name: {"can": ["embeddings"]} for stub in stubs}
    async with world(*stubs, models=TURNS, **rows) as live:
        unwatched(live)
        stubs[0].drains = stubs[1].drains = True
        for _ in range(3):
            body = {"model": "tiny", "input": "x"}
            async with live.http.post("/v1/embeddings", json=body) as answer:
                assert answer.status == 200
        assert [len(stub.asked) for stub in stubs] == [1, 1, 3]


async def test_who_is_named_no_more_ends_what_it_began() -> None:
    """A stream that could not go on elsewhere; then its connections are closed."""
    stubs = [Stub("a"), Stub("b", token_s=0.05)]
    async with world(*stubs, models=({"name": "tiny", "upstreams": ["b"]},)) as live:
        gone = live.state.upstreams["b"]
        running = asyncio.create_task(live.chat())
        while not stubs[1].num_tokens:
            await asyncio.sleep(0.01)
        await live.state.reload(config_of(stubs[:1], {"name": "tiny", "upstreams": ["a"]}))
        assert gone in live.state.retiring
        assert (await live.chat()).headers["x-headway-upstream"] == "a"
        assert (await running).is_complete
        while live.state.retiring:
            await asyncio.sleep(0.01)
        assert gone._session is None


async def test_a_gateway_that_ends_waits_for_no_one_who_was_retired() -> None:
    stubs = [Stub("a"), Stub("b", fault=lambda number: "stall")]
    async with world(*stubs, models=({"name": "tiny", "upstreams": ["b"]},)) as live:
        running = asyncio.create_task(live.chat())
        while not stubs[1].asked:
            await asyncio.sleep(0.01)
        await live.state.reload(config_of(stubs[:1], {"name": "tiny", "upstreams": ["a"]}))
        (gone,) = live.state.retiring
        await live.state.stop()
        assert gone._session is None
        running.cancel()
