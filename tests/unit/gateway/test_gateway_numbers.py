"""Numbers that an upstream sends: a bad one costs that upstream an attempt, and nobody else."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway_world import Stub, text_of, world
from headway.edge.relayed import decode_load
from headway.gateway.config import BudgetRow
from headway.gateway.dialects import BAD_USAGE, DIALECTS, UpstreamUsage
from headway.gateway.events import Event
from headway.gateway.ledger import ATTEMPT, BEGIN, PROGRESS, Ledger

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
                await live.state.upstreams["a"].check_health()
            assert live.state.upstreams["a"].is_down
            async with live.http.get("/ready") as answer:
                assert (await answer.json())["models"] == {"tiny": True, "a": False}


@pytest.mark.parametrize(
    "figures",
    [
        b'{"kv": 1e999}',
        b'{"rows": -1}',
        b'{"queue_s": %s}' % (b"9" * 5000),
        b'{"token_s": "1"}',
        b'{"token_s": 3601}',
    ],
)
def test_a_load_outside_of_its_range_is_refused(figures: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_load(figures)


@pytest.mark.parametrize("seconds", [12.5, 3600.0])
async def test_a_slow_server_is_believed(seconds: float) -> None:
    """A prompt token may take a machine that swaps many seconds, up to an hour."""
    slow = LoadStub("a", headway=True)
    slow.bad, slow.looks = {"token_s": seconds}, True
    models = ({"name": "tiny", "upstreams": ["a"]},)
    async with world(slow, models=models) as live:
        await live.state.upstreams["a"].check_health()
        assert not live.state.upstreams["a"].is_down
        assert (await live.chat()).status == 200
        assert live.state.metrics.of("attempts", upstream="a", outcome="lied") == 0
        assert live.state.upstreams["a"].speed.token_s == seconds


@pytest.mark.parametrize("length", [-1, BIG, 2**60])
async def test_a_context_outside_of_its_range_is_no_look(length: int) -> None:
    bad = Stub("a", context=length)
    async with world(bad, Stub("b")) as live:
        assert not live.state.upstreams["a"].was_reached
        assert all([(await live.chat()).is_complete for _ in range(4)])


# ── usage ───────────────────────────────────────────────────────────────────────────────────

BAD_COUNTS: dict[str, dict[str, Any]] = {
    "2^63": {"completion_tokens": 2**63},
    "400 digits": {"completion_tokens": BIG},
    "5,000 digits": {"completion_tokens": msgspec.Raw(b"9" * 5000)},
    "negative": {"completion_tokens": -100_000},
    "more than asked": {"completion_tokens": 9},
    "text": {"completion_tokens": "8"},
    "fraction": {"completion_tokens": 8.5},
    "prompt": {"prompt_tokens": 2**62},
    "negative prompt": {"prompt_tokens": -1},
    "cached": {"prompt_tokens_details": {"cached_tokens": 11}},
}


@pytest.mark.parametrize("kind", BAD_COUNTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_bad_usage_is_an_estimate_and_costs_no_row(
    kind: str, stream: bool, tmp_path: Path
) -> None:
    """Both answers are whole; the good upstream's are counted as it counts them."""
    bad = Stub("a")
    bad.told = BAD_COUNTS[kind]
    turns = ({"name": "tiny", "policy": "round_robin"},)
    budgets = {"*": BudgetRow(dollars=1e-3, per="day")}
    async with world(bad, Stub("b"), models=turns, folder=tmp_path, budgets=budgets) as live:
        answers = await asyncio.gather(*(live.chat(stream) for _ in range(8)))
        assert all(each.is_complete if stream else each.text == text_of(8) for each in answers)
        assert live.state.ledger.num_lost == 0
        assert live.state.metrics.of("usage_refused", upstream="a") == 4
        purse = live.state.key_budgets.of("anonymous")
        assert purse is not None and 1e-3 - 8 * 50e-6 < purse.available < 1e-3 - 8 * 16e-6
    query = "SELECT upstream, estimated, COUNT(*), MAX(output_tokens) <= 8, MIN(dollars) > 0"
    with contextlib.closing(sqlite3.connect(tmp_path / "gateway" / "ledger.db")) as connection:
        found = connection.execute(f"{query} FROM attempts GROUP BY upstream").fetchall()
        assert found == [("a", 1, 4, 1, 1), ("b", 0, 4, 1, 1)]
        assert connection.execute("SELECT COUNT(*) FROM requests").fetchone() == (8,)


WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"choices": [], "usage": {"completion_tokens": BIG}},
    "/v1/completions": {"choices": [], "usage": {"prompt_tokens": -1}},
    "/v1/responses": {"id": "r", "status": "completed", "usage": {"output_tokens": -1}},
    "/v1/messages": {"content": [], "usage": {"cache_read_input_tokens": BIG, "input_tokens": 1}},
    "/v1/embeddings": {"data": [], "usage": {"prompt_tokens": 0.5}},
}
EVENTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"choices": [], "usage": {"completion_tokens": BIG}},
    "/v1/responses": {"type": "response.completed", "response": {"usage": {"input_tokens": -1}}},
    "/v1/messages": {"type": "message_delta", "usage": {"output_tokens": -1}},
}


@pytest.mark.parametrize("path", WHOLE)
def test_bad_usage_is_told_as_such_in_every_dialect(path: str) -> None:
    assert DIALECTS[path].read_whole(msgspec.json.encode(WHOLE[path])) == BAD_USAGE
    if path in EVENTS:
        event = Event(data=msgspec.json.encode(EVENTS[path]))
        assert DIALECTS[path].read(event, UpstreamUsage(1, 1, 1)).usage == BAD_USAGE
    if path == "/v1/messages":
        good = Event(data=b'{"type": "message_delta", "usage": {"output_tokens": 2}}')
        assert DIALECTS[path].read(good, BAD_USAGE).usage == BAD_USAGE
        assert DIALECTS[path].read(good, UpstreamUsage(1, 1, 1)).usage == UpstreamUsage(1, 1, 2)


class MarkStub(Stub):
    """A Headway server whose marks tell a prompt of a million times its size."""

    async def _write(self, request: Any, answer: Any, body: Any, fault: str) -> None:
        write = answer.write

        async def lie(data: bytes) -> None:
            await write(data.replace(b": headway 10 ", b": headway 10000000 "))

        answer.write = lie
        await super()._write(request, answer, body, fault)


async def test_marks_of_a_huge_prompt_are_not_believed(tmp_path: Path) -> None:
    stub = MarkStub("a", headway=True, fault=lambda number: "reset5" if number == 1 else "")
    async with world(stub, Stub("b", headway=True), folder=tmp_path) as live:
        answers = [await live.chat() for _ in range(4)]
    assert all(each.is_complete for each in answers)
    with contextlib.closing(sqlite3.connect(tmp_path / "gateway" / "ledger.db")) as connection:
        most = "SELECT MAX(prompt_tokens), MAX(dollars) < 1e-4 FROM attempts"
        ((prompt, cheap),) = connection.execute(most).fetchall()
    assert prompt <= 100 and cheap


async def test_a_row_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    await ledger.open(1000.0)
    for number in range(5):
        ledger.write(BEGIN, f"r{number}", "alice", "t", "default", "tiny", 1000.0, 7, "", "[]")
        tokens = 2**63 if number == 2 else 1
        ledger.write(ATTEMPT, f"r{number}", 1, "a", "ok", 1, 0, tokens, 0, 0.0, None)
    ledger.write(BEGIN, "r1", "bob", "t", "default", "tiny", 1000.0, 7, "", "[]")
    ledger.write(PROGRESS, 1, 0.0, "no such request")
    await ledger.flushed()
    assert ledger.num_lost == 3
    assert len(await ledger.spent(0.0)) == 5
    assert await ledger._select("SELECT COUNT(*) FROM attempts") == [(4,)]
    await ledger.close()
