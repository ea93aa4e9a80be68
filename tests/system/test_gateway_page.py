"""The gateway's page in a real browser: pools, routes with evidence, rollouts, drift, spend."""

import os
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from browser import OpenPage
from page_cases import PHONE, browser, keyed, visit

from gateway_world import Stub, world
from headway.gateway.cascade.evidence import EvidenceFile, TaskEvidence
from headway.gateway.config import BudgetRow
from headway.gateway.drift.compare import DriftFinding
from headway.gateway.page import FILES, PATHS

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIXTURES = (browser, visit)
CASCADE = {"cheap": "small", "evidence": "e.json", "checks": ["margin"]}
MODELS = (
    {"name": "tiny", "upstreams": ["b", "c"], "cascade": CASCADE, "fallbacks": ["small"]},
    {"name": "small", "upstreams": ["a"]},
)
ROLLOUT = {"name": "int8", "model": "tiny", "canary": ["c"], "steps": [50], "requests": 500}
SORT = TaskEvidence(
    **{"task": "sort", "asked": 200, "cheap_right": 190, "dear_right": 199, "lost": 1},
    **{"check": "margin", "least": 2.0, "accepted": 150, "loss_low": 0.001, "loss_high": 0.028},
    **{"cheap_cost": 0.1, "dear_cost": 1.0, "cost": 0.35, "use": True},
)
COUNT = TaskEvidence(
    task="count", asked=200, cheap_right=9, dear_right=199, why="it loses too many"
)


def known(made_at: float = 4e9) -> dict[str, Any]:
    evidence = EvidenceFile(
        model="tiny",
        cheap="small",
        made_at=made_at,
        tolerance=0.05,
        alpha=0.05,
        tasks=[SORT, COUNT],
    )
    return {"models": MODELS, "rollouts": [ROLLOUT], "evidence": {"tiny": evidence}}


async def test_files_are_public_and_nothing_else_is() -> None:
    options = {"api_key": ["sesame"]}
    async with world(Stub("a"), options=options) as live, aiohttp.ClientSession(live.url) as http:
        for path in PATHS:
            async with http.get(path) as answer:
                assert answer.status == 200 and await answer.read(), path
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy
        for path in ("/stats", "/metrics", "/v1/models", "/page", "/page/main.js"):
            async with http.get(path) as answer:
                assert answer.status == 401, path


async def test_the_files_hold_nothing_inline_and_nothing_from_elsewhere() -> None:
    html = next(file for file in FILES if file.name == "index.html").read_text()
    assert not re.search(r"<style|<script(?![^>]*src=)|\son\w+=|\sstyle=|javascript:", html)
    for file in FILES:
        content = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z]", content.replace("// ", "")), file.name
        if file.suffix == ".js":
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|eval", content
            )


def row_of(table: str, name: str) -> str:
    return f'#{table} tbody tr:has(td:first-child:text-is("{name}"))'


async def cells(one: Any, table: str, name: str) -> list[str]:
    """The texts of one row's cells."""
    found: list[str] = await one.page.locator(f"{row_of(table, name)} td").all_inner_texts()
    return found


async def test_everything_that_stats_tells_is_drawn(tmp_path: Path, visit: OpenPage) -> None:
    """Requests of both arms and of a cascade, one task judged, one alarm: all of it is there."""
    bad = Stub("c", fault=lambda number: "status429")
    stubs = (Stub("a", gap=5.0), Stub("b"), bad)
    budgets = {"*": BudgetRow(dollars=5.0)}
    async with world(*stubs, folder=tmp_path, budgets=budgets, **known()) as live:
        one = await visit(live.url)
        await one.wait_text("#status-text", "^3 of 3 upstreams$")
        assert (await live.chat(model="none")).status == 404
        await one.wait_text("#refusals", "model_not_found")
        for number in range(4):
            fields = {"metadata": {"task_id": f"t{number}", "task": "sort"}}
            assert (await live.chat(**fields)).headers["x-headway-upstream"] == "a"
        while live.state.rollouts["tiny"].state == "canary":
            await live.chat()
        body = {"task_id": "t1", "success": True}
        async with live.http.post("/v1/outcomes", json=body) as told:
            assert told.status == 200
        live.state.drift.findings["tiny", "b", "c"] = DriftFinding(
            **{"first": "b", "second": "c", "probes": 200, "changed": 31, "changed_control": 0},
            **{"p": 1e-9, "kl": 0.0067, "alarm": True, "suspect": "quantization: 0.0067 nats"},
        )
        await one.wait_text("#drift", "tiny: c beside b.*quantization: 0.0067 nats.*31")
        assert (await cells(one, "rollouts", "int8, version 1"))[3:5] == ["rolled back", "0%"]
        errors = await cells(one, "guards", "int8: errors")
        assert float(errors[3].replace(",", "")) >= float(errors[4])
        sort = await cells(one, "cascades", "tiny: sort")
        assert sort[1:4] == ["cheap first: small", "margin ≥ 2", "200"]
        assert sort[4:8] == ["95%", "100%", "0.5% (0.1% … 3%)", "35%"] and sort[8] == "4"
        assert (await cells(one, "cascades", "tiny: count"))[1] == "dear: it loses too many"
        assert (await cells(one, "routes", "tiny"))[3:] == ["small", "small"]
        budget = await cells(one, "budgets", "key anonymous")
        assert "5" in budget[4] and budget[5] == "day"
        assert (await cells(one, "upstreams", "a"))[1] == "healthy"
        assert (await cells(one, "upstreams", "a"))[4:6] == ["4", "0%"]
        recent = live.state.upstreams["c"].recent()
        failing = await cells(one, "upstreams", "c")
        assert int(failing[4]) == recent["attempts"] > 0 and failing[5] == "100%"
        total = await one.text('[data-figure="Cost per success"]')
        assert total.startswith("$0.0000"), total
        assert (await cells(one, "spend", "task sort"))[3:5] == ["1", "0"]
        assert not await one.is_wider_than_the_screen()
        if folder := os.environ.get("HEADWAY_SCREENSHOTS"):  # make screenshots
            await one.page.screenshot(path=Path(folder) / "page-gateway.png")


async def test_void_evidence_and_a_lost_upstream_are_said(visit: OpenPage) -> None:
    stubs = (Stub("a"), Stub("b"), Stub("c"))
    async with world(*stubs, **known(made_at=1e9)) as live:
        one = await visit(live.url, viewport=PHONE)
        await one.wait_text("#voids", "tiny: no evidence holds.*days old")
        assert (await cells(one, "cascades", "tiny: sort"))[1] == "void"
        await one.wait_js("document.getElementById('drift-card').hidden")
        await stubs[2].stop()
        await one.wait_text("#upstreams", "down")
        await one.wait_text("#status-text", "^2 of 3 upstreams$")
        assert not await one.is_wider_than_the_screen()


async def test_a_key_is_asked_for_and_kept(visit: OpenPage) -> None:
    async with world(Stub("a"), options={"api_key": ["sesame"]}) as live:
        one = await visit(live.url, refusals=True)
        await one.wait_text("#status-text", "^locked$")
        await one.page.fill("#key-input", "wrong")
        await one.page.press("#key-input", "Enter")
        await one.wait_js("document.getElementById('key-dialog').open")
        await one.page.fill("#key-input", "sesame")
        await one.page.press("#key-input", "Enter")
        await one.wait_text("#status-text", "^1 of 1 upstreams$")
        again = await visit(live.url, prepare=keyed)
        await again.wait_text("#status-text", "^1 of 1 upstreams$")
        await again.page.click("#theme")
        await again.wait_js("document.documentElement.dataset.theme === 'light'")


async def test_a_gateway_that_has_gone_is_said(visit: OpenPage) -> None:
    async with world(Stub("a")) as live:
        one = await visit(live.url, refusals=True)
        await one.wait_text("#status-text", "^1 of 1 upstreams$")
    await one.wait_text("#banner-text", "no connection")
    await one.wait_js("document.getElementById('figures').classList.contains('stale')")
