"""What requests hold before they are forwarded, and that no work is for nothing."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_runs import begin, over, written
from gateway_world import Answer, Gateway, Stub, world
from headway.batches import open_runner
from headway.edge.key_file import digest
from headway.gateway.app import make_app
from headway.gateway.config import BudgetRow

CENT = {"*": BudgetRow(dollars=0.01, per="day")}
"""5,000 tokens of answers at the price of a stub, 2 dollars a million."""
MANY = ["a prompt"] * 100
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
DEAR: dict[str, tuple[str, dict[str, Any]]] = {
    "n": ("chat/completions", {**CHAT, "n": 128, "max_tokens": 600}),
    "n alone": ("chat/completions", {**CHAT, "n": 2}),
    "the larger of two lengths": (
        *("chat/completions", {**CHAT, "max_completion_tokens": 1, "max_tokens": 6000}),
    ),
    "best_of": ("completions", {"prompt": "hi", "best_of": 100, "max_tokens": 60}),
    "prompts": ("completions", {"prompt": MANY, "max_tokens": 60}),
    "ids": ("completions", {"prompt": [[1, 2]] * 100, "max_tokens": 60}),
    "one prompt of ids": ("completions", {"prompt": [1] * 20_000, "max_tokens": 1}),
    "responses": ("responses", {"input": "hi", "max_output_tokens": 6000}),
    "messages": ("messages", {**CHAT, "max_tokens": 6000}),
    "embeddings": ("embeddings", {"input": [[1] * 200] * 100}),
}
CHEAP: dict[str, tuple[str, dict[str, Any]]] = {
    "n": ("chat/completions", {**CHAT, "n": 2, "max_tokens": 600}),
    "no length": ("chat/completions", CHAT),
    "prompts": ("completions", {"prompt": MANY, "max_tokens": 6}),
    "responses": ("responses", {"input": "hi", "max_output_tokens": 600}),
    "messages": ("messages", {**CHAT, "max_tokens": 600}),
    "embeddings": ("embeddings", {"input": MANY}),
}


async def post(live: Gateway, path: str, body: dict[str, Any], key: str = "") -> Answer:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with live.http.post(f"/v1/{path}", json={"model": "tiny", **body}, headers=headers) as a:
        return Answer(a.status, await a.read(), dict(a.headers))


def rows(folder: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(folder / "gateway" / "ledger.db")) as connection:
        return connection.execute(query).fetchall()


def keys_of(folder: Path, limits: str) -> dict[str, str]:
    keys = folder / "keys.yaml"
    sha = digest("key").hex()
    keys.write_text(f"keys: [{{name: alice, sha256: '{sha}', limits: {limits}}}]")
    return {"key_file": str(keys)}


@pytest.mark.parametrize("name", DEAR)
async def test_what_a_budget_does_not_hold_is_not_forwarded(name: str) -> None:
    path, body = DEAR[name]
    stub = Stub("a", context=8192)
    async with world(stub, budgets=CENT) as live:
        refused = await post(live, path, body)
    assert (refused.status, stub.asked) == (400, []), refused.data
    assert b"0.01" in refused.data and b"may cost" in refused.data


@pytest.mark.parametrize("name", CHEAP)
async def test_what_a_budget_holds_is_settled_by_what_it_took(name: str) -> None:
    path, body = CHEAP[name]
    stub = Stub("a")
    async with world(stub, budgets=CENT) as live:
        for _ in range(3):
            answer = await post(live, path, body)
            assert answer.status == 200, answer.data
        purse = live.state.key_budgets.of("anonymous")
        assert purse is not None and 0 < 0.01 - purse.available < 0.01
        usage = answer.json["usage"]
        prompt = usage.get("prompt_tokens") or usage["input_tokens"]
        output = usage.get("completion_tokens") or usage.get("output_tokens") or 0
        assert 0.01 - purse.available == pytest.approx(3 * (prompt + 2 * output) / 1e6, rel=0.3)


async def test_a_stated_length_is_held_where_no_context_is_known() -> None:
    """Hosted providers state none: a length beyond the usual one would be spent, and not held."""
    stub, dollars = Stub("a", context=0), BudgetRow(dollars=0.1)
    async with world(stub, budgets={"*": dollars}) as live:
        refused = await post(live, "chat/completions", {**CHAT, "max_tokens": 100_000})
        assert (refused.status, stub.asked) == (400, []), refused.data
        assert (await post(live, "chat/completions", {**CHAT, "max_tokens": 9})).status == 200


async def test_requests_at_once_hold_from_one_balance() -> None:
    """Each may take 0.0048 of 0.01 dollars: two of ten are served, and two more when they ended."""
    stub = Stub("a", fault=lambda number: "late")
    body = {**CHAT, "n": 4, "max_tokens": 600}
    async with world(stub, budgets=CENT) as live:
        stub.told = {"completion_tokens": 8}
        for number in (1, 2):
            answers = await asyncio.gather(
                *(post(live, "chat/completions", body) for _ in range(10))
            )
            assert sorted(each.status for each in answers) == [200] * 2 + [429] * 8
            assert len(stub.asked) == 2 * number
        refused = next(each for each in answers if each.status == 429)
        assert refused.json["error"]["code"] == "insufficient_quota"


async def test_a_limit_of_tokens_holds_all_answers(tmp_path: Path) -> None:
    stub = Stub("a", context=8192)
    options = keys_of(tmp_path, "{tokens_per_minute: 5000}")
    async with world(stub, options=options) as live:
        for name in ("n", "prompts", "one prompt of ids", "responses", "messages"):
            refused = await post(live, *DEAR[name], key="key")
            code = refused.json["error"].get("code", "tokens_per_minute_exceeded")
            assert (refused.status, code) == (400, "tokens_per_minute_exceeded"), name
        assert not stub.asked
        answer = await post(live, "chat/completions", {**CHAT, "n": 4}, key="key")
        assert answer.status == 200
    each = stub.asked[0]["max_completion_tokens"]
    assert 1000 < each < 1250, "no length was given: four answers have the minute's tokens together"


async def test_the_dearest_of_the_upstreams_that_may_answer_is_held() -> None:
    models = (
        {"name": "tiny", "upstreams": ["a"], "fallbacks": ["big"]},
        {"name": "big", "upstreams": ["b"]},
    )
    dear = {"price": {"output": 100.0}}
    async with world(Stub("a"), Stub("b"), models=models, budgets=CENT, b=dear) as live:
        assert (await live.chat(False, max_tokens=90)).status == 200
        assert (await live.chat(False, max_tokens=110)).status == 400


@pytest.mark.parametrize("dollars", [5e-6, 1e-3])
async def test_the_lines_of_a_batch_hold_and_settle_too(dollars: float, tmp_path: Path) -> None:
    stub = Stub("a")
    budgets = {"me": BudgetRow(dollars=dollars)}
    async with world(stub, folder=tmp_path, budgets=budgets) as live:
        runner = open_runner(live.state)
        make_app(live.state, runner)
        await runner.start()
        try:
            batch = await over(runner, await begin(runner, ["1", "2"]))
            if dollars < 1e-3:
                told = msgspec.json.encode(written(runner, batch.error_file_id))
                assert told.count(b"may cost") == 2 and not stub.asked
                return
        finally:
            await runner.stop()
        purse = live.state.key_budgets.of("me")
        assert batch.request_counts.completed == 2 and purse is not None
        assert purse.available == pytest.approx(dollars - 2 * (6 + 4 * 0.5 + 3 * 2) / 1e6)


# ── work that nobody would be charged for ───────────────────────────────────────────────────


async def test_embeddings_are_charged(tmp_path: Path) -> None:
    stub = Stub("a")
    stub.told = {"prompt_tokens": 4000}
    async with world(stub, folder=tmp_path, budgets=CENT) as live:
        found = [(await post(live, "embeddings", {"input": "x" * 8000})).status for _ in range(20)]
        streamed = await post(live, "embeddings", {"input": "x", "stream": True})
        assert (streamed.status, streamed.json["error"]["param"]) == (400, "stream")
    assert found[:2] == [200, 200] and set(found[3:]) == {429}, found
    charged = rows(tmp_path, "SELECT prompt_tokens, output_tokens, estimated FROM attempts")
    assert charged == [(4000, 0, 0)] * len(stub.asked)


async def test_a_whole_answer_whose_client_leaves_is_cancelled_and_charged(tmp_path: Path) -> None:
    stub = Stub("a", fault=lambda number: "stall")
    options = keys_of(tmp_path, "{tokens_per_minute: 100}")
    async with world(stub, folder=tmp_path, budgets=CENT, options=options) as live:
        for number in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(live.chat(False, key="key"), 0.3)
            while stub.num_left <= number or live.state.upstreams["a"].speed.flights:
                await asyncio.sleep(0.01)
        await live.state.ledger.flushed()
        assert len(stub.asked) == 2
        purse, meter = live.state.key_budgets.of("alice"), live.state.keyring.callers[0].meter
        assert purse is not None and purse.available < 0.01
        assert meter.tokens is not None and meter.tokens.available < 90
    for table in ("attempts", "requests"):
        query = f"SELECT prompt_tokens > 0, output_tokens, estimated, dollars > 0 FROM {table}"
        assert rows(tmp_path, query) == [(1, 8, 1, 1)] * 2, table
    assert rows(tmp_path, "SELECT outcome FROM attempts") == [("left",)] * 2


async def test_a_response_in_the_background_is_charged_what_it_may_take() -> None:
    async with world(Stub("a"), budgets=CENT) as live:
        body = {"input": "hi", "max_output_tokens": 2000, "background": True}
        found = [(await post(live, "responses", body)).status for _ in range(4)]
        assert found == [200, 200, 429, 429]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_upstream_that_worked_without_an_answer_is_charged(
    stream: bool, tmp_path: Path
) -> None:
    """A connection that breaks behind the request, and a refusal, which cost no work."""
    stub = Stub("a", fault=lambda number: "close" if number == 1 else "status503")
    async with world(stub, folder=tmp_path) as live:
        await live.chat(stream)
    found = rows(tmp_path, "SELECT outcome, prompt_tokens > 0, dollars > 0 FROM attempts")
    assert found[:2] == [("reset", 1, 1), ("status_503", 0, 0)]
