"""Rollouts: a worse version goes back by itself, one that is no worse is promoted."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from gateway_world import Gateway, Stub, world
from headway.core.clock import VirtualClock
from headway.core.errors import UsageError
from headway.core.slo import parse_slo
from headway.gateway.arm import is_invalid
from headway.gateway.config import RolloutRow, convert_row, read_config
from headway.gateway.evidence import CanaryEvidence, plan_rate, tail_probabilities
from headway.gateway.rollout import ArmSample, Rollout

ROW: dict[str, Any] = {"name": "r", "model": "tiny", "canary": ["b"]}
TURNS = {"name": "tiny", "policy": "round_robin"}


def rollout_of(**fields: Any) -> Rollout:
    """A rollout whose goodput nobody waits for, unless a field says it."""
    row = convert_row("test", {**ROW, "needs": ["errors"], **fields}, RolloutRow)
    return Rollout(row, parse_slo(row.slo) if row.slo else None)


def with_budget(clock: VirtualClock, **fields: Any) -> Rollout:
    """One whose budget is a miss in a hundred."""
    wanted = {**ROW, "steps": [50], "requests": 30, "slo": "ttft=1s", "target": 0.99, **fields}
    row = convert_row("test", wanted, RolloutRow)
    return Rollout(row, parse_slo(row.slo), clock=clock)


def minutes_of(rollout: Rollout, clock: VirtualClock, count: int, missed: float) -> None:
    """So many minutes with ten requests each, of which both arms miss this share."""
    for _ in range(count):
        for number in range(10):
            sample = ArmSample(error=False, missed=number // 2 < 5 * missed)
            rollout.add(number % 2 == 1, sample)
        clock.advance(60.0)
    rollout.check_integrity()


@pytest.mark.parametrize(("missed", "minutes"), [(0.2, 30), (1.0, 30)])
def test_no_step_ends_while_the_error_budget_burns(missed: float, minutes: int) -> None:
    """Both arms miss alike, so no guard speaks; it goes on once the last half hour is better."""
    clock = VirtualClock()
    rollout = with_budget(clock)
    minutes_of(rollout, clock, minutes, missed)
    told = rollout.snapshot()
    assert rollout.state == "canary" and told["waits_for"] == ["budget"]
    assert told["burns"].startswith(f"{missed:.1%} in 1h and {missed:.1%} in 5m missed")
    minutes_of(rollout, clock, 4, 0.0)
    assert rollout.state == "canary"
    minutes_of(rollout, clock, 30, 0.0)
    assert rollout.state == "promoted" and rollout.snapshot()["burns"] == ""


def test_a_budget_burns_slowly_over_hours() -> None:
    """A tenth is no 14.4 times one in a hundred, but beyond six times it."""
    clock = VirtualClock()
    rollout = with_budget(clock, requests=10_000)
    minutes_of(rollout, clock, 90, 0.2)
    minutes_of(rollout, clock, 20, 0.0)
    assert "in 6h and " in rollout.snapshot()["burns"]
    minutes_of(rollout, clock, 30, 0.0)
    assert rollout.snapshot()["burns"] == ""


def test_a_budget_goes_on_over_a_restart_and_none_holds_nothing() -> None:
    clock = VirtualClock()
    rollout = with_budget(clock)
    minutes_of(rollout, clock, 30, 0.2)
    again = with_budget(clock)
    again.restore(rollout.state, rollout.step, rollout.reason, rollout.encode_state())
    assert again.snapshot()["burns"] == rollout.snapshot()["burns"] != ""
    without = with_budget(clock, target=0)
    minutes_of(without, clock, 30, 0.2)
    assert without.state == "promoted"


@pytest.mark.parametrize("fields", [{"target": 0.99}, {"target": 1, "slo": "ttft=1s"}])
def test_a_target_is_of_objectives(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"target must be 0\.5 to below 1"):
        convert_row("test", {**ROW, **fields}, RolloutRow)


def simulated(rollout: Rollout, control: float, canary: float, seed: int, most: int) -> int:
    """Requests of the canary until the rollout ends or `most`; shares of errors in each arm."""
    dice, count, number = random.Random(seed), 0, 0
    while rollout.state == "canary" and count < most:
        number += 1
        is_canary = rollout.is_canary(f"{seed} {number}")
        count += is_canary
        rollout.add(is_canary, ArmSample(error=dice.random() < (canary if is_canary else control)))
    rollout.check_integrity()
    return count


def test_a_canary_with_errors_is_back_within_thirty_requests() -> None:
    """One request in five fails: of 300 runs nine in ten end within 30 requests, all within 60."""
    counts = []
    for seed in range(300):
        rollout = rollout_of(steps=[5, 25, 50])
        counts.append(simulated(rollout, 0.0, 0.2, seed, 10_000))
        assert rollout.state == "rolled back" and rollout.reason.startswith("errors: ")
        assert rollout.step == 0 and rollout.share == 0.0
    assert sum(count <= 30 for count in counts) >= 270
    assert max(counts) <= 60


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.05])
def test_a_version_that_is_no_worse_is_promoted(rate: float) -> None:
    num_back = 0
    for seed in range(100):
        rollout = rollout_of(steps=[5, 25, 50])
        simulated(rollout, rate, rate, seed, 2000)
        num_back += rollout.state == "rolled back"
        assert rollout.state != "canary"
    assert num_back <= 1


def test_bad_luck_in_the_first_requests_is_made_up_for() -> None:
    """Both arms fail one in a hundred; by chance the evidence was 1.8 when all plans were over."""
    rollout = rollout_of()
    count = simulated(rollout, 0.01, 0.01, 155, 5000)
    assert rollout.state == "promoted" and count < 500
    assert rollout.evidence["errors"].value < 0.1


@pytest.mark.hardening
def test_a_control_with_a_few_errors_hides_no_bad_canary() -> None:
    """One in a hundred beside one in five: nine of ten are back within 30 requests."""
    counts = []
    for seed in range(300):
        rollout = rollout_of()
        counts.append(simulated(rollout, 0.01, 0.2, seed, 10_000))
        assert rollout.state == "rolled back"
    assert sum(count <= 30 for count in counts) >= 270


@pytest.mark.hardening
def test_a_bad_canary_is_not_promoted_beside_many_errors() -> None:
    for seed in range(300):
        rollout = rollout_of()
        simulated(rollout, 0.05, 0.2, seed, 10_000)
        assert rollout.state == "rolled back"


@pytest.mark.hardening
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.05])
def test_false_rollbacks_are_rare_with_all_steps(rate: float) -> None:
    states = []
    for seed in range(300):
        rollout = rollout_of()
        simulated(rollout, rate, rate, seed, 5000)
        states.append(rollout.state)
    assert states.count("rolled back") <= 3 and "canary" not in states


def test_an_outage_under_both_arms_speaks_against_neither() -> None:
    for seed in range(20):
        dice, rollout = random.Random(seed), rollout_of(steps=[25], requests=400)
        for number in range(1500):
            bad = dice.random() < (0.9 if 300 <= number < 600 else 0.0)
            rollout.add(rollout.is_canary(f"{seed} {number}"), ArmSample(error=bad))
        assert rollout.state != "rolled back"


@pytest.mark.parametrize(
    ("guard", "good", "bad", "most"),
    [
        ("goodput", ArmSample(token_s=0.01), ArmSample(token_s=0.02), 100),
        ("validity", ArmSample(invalid=False), ArmSample(invalid=True), 30),
        ("quality", ArmSample(wrong=False), ArmSample(wrong=True), 30),
        ("cost", ArmSample(dollars=0.01), ArmSample(dollars=0.02), 100),
    ],
)
def test_each_guard_rolls_back(guard: str, good: ArmSample, bad: ArmSample, most: int) -> None:
    rollout, count = rollout_of(steps=[5, 50]), 0
    for number in range(10_000):
        canary = rollout.is_canary(str(number))
        count += canary
        rollout.add(canary, bad if canary else good)
        if rollout.state == "rolled back":
            break
    assert rollout.reason.startswith(f"{guard}: ") and count <= most


def test_missing_data_stops_the_clock() -> None:
    """A step ends when both arms have told enough of all that it needs, and not before."""
    rollout = rollout_of(steps=[50], needs=["errors", "quality"], requests=20)
    for number in range(500):
        rollout.add(number % 2 == 0, ArmSample(error=False))
    assert rollout.state == "canary" and rollout.snapshot()["waits_for"] == ["quality"]
    for _ in range(500):
        rollout.add(True, ArmSample(wrong=False))
    assert rollout.state == "canary", "the control has told nothing"
    for _ in range(20):
        rollout.add(False, ArmSample(wrong=False))
    assert rollout.state == "promoted" and rollout.share == 1.0


def test_who_is_in_the_canary_stays_in_it() -> None:
    rollout = rollout_of(steps=[5, 50])
    before = {name for name in map(str, range(1000)) if rollout.is_canary(name)}
    rollout.step = 1
    after = {name for name in map(str, range(1000)) if rollout.is_canary(name)}
    assert before < after and 20 < len(before) < 90 and 400 < len(after) < 600


def test_evidence_is_fair_on_average() -> None:
    """Its mean over equal arms is at most 1: what Ville's bound rests on."""
    total, dice = 0.0, random.Random(5)
    for _ in range(2000):
        evidence = CanaryEvidence()
        for number in range(60):
            evidence.add(number % 3 == 0, dice.random() < 0.1)
        total += evidence.value
        evidence.check_integrity()
    assert total / 2000 < 1.1


def test_a_plan_has_its_price_where_its_test_has() -> None:
    """Six bad ones of thirty, rate 0.05: the bets multiply to the chance of that, turned over."""
    chances = tail_probabilities(30, 0.05)
    assert chances[0] == pytest.approx(1.0) and chances[6] == pytest.approx(0.003282, rel=1e-3)
    assert tail_probabilities(2, 0.5) == [1.0, 0.75, 0.25]
    value, price = 1.0, chances[6]
    for number in range(6):
        bet = plan_rate(0.05, 30 - number, price * value)
        value *= bet / 0.05
    assert value == pytest.approx(1 / price)
    assert plan_rate(0.05, 30 - 6, price * value) == 0.05, "it is there, and bets no more"
    assert plan_rate(0.05, 0, price) == plan_rate(0.05, 2, 1e-6) == 0.05, "it is too late"


@pytest.mark.parametrize(
    ("kind", "text", "invalid"),
    [
        (None, "hello", None),
        ("json_object", "{}", False),
        ("json_object", "[1]", True),
        ("json_schema", '{"a": 1}', False),
        ("json_schema", '{"a": "b"}', True),
        ("json_schema", '{"a": ', True),
    ],
)
def test_an_answer_has_the_form_that_was_asked_for(
    kind: str | None, text: str, invalid: bool | None
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": kind, "json_schema": {"schema": schema}} if kind else None
    assert is_invalid({"response_format": form}, text) is invalid


async def asked(live: Gateway, count: int, **fields: Any) -> list[str]:
    """Who answered each of so many chats; each is complete."""
    names = []
    for answer in await asyncio.gather(*(live.chat(**fields) for _ in range(count))):
        assert answer.is_complete
        names.append(answer.headers["x-headway-upstream"])
    return names


async def test_clients_notice_nothing_of_a_bad_canary(tmp_path: Path) -> None:
    bad = Stub("b", fault=lambda number: "status503")
    stubs, row = (Stub("a"), bad), {**ROW, "steps": [50], "requests": 200}
    async with world(*stubs, folder=tmp_path, models=(TURNS,), rollouts=[row]) as live:
        rollout = live.state.rollouts["tiny"]
        while rollout.state == "canary":
            await asked(live, 5)
        num_asked = len(bad.asked)
        assert rollout.state == "rolled back" and num_asked <= 40
        assert set(await asked(live, 20)) == {"a"} and len(bad.asked) == num_asked
        stats = (await (await live.http.get("/stats")).json())["rollouts"][0]
        assert stats["state"] == "rolled back" and stats["guards"]["errors"]["canary"][0] > 1
        text = await (await live.http.get("/metrics")).text()
        assert 'headway_gateway:rollout_share{rollout="r"} 0.0' in text
    for more, state in (({}, "rolled back"), ({"force": True}, "canary")):
        again = {**row, **more}
        async with world(*stubs, folder=tmp_path, models=(TURNS,), rollouts=[again]) as live:
            assert live.state.rollouts["tiny"].state == state


async def test_a_good_canary_gets_all_requests() -> None:
    row = {**ROW, "steps": [30, 60], "requests": 20, "slo": "ttft=600s"}
    async with world(Stub("a"), Stub("b"), models=(TURNS,), rollouts=[row]) as live:
        first = await asked(live, 20)
        assert "a" in first
        while live.state.rollouts["tiny"].state == "canary":
            await asked(live, 5)
        assert live.state.rollouts["tiny"].state == "promoted"
        assert set(await asked(live, 10)) == {"b"}
        assert len(set(await asked(live, 5, user="u"))) == 1


async def copied(live: Gateway) -> None:
    """Chats until the trial by copies is over; all are answered by the control."""
    rollout = live.state.rollouts["tiny"]
    while rollout.state == "shadow":
        assert set(await asked(live, 1)) == {"a"}
        await asyncio.gather(*live.state.copies)


async def test_copies_come_before_the_first_client(tmp_path: Path) -> None:
    """A canary that fails copies answers nobody; one that does not begins with its steps."""
    row = {**ROW, "steps": [50], "requests": 10, "shadow": 100, "slo": "ttft=600s"}
    for fault, state in (("status503", "rolled back"), ("", "canary")):
        canary = Stub("b", fault=lambda number, fault=fault: fault)  # type: ignore[misc]
        folder = tmp_path / state
        stubs = (Stub("a"), canary)
        async with world(*stubs, folder=folder, models=(TURNS,), rollouts=[row]) as live:
            rollout = live.state.rollouts["tiny"]
            await copied(live)
            assert (rollout.state, rollout.step) == (state, 0)
            assert len(canary.asked) > 0 and not any(body.get("stream") for body in canary.asked)
            told = live.state.metrics.of("attempts", upstream="b")
            assert told == len(canary.asked)


async def test_outcomes_of_tasks_roll_back() -> None:
    row = {**ROW, "steps": [50], "requests": 500}
    async with world(Stub("a"), Stub("b"), models=(TURNS,), rollouts=[row]) as live:
        rollout = live.state.rollouts["tiny"]
        for number in range(200):
            task = f"t{number}"
            answer = await live.chat(metadata={"task_id": task})
            success = answer.headers["x-headway-upstream"] == "a"
            body = {"task_id": task, "success": success}
            async with live.http.post("/v1/outcomes", json=body) as told:
                assert told.status == 200
            if rollout.state != "canary":
                break
        assert rollout.reason.startswith("quality: ")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("[{name: r, model: chat, canary: [c]}]", "no upstream of chat"),
        ("[{name: r, model: chut, canary: [b]}]", "model names 'chut'"),
        ("[{name: r, model: chat, canary: [a, b]}]", "all upstreams of chat are the canary"),
        ("[{name: r, model: chat, canary: [b], steps: [5, 1]}]", "percents that rise"),
        ("[{name: r, model: chat, canary: [b], slo: fast=1}]", "fast=1"),
        ("[{name: r, model: chat, canary: [b], need: [x]}]", "Did you mean needs"),
        (
            "[{name: r, model: chat, canary: [b]}, {name: s, model: chat, canary: [a]}]",
            "'chat' is there twice",
        ),
    ],
)
def test_rollouts_that_do_not_fit_are_refused(tmp_path: Path, rows: str, message: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "upstreams: [{name: a, url: 'http://a/v1'}, {name: b, url: 'http://b/v1'}]\n"
        f"models: [{{name: chat}}]\nrollouts: {rows}\n"
    )
    with pytest.raises(UsageError) as raised:
        read_config(file)
    assert message in f"{raised.value.cause} {raised.value.fix}"
