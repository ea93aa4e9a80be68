"""The ledger, budgets, limits and the cost of a successful task."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gateway_world import PROMPT_TOKENS, Gateway, Stub, gateway, world
from headway.core.clock import VirtualClock
from headway.core.errors import HeadwayError, RequestError
from headway.edge.key_file import digest
from headway.gateway.config import BudgetRow, UpstreamPrice
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.ledger import BEGIN, PROGRESS, Ledger
from headway.gateway.money import KeyBudget, dollars_of
from headway.gateway.speed import Speed

TURNS = ({"name": "tiny", "policy": "round_robin"},)
ONE = (6 * 1.0 + 4 * 0.5 + 8 * 2.0) / 1e6
"""Dollars of a chat of 10 prompt tokens, 4 of them cached, and 8 more."""


def rows(folder: Path, query: str) -> list[Any]:
    ledger = sqlite3.connect(folder / "gateway" / "ledger.db")
    with contextlib.closing(ledger) as connection:
        return connection.execute(query).fetchall()


async def test_the_ledger_is_what_was_relayed_to_the_token(tmp_path: Path) -> None:
    """Streams and whole answers, of which some break and go on, from two kinds of upstreams."""
    stubs = [
        Stub("a", headway=True, fault=lambda n: "reset5" if n % 4 == 0 else ""),
        Stub("b", headway=True, fault=lambda n: "lie" if n % 7 == 0 else ""),
    ]
    async with world(*stubs, folder=tmp_path, models=TURNS) as live:
        answers = await asyncio.gather(*(live.chat(n % 3 > 0, max_tokens=8) for n in range(60)))
    assert all(answer.status == 200 for answer in answers)
    sums = "SUM(prompt_tokens), SUM(output_tokens), SUM(estimated), COUNT(*)"
    assert rows(tmp_path, f"SELECT {sums} FROM requests WHERE status = 'ok'") == [
        (60 * PROMPT_TOKENS, sum(len(answer.text.split()) for answer in answers), 0, 60)
    ]
    ((dollars, attempts),) = rows(tmp_path, "SELECT SUM(dollars), SUM(attempts) FROM requests")
    ((of_attempts, count),) = rows(tmp_path, "SELECT SUM(dollars), COUNT(*) FROM attempts")
    assert dollars == pytest.approx(of_attempts) and attempts == count > 60
    # what broke was paid for as well: what it had shown, and its prompt twice
    cut = "SELECT prompt_tokens, output_tokens, estimated FROM attempts WHERE outcome = 'reset'"
    assert set(rows(tmp_path, cut)) == {(PROMPT_TOKENS, 5, 0)}


async def test_what_an_upstream_does_not_count_is_an_estimate_and_says_so(tmp_path: Path) -> None:
    async with world(Stub("a", usage=False), folder=tmp_path) as live:
        await live.chat()
        await live.chat(stream=False)
    found = rows(tmp_path, "SELECT estimated, prompt_tokens > 0, output_tokens > 0 FROM requests")
    assert found == [(1, 1, 1)] * 2


async def test_after_a_kill_what_was_open_is_told_as_cut(tmp_path: Path) -> None:
    folder = tmp_path / "gateway"
    ledger = Ledger(folder)
    await ledger.open(1000.0)
    ledger.write(BEGIN, "r1", "alice", "t", "default", "tiny", 1000.0, 7, "", "[]")
    ledger.write(PROGRESS, 5, 0.25, "r1")
    await ledger.flushed()
    ledger._connection, connection = None, ledger._connection  # as a kill leaves it
    assert connection is not None
    connection.close()
    await ledger.close()
    again = Ledger(folder)
    await again.open(2000.0)
    assert [row.dollars for row in await again.spent(0.0)] == [0.25]
    await again.close()
    found = rows(tmp_path, "SELECT status, prompt_tokens, output_tokens, estimated FROM requests")
    assert found == [("interrupted", 7, 5, 1)]


async def test_two_gateways_do_not_write_one_ledger(tmp_path: Path) -> None:
    first, second = Ledger(tmp_path), Ledger(tmp_path)
    await first.open(1.0)
    with pytest.raises(HeadwayError, match=f"Another gateway keeps its ledger in {tmp_path}"):
        await second.open(1.0)
    await first.close()
    await second.close()


async def test_rows_that_cannot_be_written_are_counted_and_hold_up_nobody(tmp_path: Path) -> None:
    async with world(Stub("a"), folder=tmp_path) as live:
        ledger = live.state.ledger
        assert ledger._connection is not None
        ledger._connection.execute("DROP TABLE requests")
        assert (await live.chat()).is_complete
        assert ledger.num_lost > 0
        text = await (await live.http.get("/metrics")).text()
        assert f"headway_gateway:ledger_lost_rows_total {ledger.num_lost}" in text


# ── budgets and limits ──────────────────────────────────────────────────────────────────────


async def test_a_budget_in_dollars_is_held_and_kept_through_a_restart(tmp_path: Path) -> None:
    stub = Stub("a")
    budgets = {"*": BudgetRow(dollars=3.5 * ONE, per="day")}
    async with world(stub, folder=tmp_path, budgets=budgets) as live:
        config = live.state.config
        for _ in range(2):
            assert (await live.chat()).status == 200
        both = await asyncio.gather(live.chat(), live.chat())
        assert sorted(answer.status for answer in both) == [200, 429]
        refused = next(answer for answer in both if answer.status == 429)
        assert refused.json["error"]["code"] == "insufficient_quota"
        await live.state.stop()
        async with gateway(config, tmp_path) as again:
            assert (await again.chat()).status == 429
            text = await (await again.http.get("/metrics")).text()
            assert 'refused_total{code="insufficient_quota"} 1.0' in text


def test_a_purse_forgets_what_is_a_period_ago() -> None:
    clock = VirtualClock()
    purse = KeyBudget(BudgetRow(dollars=1.0, per="hour"), clock, "alice")
    purse.hold(0.6)
    with pytest.raises(RequestError, match=r"\$0\.40 is left"):
        purse.hold(0.5)
    purse.settle(0.6, 0.9)
    with pytest.raises(RequestError):
        purse.hold(0.2)
    clock.advance(3700.0)
    assert purse.available == 1.0
    purse.hold(1.0)


def test_prices_are_by_the_token_or_by_the_hour() -> None:
    speed = Speed(VirtualClock())
    price = UpstreamPrice(input=1.0, cached=0.1, output=4.0)
    assert dollars_of(price, UpstreamUsage(1000, 500, 100), speed) == pytest.approx(0.00095)
    assert dollars_of(
        UpstreamPrice(input=2.0), UpstreamUsage(1000, 500, 1), speed
    ) == pytest.approx(0.002)
    seconds = 500 * speed.token_s + 100 * speed.answer_s
    hourly = dollars_of(UpstreamPrice(hour=3.6), UpstreamUsage(1000, 500, 100), speed)
    assert hourly == pytest.approx(seconds / 1000)


async def test_the_limits_of_the_key_file_hold_here(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        f"keys:\n  - name: alice\n    sha256: '{digest('a').hex()}'\n"
        "    limits: {requests_per_minute: 2}\n"
        f"  - name: bob\n    sha256: '{digest('b').hex()}'\n"
        "    limits: {tokens_per_minute: 60}\n"
    )
    stub = Stub("a", headway=True)
    async with world(stub, options={"key_file": str(keys)}) as live:
        assert [(await live.chat(key="a")).status for _ in range(3)] == [200, 200, 429]
        assert [(await live.chat(key="b")).status for _ in range(4)][-1] == 429
        assert (await live.chat()).status == 401
        used = await live.chat(key="a")
        assert used.headers["x-ratelimit-limit-requests"] == "2"
        assert {name["x-headway-user"] for name in stub.headers} == {"alice", "bob"}
        key = {"authorization": "Bearer a"}
        async with live.http.get("/stats", headers=key) as answer:
            assert answer.status == 403


# ── tasks ───────────────────────────────────────────────────────────────────────────────────


async def judge(live: Gateway, task: str, success: bool) -> int:
    body = {"task_id": task, "success": success}
    async with live.http.post("/v1/outcomes", json=body) as answer:
        return answer.status


async def test_cost_per_success_counts_attempts_and_retries(tmp_path: Path) -> None:
    async with world(Stub("a"), folder=tmp_path) as live:
        for task, count in (("good", 2), ("bad", 1), ("unjudged", 5)):
            for _ in range(count):
                await live.chat(metadata={"task_id": task, "task": "sums"})
        assert [await judge(live, "good", True), await judge(live, "bad", False)] == [200, 200]
        assert await judge(live, "nobody", True) == 404
        config = live.state.config

        async def cost(of: Gateway) -> dict[Any, Any]:
            stats = await (await of.http.get("/stats")).json()
            return {(t["dimension"], t["name"]): t for t in stats["tasks"]}

        found = await cost(live)
        for group in (("all", ""), ("key", "anonymous"), ("task", "sums"), ("route", "tiny")):
            assert found[group]["cost_per_success"] == pytest.approx(3 * ONE)
            assert found[group]["dollars"] == pytest.approx(8 * ONE)
        assert await judge(live, "bad", True) == 200  # the last word holds
        assert (await cost(live))["all", ""]["cost_per_success"] == pytest.approx(1.5 * ONE)
        await live.state.stop()
        async with gateway(config, tmp_path) as again:  # and is there after a restart
            assert (await cost(again))["task", "sums"]["cost_per_success"] == pytest.approx(
                1.5 * ONE
            )
            text = await (await again.http.get("/metrics")).text()
            assert 'tasks_total{dimension="task",name="sums",outcome="success"} 2' in text


async def test_a_retry_of_a_client_is_of_the_task_of_its_first_try() -> None:
    async with world(Stub("a")) as live:
        first = await live.chat()
        again = await live.chat(headers={"x-stainless-retry-count": "1"})
        other = await live.chat(messages=[{"role": "user", "content": "another"}])
        assert await judge(live, first.headers["X-Request-ID"], True) == 200
        assert await judge(live, again.headers["X-Request-ID"], True) == 404
        totals = live.state.tasks.totals["all", ""]
        assert totals.cost_per_success == pytest.approx(2 * ONE)
        assert await judge(live, other.headers["X-Request-ID"], False) == 200
        assert live.state.metrics.of("client_retries") == 1
