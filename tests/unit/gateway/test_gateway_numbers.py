"""Numbers that an upstream sends: a bad one costs that upstream an attempt, and nobody else."""

from typing import Any

import msgspec
import pytest

from gateway_world import Stub, text_of, world
from headway.edge.relayed import decode_load

BIG = int("9" * 400)
BAD_LOADS: dict[str, dict[str, Any]] = {
    "negative": {"queue_s": -1e308, "token_s": -5.0},
    "huge": {"queue_s": 1e308, "token_s": 1e308},
    "400 digits": {"cache_tokens": BIG},
    "rows": {"max_rows": 10**9},
    "context": {"context": -5},
    "text": {"boot": "x" * 5000},
}


class LoadStub(Stub):
    """A Headway server whose load is `bad`, in its first answer alone, or everywhere (`looks`)."""

    bad: dict[str, Any]
    looks = False

    @property
    def load(self) -> dict[str, Any]:
        return super().load | (self.bad if self.looks or len(self.asked) == 1 else {})


@pytest.mark.parametrize("kind", BAD_LOADS)
@pytest.mark.parametrize("looks", [False, True])
async def test_a_bad_load_costs_its_upstream_an_attempt_alone(kind: str, looks: bool) -> None:
    bad = LoadStub("a", headway=True)
    bad.bad, bad.looks = BAD_LOADS[kind], looks
    models = ({"name": "tiny", "upstreams": ["a", "b"]}, {"name": "a", "upstreams": ["a"]})
    async with world(bad, Stub("b", headway=True), models=models) as live:
        if not looks:
            assert (await live.chat(model="a")).headers["x-headway-attempts"] == "2"
            assert live.state.metrics.of("attempts", upstream="a", outcome="lied") == 1
        answers = [await live.chat(number % 2 == 0) for number in range(6)]
        assert [(each.status, each.text) for each in answers] == [(200, text_of(8))] * 6
        assert live.state.upstreams["a"].speed.queue_s >= 0
        if looks:
            for _ in range(3):
                await live.state.upstreams["a"].look()
            assert live.state.upstreams["a"].is_down
            async with live.http.get("/ready") as answer:
                assert (await answer.json())["models"] == {"tiny": True, "a": False}


@pytest.mark.parametrize(
    "figures",
    [b'{"kv": 1e999}', b'{"rows": -1}', b'{"queue_s": %s}' % (b"9" * 5000), b'{"token_s": "1"}'],
)
def test_a_load_outside_of_its_range_is_refused(figures: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_load(figures)


@pytest.mark.parametrize("length", [-1, BIG, 2**60])
async def test_a_context_outside_of_its_range_is_no_look(length: int) -> None:
    bad = Stub("a", context=length)
    async with world(bad, Stub("b")) as live:
        assert not live.state.upstreams["a"].looked
        assert all([(await live.chat()).is_complete for _ in range(4)])
