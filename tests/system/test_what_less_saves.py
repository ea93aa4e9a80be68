"""What shorter prompts and answers would save of a traffic: told by /stats and the doctor."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from live_server import LiveServer

from headway.advise.diagnosis import diagnose
from headway.advise.from_stats import reading_from_stats
from headway.telemetry.snapshot import Snapshot

PARAGRAPH = (
    "The store opens at nine and closes at six. On Sundays it stays closed all day. Parcels wait "
    "for two weeks at the desk, then they go back to the sender who pays for the way. "
)
TOOL = {
    "type": "function",
    "function": {
        "name": "paint_fence",
        "description": "Paint a fence in a colour",
        "parameters": {"type": "object", "properties": {"colour": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    """A server that was asked ten times with a tool and a paragraph that stands twice, and six
    times with a schema."""
    live = LiveServer(None, "--kv-memory=64MiB", "--price-per-hour=2").wait_ready()
    for number in range(16):
        body: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
        if number < 10:
            text = f"Call {number}. {PARAGRAPH}\n{PARAGRAPH}\nHello!"
            body |= {"tools": [TOOL], "ignore_eos": True}
        else:
            text = f"Hello {number}!"
            body["structured_outputs"] = {"choice": ["yes", "no"]}
        body["messages"] = [{"role": "user", "content": text}]
        status, answer = live.post("/v1/chat/completions", body)
        assert status == 200, answer
    yield live
    live.close()


def test_stats_count_what_is_said_twice_and_never_called(served):
    stats = json.loads(served.get("/stats?seconds=300")[1])
    prompts, answers = stats["prompts"], stats["windows"][-1]["answers"]
    assert prompts["prompts"] == 16
    assert 10 * 30 < prompts["twice_tokens"] < prompts["tokens"] / 2
    assert prompts["twice_s"] > 0
    assert [(t["name"], t["requests"]) for t in prompts["tools"]] == [("paint_fence", 10)]
    assert (answers["structured"], answers["prose"], answers["unbounded"]) == (6, 10, 0)
    assert answers["prose_tokens"] == 400 and answers["tokens"] > 400


def test_the_doctor_prices_it(served):
    snapshot = msgspec.json.decode(served.get("/stats?seconds=300")[1], type=Snapshot)
    found = diagnose(reading_from_stats(served.url, [snapshot], seconds=300))
    for word in ("stands twice", "called: paint_fence", "schemas in place of prose"):
        [row] = [each for each in found.savings if word in each.what]
        assert row.measured and row.seconds > 0 and row.usd_per_hour > 0, row
    assert any("examples helped" in text for text in found.not_known)
