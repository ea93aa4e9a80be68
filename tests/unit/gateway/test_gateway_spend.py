"""Spending: teams with one budget, GET /spend, and a ledger of an older version."""

import json
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from gateway_world import Stub, world
from headway.cli.main import main
from headway.core.clock import SystemClock
from headway.core.errors import HeadwayError
from headway.edge.key_file import digest
from headway.gateway.config import BudgetRow, TeamRow
from headway.gateway.ledger import Ledger
from headway.gateway.money import KeyBudget, format_dollars
from headway.gateway.spend import cell

OLD_SCHEMA = """
CREATE TABLE requests (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, task TEXT NOT NULL, task_class TEXT NOT NULL,
    route TEXT NOT NULL, began_at REAL NOT NULL, ended_at REAL, status TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, prompt_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0, output_tokens INTEGER NOT NULL DEFAULT 0,
    estimated INTEGER NOT NULL DEFAULT 1, dollars REAL NOT NULL DEFAULT 0
) STRICT;
"""
"""The requests of version 0 of the ledger."""
NAMES = ("alice", "bob", "operator")


def key_file(folder: Path) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [{"name": name, "sha256": digest(name).hex()} for name in NAMES]
    rows[-1]["admin"] = True
    (folder / "keys.yaml").write_text(json.dumps({"keys": rows}))
    return {"key_file": str(folder / "keys.yaml")}


async def test_spending_is_told_by_key_team_model_tag_and_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator sees all, a key its own; names that a spreadsheet would compute are disarmed."""
    stub, teams = Stub("a"), {"research": TeamRow(keys=("alice",), dollars=1.0)}
    budgets = {"alice": BudgetRow(dollars=2.0), "*": BudgetRow(dollars=9.0)}
    more: dict[str, Any] = {"options": key_file(tmp_path), "budgets": budgets, "teams": teams}
    async with world(stub, folder=tmp_path, **more) as live:

        async def told(key: str, query: str = "") -> Any:
            headers = {"authorization": f"Bearer {key}"}
            async with live.http.get(f"/spend?{query}", headers=headers) as answer:
                text = await answer.text()
                return text if "csv" in query else (answer.status, await answer.json())

        await live.chat(False, key="alice", metadata={"tags": ["=1+1", "night"]})
        await live.chat(False, key="alice", headers={"x-headway-tags": "night"})
        await live.chat(False, key="bob")
        assert (await live.chat(False, key="bob", metadata={"tags": "x" * 65})).status == 400
        assert "tags" not in stub.asked[0]["metadata"]
        _, all_of_it = await told("operator", "by=key,team")
        found = {(row["key"], row["team"]): row["requests"] for row in all_of_it["rows"]}
        assert found == {("alice", "research"): 2, ("bob", ""): 1}
        assert all(row["dollars"] > 0 and row["output_tokens"] for row in all_of_it["rows"])
        _, own = await told("alice", "by=model,day")
        assert [row["requests"] for row in own["rows"]] == [2]
        left = {
            row["kind"]: round(row["dollars"] - row["spent"] - row["left"], 9)
            for row in own["budgets"]
        }
        assert left == {"key": 0, "team": 0}
        assert [row["code"] for row in (await told("bob"))[1]["refusals"]] == ["invalid_value"]
        table = await told("operator", "by=tag&format=csv")
        assert table.splitlines()[0].startswith("tag,requests,prompt_tokens")
        assert {line.split(",")[0] for line in table.splitlines()[1:]} == {"'=1+1", "night", ""}
        for query, param in [
            *(("by=owner", "by"), ("by=day,day", "by"), ("from=yesterday", "from"), ("x=1", "x")),
            *(("from=2026-02-01&to=2026-01-01", "from"), ("to=0001-01-01", "from")),
            ("format=xml", "format"),
        ]:
            status, refusal = await told("operator", query)
            assert (status, refusal["error"]["param"]) == (400, param)
        assert (await told("alice", "to=0001-01-09"))[0] == 200, "the calendar has no day before"
        assert (await told("alice", "key=bob"))[0] == 403
        headers = {"authorization": "Bearer operator"}
        stats = await (await live.http.get("/stats", headers=headers)).json()
        assert {row["name"] for row in stats["budgets"]} == {"alice", "bob", "research"}
        assert {"key": "bob", "code": "invalid_value", "requests": 1} in stats["refusals"]
        assert main(["gateway", "spend", "--csv", "--by=key", f"--data-dir={tmp_path}"]) == 0
        assert capsys.readouterr().out.splitlines()[1].startswith("alice,2,")
    assert main(["gateway", "spend", "--by=owner", f"--data-dir={tmp_path}"]) == 2
    assert main(["gateway", "spend", f"--data-dir={tmp_path / 'none'}"]) == 2
    assert main(["gateway", "spend", "--by=team", f"--data-dir={tmp_path}"]) == 0
    assert "research" in capsys.readouterr().out


async def test_the_keys_of_a_team_share_its_budget(tmp_path: Path) -> None:
    """What one spends the other has not; what a team refuses takes nothing from the key's own."""
    budgets = {"*": BudgetRow(dollars=9.0)}
    teams = {"research": TeamRow(keys=("alice", "bob"), dollars=0.00009)}
    options = key_file(tmp_path)
    more: dict[str, Any] = {"options": options, "budgets": budgets, "teams": teams}
    async with world(Stub("a"), folder=tmp_path, **more) as live:
        assert (await live.chat(False, key="alice")).status == 200
        while (await live.chat(False, key="alice")).status == 200:
            pass
        refused = await live.chat(False, key="bob")
        assert (refused.status, refused.json["error"]["code"]) == (429, "insufficient_quota")
        assert "The team research may spend $0.000090 per day" in refused.json["error"]["message"]
        assert (await live.chat(False, key="operator")).status == 200
        (own,) = [row for row in live.state.budget_rows("bob") if row["kind"] == "key"]
        assert (own["held"], own["spent"]) == (0, 0)
    async with world(Stub("a"), folder=tmp_path, **more) as live:
        assert (await live.chat(False, key="bob")).status == 429, "the ledger remembers"


async def test_an_old_ledger_is_copied_and_read(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    with sqlite3.connect(file) as old:
        old.executescript(OLD_SCHEMA)
        row = ("r1", "alice", "t", "default", "chat", 1e9, 1e9, "ok", 1, 10, 0, 5, 0, 0.25)
        old.execute(f"INSERT INTO requests VALUES ({','.join('?' * 14)})", row)
    old.close()
    ledger = Ledger(tmp_path)
    await ledger.open(1e9 + 60)
    try:
        (past,) = await ledger.spent(0)
        assert (past.key, past.dollars) == ("alice", 0.25)
    finally:
        await ledger.close()
    copy = tmp_path / "ledger.v0.db"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    for path, width in ((copy, 14), (file, 16)):
        connection = sqlite3.connect(path)
        assert [len(each) for each in connection.execute("SELECT * FROM requests")] == [width]
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    before = file.read_bytes()
    newer = Ledger(tmp_path)
    with pytest.raises(HeadwayError, match="of a newer Headway"):
        await newer.open(1e9)
    await newer.close()
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("dollars", "text"),
    [
        *((0.0, "$0.00"), (0.00123456, "$0.0012"), (0.996, "$1.00"), (0.5, "$0.50")),
        *((12.345, "$12.35"), (1234.5, "$1,234.50"), (0.0999, "$0.10"), (9e-7, "$0.00000090")),
    ],
)
def test_money_has_two_significant_digits_or_cents(dollars: float, text: str) -> None:
    assert format_dollars(dollars) == text


def test_a_released_reservation_leaves_the_budget_as_it_was() -> None:
    budget = KeyBudget(BudgetRow(dollars=1.0), SystemClock(), "This key")
    budget.hold(0.4)
    budget.release(0.4)
    assert budget.available == 1.0


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        *(("=1", "'=1"), ("＝1", "'＝1"), ("＠SUM(1)", "'＠SUM(1)"), ("-1", "'-1")),
        *(("a;=1;b", "a;'=1;b"), ("a;b", "a;b"), ("a=1", "a=1"), (-1.5, -1.5)),
    ],
)
def test_no_cell_is_a_formula(given: Any, shown: Any) -> None:
    """Some spreadsheets take full-width signs, and some divide cells at semicolons."""
    assert cell(given) == shown
