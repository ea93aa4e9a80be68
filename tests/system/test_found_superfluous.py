"""What prompts could do without, found on a real server: documents that no answer used, examples.

Told by /stats, the doctor, the live page and a report of the load generator; and how many examples
help, by `headway eval --suite examples`.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import OpenPage
from live_server import LiveServer, headway
from page_cases import PHONE, browser, visit

from headway.advise.diagnosis import diagnose
from headway.advise.from_report import reading_from_report
from headway.advise.from_stats import reading_from_stats
from headway.bench import trial
from headway.bench.table import unused_lines
from headway.core.options import BenchOptions
from headway.telemetry.snapshot import Snapshot

FIXTURES = (browser, visit)
STORY = "Once upon a time there was a brave little frog who lived by the sea. The end."
TOOL = {"type": "function", "function": {"name": "paint_fence", "parameters": {"type": "object"}}}


def with_documents(number: int) -> dict[str, Any]:
    """A question that the first of two documents answers; a tool that nobody calls."""
    texts = [f"Here is a list: road: 2{number}, milk: 72, wind: 85, flower: 49.", STORY]
    parts: list[dict[str, Any]] = [{"type": "document", "document": {"data": t}} for t in texts]
    parts.append({"type": "text", "text": "Which number has road?"})
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 16}


def with_examples(number: int) -> dict[str, Any]:
    """Three pairs before a sum."""
    sums = [(1, 1), (2, 3), (4, 4), (number, 1)]
    messages = []
    for i, (a, b) in enumerate(sums):
        messages.append({"role": "user", "content": f"What is {a} + {b}?"})
        if i < len(sums) - 1:
            messages.append({"role": "assistant", "content": f"{a} + {b} = {a + b}."})
    return {"messages": messages, "max_tokens": 16}


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    live = LiveServer(None, "--kv-memory=64MiB", "--price-per-hour=2").wait_ready()
    for number in range(6):
        for body in (with_documents(number), with_examples(number)):
            status, answer = live.post("/v1/chat/completions", {**body, "temperature": 0})
            assert status == 200, answer
    yield live
    live.close()


def stats_of(served: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(served.get("/stats?seconds=300")[1])
    return found


def test_stats_count_documents_and_examples(served: LiveServer) -> None:
    prompts = stats_of(served)["prompts"]
    documents, examples = prompts["documents"], prompts["examples"]
    assert 1 <= documents["answers"] <= 6, "looked at for a small share of the time"
    assert (documents["requests"], prompts["seen"]) == (6, 12)
    assert documents["shown"] == 2 * documents["answers"]
    assert [place["used"] for place in documents["places"]] == [documents["answers"], 0]
    assert 0 < documents["unused_tokens"] < documents["tokens"] and documents["unused_s"] > 0
    assert (examples["chats"], examples["requests"], examples["pairs"]) == (12, 6, 3)
    assert examples["tokens"] > 20 and 0 < examples["share"] < 1


def test_the_doctor_prices_both(served: LiveServer) -> None:
    snapshot = msgspec.json.decode(served.get("/stats?seconds=300")[1], type=Snapshot)
    found = diagnose(reading_from_stats(served.url, [snapshot], seconds=300))
    for word, is_waste in (("took no word from", True), ("examples, were none needed", False)):
        [row] = [each for each in found.savings if word in each.what]
        assert row.measured == is_waste and row.seconds > 0 and row.usd_per_hour > 0, row


@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_has_a_table_of_them(served: LiveServer, visit: OpenPage) -> None:
    one = await visit(served.url)
    await one.page.get_by_role("radio", name="5 min").check()
    await one.wait_text(
        "#savings", r"Documents not used, \d+ of \d+.*of 6 answers.*by place 100%, 0%"
    )
    await one.wait_text("#savings", r"Examples, where they do not help.*6 of \d+ chats")
    rows = "[...document.querySelectorAll('#savings-rows tr')]"
    cells = f"{rows}.map((row) => [...row.cells].map((cell) => cell.textContent))"
    found: list[list[str]] = await one.page.evaluate(cells)
    for _, tokens, seconds, usd, _ in found:
        assert int(tokens) > 0 and seconds.endswith(("ms", "µs")) and usd.startswith("$"), found
    assert await one.page.evaluate("document.querySelector('#no-savings').hidden")
    await one.page.set_viewport_size(PHONE)
    assert await one.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_load_of_recorded_chats_is_told_what_it_could_do_without(
    served: LiveServer, tmp_path: Path
) -> None:
    chats = tmp_path / "chats.jsonl"
    bodies = [{**with_documents(i), "tools": [TOOL]} for i in range(10)]
    chats.write_text("\n".join(map(json.dumps, bodies)))
    options = BenchOptions(
        workload=f"prompts:{chats}", endpoint="chat", num_requests=10, concurrency=2
    )
    report = asyncio.run(trial.once(served.url, options, "0", None))
    assert report.counts.ok == 10 and report.prompts is not None
    assert [(tool.name, tool.requests) for tool in report.prompts.tools] == [("paint_fence", 10)]
    lines = " ".join(unused_lines(report.prompts))
    assert "no answer called paint_fence" in lines and "documents before" in lines
    found = diagnose(reading_from_report("r.json", report))
    assert any("took no word from" in each.what for each in found.savings)


def test_recorded_examples_are_asked_with_fewer(served: LiveServer, tmp_path: Path) -> None:
    chats, report = tmp_path / "chats.jsonl", tmp_path / "report.json"
    chats.write_text("\n".join(json.dumps({"body": with_examples(i)}) for i in range(8)))
    asked = ("eval", served.url, "--suite=examples", f"--data={chats}", f"--json={report}")
    done = headway(*asked, "--questions=4", "--concurrency=2")
    assert done.returncode == 0, done.stderr
    assert "8 of 8 chats have examples; 4 asked." in done.stdout
    columns = json.loads(report.read_text())["columns"]
    assert [each["examples"] for each in columns] == [3, 2, 1, 0]
    tokens = [sum(each["prompt_tokens"]) for each in columns]
    assert tokens == sorted(tokens, reverse=True) and all(columns[0]["same"])
    assert json.loads(report.read_text())["token_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("headway-tiny", "--data=x"), "asks a server"),
        (("http://127.0.0.1:9",), "needs recorded chats"),
        (("http://127.0.0.1:9", "--data=x", "--gate"), "takes no --gate"),
        (("http://127.0.0.1:9", "--data=nowhere"), "No such file"),
    ],
)
def test_what_it_cannot_ask_is_refused(arguments: tuple[str, ...], words: str) -> None:
    done = headway("eval", *arguments, "--suite=examples")
    assert done.returncode == 2 and words in done.stderr
