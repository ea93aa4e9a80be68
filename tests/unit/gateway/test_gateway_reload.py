"""SIGHUP: rollouts and cascades of a file that is read again, while requests run."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from gateway_world import Gateway, Stub, config_of, world
from headway.gateway.cascade.evidence import EvidenceFile, TaskEvidence

ROW: dict[str, Any] = {"name": "r", "model": "tiny", "canary": ["b"], "steps": [50]}
TURNS = {"name": "tiny", "policy": "round_robin"}


async def asked(live: Gateway, count: int) -> set[str]:
    """Who answered so many chats; each is complete."""
    answers = await asyncio.gather(*(live.chat() for _ in range(count)))
    assert all(answer.is_complete for answer in answers)
    return {answer.headers["x-headway-upstream"] for answer in answers}


async def test_a_rollout_that_stays_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its evidence is kept while its row is the same; streams that run are not touched."""
    stubs = (Stub("a"), Stub("b", token_s=0.005))
    row = {**ROW, "requests": 500}
    async with world(*stubs, folder=tmp_path, models=(TURNS,), rollouts=[row]) as live:
        await asked(live, 10)
        before = live.state.rollouts["tiny"]
        seen = before.evidence["errors"].sums
        running = asyncio.create_task(asked(live, 10))
        config = config_of(list(stubs), TURNS, rollouts=[row], a={"weight": 2.0})
        await live.state.reload(config)
        assert live.state.rollouts["tiny"] is before
        assert await running <= {"a", "b"}
        assert seen.control + seen.canary == 20


async def test_a_rollout_ends_with_its_row_and_begins_with_a_new_one(tmp_path: Path) -> None:
    """What was rolled back stays so under the same version; another version is another trial."""
    bad = Stub("b", fault=lambda number: "status429")
    stubs = (Stub("a"), bad)
    row = {**ROW, "requests": 500}
    async with world(*stubs, folder=tmp_path, models=(TURNS,), rollouts=[row]) as live:
        while live.state.rollouts["tiny"].state == "canary":
            await asked(live, 5)
        bad.fault = lambda number: ""
        await live.state.reload(config_of(list(stubs), TURNS))
        assert not live.state.rollouts and await asked(live, 10) == {"a", "b"}
        await live.state.reload(config_of(list(stubs), TURNS, rollouts=[row]))
        assert live.state.rollouts["tiny"].state == "rolled back"
        assert await asked(live, 10) == {"a"}
        again = {**row, "version": "2"}
        await live.state.reload(config_of(list(stubs), TURNS, rollouts=[again]))
        assert live.state.rollouts["tiny"].state == "canary"
        while "b" not in await asked(live, 5):
            pass


async def test_new_evidence_is_in_force_from_the_next_request_on() -> None:
    cascade = {"cheap": "small", "evidence": "e.json"}
    models = (
        {"name": "tiny", "upstreams": ["b"], "cascade": cascade},
        {"name": "small", "upstreams": ["a"]},
    )
    task = TaskEvidence(task="default", asked=99, cheap_right=99, dear_right=99, use=True)
    known = EvidenceFile(
        model="tiny", cheap="small", made_at=4e9, tolerance=0.05, alpha=0.05, tasks=[task]
    )
    stubs = (Stub("a"), Stub("b"))
    async with world(*stubs, models=models) as live:
        assert await asked(live, 3) == {"b"}
        await live.state.reload(config_of(list(stubs), *models, evidence={"tiny": known}))
        assert await asked(live, 3) == {"a"}
        none = msgspec.structs.replace(known, tasks=[])
        await live.state.reload(config_of(list(stubs), *models, evidence={"tiny": none}))
        assert await asked(live, 3) == {"b"}
