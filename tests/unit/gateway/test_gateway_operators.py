"""Operators: a rollout ended by hand, the file read again, evidence that outlives the gateway."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from gateway_world import Gateway, Stub, config_of, world
from headway.core.errors import UsageError
from headway.gateway.config import Config, RolloutRow, convert_row
from headway.gateway.rollout import ArmSample, Rollout

ROW: dict[str, Any] = {"name": "r", "model": "tiny", "canary": ["b"], "steps": [50]}
TURNS = {"name": "tiny", "policy": "round_robin"}


async def asked(live: Gateway, count: int) -> set[str]:
    answers = await asyncio.gather(*(live.chat() for _ in range(count)))
    assert all(answer.is_complete for answer in answers)
    return {answer.headers["x-headway-upstream"] for answer in answers}


async def told(live: Gateway, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with live.http.post(path, json=body) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("action", "state", "answered"),
    [("promote", "promoted", "b"), ("take_back", "rolled back", "a")],
)
async def test_an_operator_ends_a_rollout(
    tmp_path: Path, action: str, state: str, answered: str
) -> None:
    """It holds from the next request on, and over a restart; the ledger says it was by hand."""
    stubs, row = (Stub("a"), Stub("b")), {**ROW, "requests": 500}
    async with world(*stubs, folder=tmp_path, models=(TURNS,), rollouts=[row]) as live:
        assert await asked(live, 20) == {"a", "b"}
        status, body = await told(live, "/rollouts/r", {"action": action, "reason": "a call"})
        assert (status, body["state"], body["reason"]) == (200, state, "by hand: a call")
        assert await asked(live, 10) == {answered}
    async with world(*stubs, folder=tmp_path, models=(TURNS,), rollouts=[row]) as live:
        rollout = live.state.rollouts["tiny"]
        assert (rollout.state, rollout.reason) == (state, "by hand: a call")
        assert await asked(live, 10) == {answered}


async def test_what_operators_may_not_say() -> None:
    async with world(Stub("a"), Stub("b"), models=(TURNS,), rollouts=[ROW]) as live:
        for path, body, status in (
            ("/rollouts/s", {"action": "promote"}, 404),
            ("/rollouts/r", {"action": "pause"}, 400),
            ("/rollouts/r", {}, 400),
            ("/rollouts/r", {"action": "promote", "reason": "x" * 201}, 400),
            ("/reload", {}, 409),
        ):
            assert (await told(live, path, body))[0] == status, (path, body)
    options = {"api_key": ["sesame"]}
    async with world(Stub("a"), options=options) as live:
        for path in ("/reload", "/rollouts/r"):
            assert (await told(live, path, {"action": "promote"}))[0] == 401


async def test_a_file_is_read_again_all_or_nothing() -> None:
    stubs = [Stub("a"), Stub("b")]
    async with world(*stubs, models=({"name": "tiny", "upstreams": ["a"]},)) as live:
        assert await asked(live, 4) == {"a"}
        live.state.reload_config = lambda: config_of(stubs, {"name": "tiny", "upstreams": ["b"]})
        assert await told(live, "/reload", {}) == (
            200,
            {"upstreams": ["a", "b"], "models": ["tiny"]},
        )
        assert await asked(live, 4) == {"b"}

        def broken() -> Config:
            raise UsageError("gateway.yaml: models: tiny: no.", "Mend it.")

        live.state.reload_config = broken
        status, body = await told(live, "/reload", {})
        assert status == 400 and "gateway.yaml: models: tiny: no." in body["error"]["message"]
        assert await asked(live, 4) == {"b"}


async def test_others_are_served_while_files_are_read() -> None:
    """A file of many values is read for seconds."""
    stubs = [Stub("a")]
    async with world(*stubs) as live:
        config, began, may_end = live.state.config, threading.Event(), threading.Event()

        def read_long() -> Config:
            began.set()
            assert may_end.wait(30)
            return config

        live.state.reload_config = read_long
        reloading = asyncio.create_task(told(live, "/reload", {}))
        assert await asyncio.to_thread(began.wait, 30)
        assert await asked(live, 2) == {"a"}
        may_end.set()
        assert (await reloading)[0] == 200


def test_a_rollout_has_a_hundred_steps_at_most() -> None:
    steps = [number / 1000 for number in range(1, 102)]
    with pytest.raises(UsageError, match="steps are 101; a rollout has at most 100"):
        convert_row("test", {**ROW, "steps": steps}, RolloutRow)
    convert_row("test", {**ROW, "steps": steps[:100]}, RolloutRow)


# ── evidence over a restart ─────────────────────────────────────────────────────────────────


def rollout_of(kept: list[bytes], **fields: Any) -> Rollout:
    row = convert_row("test", {**ROW, "needs": ["errors"], **fields}, RolloutRow)
    return Rollout(row, None, on_save=kept.append)


def test_evidence_goes_on_where_it_was() -> None:
    """A bad canary that is restarted again and again goes back after as many errors as any."""
    alone: list[bytes] = []
    whole, count = rollout_of(alone), 0
    while whole.state == "canary":
        whole.add(False, ArmSample(error=False))
        whole.add(True, ArmSample(error=True))
        count += 1
    kept: list[bytes] = []
    part, told = rollout_of(kept), 0
    while part.state == "canary":
        for _ in range(5):  # ten requests, then a restart: all of them were kept
            part.add(False, ArmSample(error=False))
            part.add(True, ArmSample(error=True))
        told += 5
        again = rollout_of(kept)
        again.restore(part.state, part.step, part.reason, kept[-1])
        assert again.evidence == part.evidence
        again.check_integrity()
        part = again
    assert count <= told <= count + 5


def test_a_step_goes_on_and_a_new_one_begins_anew() -> None:
    kept: list[bytes] = []
    rollout = rollout_of(kept, steps=[5, 50], requests=10)
    for _ in range(5):
        rollout.add(False, ArmSample(error=False))
        rollout.add(True, ArmSample(error=False))
    again = rollout_of([], steps=[5, 50], requests=10)
    again.restore("canary", 0, "", kept[-1])
    for _ in range(5):
        again.add(False, ArmSample(error=False))
        again.add(True, ArmSample(error=False))
    assert again.step == 1, "five and five are ten"
    later = rollout_of([], steps=[5, 50], requests=10)
    later.restore("canary", 1, "", kept[-1])
    assert later.snapshot()["waits_for"] == ["errors"] and later.evidence == rollout.evidence


async def test_a_killed_gateway_has_lost_few_requests(tmp_path: Path) -> None:
    stubs, row = (Stub("a"), Stub("b")), {**ROW, "requests": 500}
    async with world(*stubs, folder=tmp_path, models=(TURNS,), rollouts=[row]) as live:
        await asked(live, 33)
    async with world(*stubs, folder=tmp_path, models=(TURNS,), rollouts=[row]) as live:
        sums = live.state.rollouts["tiny"].evidence["errors"].sums
        assert sums.control + sums.canary == 30
        await asked(live, 10)
        assert sums.control + sums.canary == 40
