"""Claims of simulated fleets, of paged memory and of cost: small worlds, worked numbers."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from claim_world import ScriptedAsking, asked_of
from headway.core.slo import Slo
from headway.gateway.config import UpstreamPrice
from literature import cost, fleet, memory
from literature.claim import HOLDS
from literature.shapes import LLAMA_3_8B, spec_of
from literature.subject import Subject


def test_engines_that_a_rate_asks_for_are_its_seconds():
    """Prompts: 4,096 tokens of 16 GFLOP and what they attend, over half of 989 TFLOP/s."""
    took = fleet.truth(spec_of(LLAMA_3_8B))
    prefill, decode = fleet.shares(took, (4096, 128), 0.05, 1.0)
    assert prefill == pytest.approx(0.125, rel=0.15)
    assert fleet.shares(took, (4096, 128), 0.05, 4.0) == pytest.approx((4 * prefill, 4 * decode))
    long, short = prefill / decode, np.divide(*fleet.shares(took, (256, 256), 0.0105, 1.0))
    assert long > 10 * short, "the ratio follows the workload"


def test_a_rate_is_bracketed_by_what_was_kept_and_what_was_not():
    house = fleet.House(
        name="long", slo=fleet.LONG.slo, talks=fleet.LONG.talks, engines=1, seconds=1,
        precision=0.2,
    )  # fmt: skip
    tried: list[float] = []

    def attained(way: fleet.Way, rate: float) -> float:
        tried.append(rate)
        return float(rate <= 7.3)

    house.attained = attained  # type: ignore[method-assign]
    low, high = house.best_rate(fleet.BY_OBJECTIVES, 2.0)
    assert low <= 7.3 < high <= 1.2 * low
    assert len(tried) < 12
    house.attained = lambda way, rate: 0.0  # type: ignore[method-assign]
    assert house.best_rate(fleet.BY_OBJECTIVES, 2.0)[0] == 0.0


@pytest.mark.parametrize("prefill", [0, 1])
def test_the_real_scheduler_keeps_few_requests_and_not_many(prefill: int):
    """Two engines, together and apart: prompts of 512 tokens at a rate either holds, and at one
    beyond all FLOPs."""
    load = replace(fleet.LONG, prompt=(480, 544), answer=(8, 16), slo=Slo(ttft_s=0.3, tpot_s=0.05))
    house = fleet.house_of(replace(load, seconds=1.0), 2)
    way = fleet.Way("way", prefill)
    assert house.attained(way, 4.0) == 1.0
    assert house.attained(way, 400.0) < 0.9


@pytest.mark.parametrize("rate", [20.0, 60.0, 80.0])
def test_objectives_that_steps_barely_meet_leave_prompts_their_part(rate: float):
    """An objective of 10.5 ms where a step takes 9.2 to 9.9: chunks by the objectives keep no fewer
    requests than chunks of 512, at rates that either holds and at one that those do not."""
    house = fleet.house_of(replace(fleet.SHORT, seconds=1.5), 1)
    kept = house.attained(fleet.BY_OBJECTIVES, rate)
    assert kept >= max(0.95, house.attained(fleet.CHUNKED, rate))


def test_the_interval_of_a_ratio_is_that_of_both_brackets():
    rates = {"a": (8.0, 10.0), "b": (4.0, 5.0)}
    figure = fleet.over(rates, "a", "b", "a over b")
    assert (figure.low, figure.high) == (8 / 5, 10 / 4)
    assert figure.low < figure.value < figure.high


def test_pages_hold_more_than_reservations(monkeypatch):
    monkeypatch.setattr(memory, "REQUESTS", 48)
    found = memory.paging(Subject(repeats=3))
    assert found.figures[0].value > 3
    reserved = next(f.value for f in found.figures if f.name.startswith("with 2,048"))
    assert reserved == 14648 // 2048


# ── cost ────────────────────────────────────────────────────────────────────────────────────


def test_a_success_costs_its_failures_too():
    """1 / (1 − 0.5) tries at (1,500 x 1 + 300 x 2) / 1e6 dollars."""
    price = UpstreamPrice(input=1.0, output=2.0)
    paid = cost.per_success(price, 0.5, np.random.default_rng(0), 200_000)
    assert paid == pytest.approx(2 * 2100 / 1e6, rel=0.01)
    found = cost.retries(Subject())
    assert found.verdict == HOLDS
    assert found.figures[1].value == pytest.approx(0.98 / 0.82)
    curve = found.picture.series[0]
    crossing = [x for x, y in zip(curve.x, curve.y, strict=True) if y >= 1]
    assert max(crossing) == 15  # % more; 20 is beyond 19.5


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "Ann", "age": 3}', True),
        ('{"name": "Ann", "age": "3"}', False),
        ('{"name": "Ann", "age": true}', False),
        ('{"name": "Ann"}', False),
        ('{"name": "Ann", "age": 3, "more": 1}', False),
        ('{"name": "Ann", "age": 3', False),
        ("[]", False),
    ],
)
def test_a_record_is_valid_by_its_schema(text: str, fits: bool):
    assert cost.valid(text, SCHEMA) is fits


class Untrue:
    """Answers validly with a schema, and every other time without one."""

    calls: ClassVar[int] = 0

    def __call__(self, body: dict) -> str:
        schema = cost.schema_in(cost.Example(prompt=body["messages"][-1]["content"], answer=""))
        record = {
            name: "x" if told["type"] == "string" else 1
            for name, told in schema["properties"].items()
        }
        Untrue.calls += 1
        return (
            str(record) if "response_format" not in body and self.calls % 4 == 1 else dumps(record)
        )


def dumps(record: dict) -> str:
    import json

    return json.dumps(record)


def test_failed_validations_are_those_that_a_schema_saves():
    found = cost.structured(asked_of(ScriptedAsking(replies=Untrue())))
    assert found.figures[0].value == 100
    assert found.figures[1].value == pytest.approx(50, abs=3)
    assert found.verdict == HOLDS
    never = cost.structured(asked_of(ScriptedAsking(replies=lambda body: "no")))
    assert never.figures[0].value == 0


def test_routing_gains_between_too_bold_and_too_timid():
    """Four questions, the cheap one right where it is sure."""
    one = cost.Routed(cheap=True, dear=True, prompt=100, cheap_tokens=10, dear_tokens=10, sure=0.0)
    asked = [one] * 10 + [replace(one, cheap=False, sure=-5.0)] * 10
    subject = Subject()
    subject._made[cost.routed] = asked
    found = cost.routing(subject)
    saved, bold, bold_cost, timid, timid_cost = (f.value for f in found.figures)
    assert saved == pytest.approx(40)  # half are asked again: 10% and 50% of the dear one's
    assert (bold, timid) == (50, 100)
    assert (bold_cost, timid_cost) == (pytest.approx(10), pytest.approx(110))
