"""Streams that wait for their score: by sentence, by tokens, whole; stopped or late."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from gateway_world import Stub, text_of, world
from headway.core.errors import RequestError, UsageError
from headway.gateway.cascade.rows import HoldRow
from headway.gateway.config import read_config
from headway.gateway.dialects import DIALECTS
from headway.gateway.hold import Hold, HoldCounts
from headway.gateway.probe import ScorerClient

CHAT = DIALECTS["/v1/chat/completions"]


class Scorer:
    """A scorer of the user's: no point for what holds the word `bad`; it may be slow."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.bad = "nothing of this kind"
        self.gate = asyncio.Event()
        self.gate.set()
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        await self.gate.wait()
        return web.json_response({"score": 0.0 if self.bad in self.asked[-1]["answer"] else 1.0})

    @property
    def pieces(self) -> list[str]:
        return [each["piece"] for each in self.asked]


@pytest_asyncio.fixture
async def scorer() -> AsyncIterator[Scorer]:
    found = Scorer()
    app = web.Application()
    app.router.add_post("/score", found.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    yield found
    found.gate.set()
    await runner.cleanup()


def event(text: str) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def hold_of(scorer: Scorer, client: ScorerClient, **row: Any) -> Hold:
    counts = HoldCounts(HoldRow(scorer=scorer.url, **row))
    return Hold(counts, client, CHAT, {"messages": []}, "t")


# ── pieces ──────────────────────────────────────────────────────────────────────────────────


async def test_sentences_are_published_when_they_have_ended(scorer: Scorer) -> None:
    client = ScorerClient()
    try:
        hold = hold_of(scorer, client)
        out = [await hold.take(event(text)) for text in ("It is 3", ".5 m. ", "We", " go!\n", "x")]
        assert [bool(data) for data in out] == [False, True, False, True, False]
        assert out[1] == event("It is 3") + event(".5 m. ")
        last = await hold.rest(b"data: [DONE]\n\n")
        assert last == event("x") + b"data: [DONE]\n\n"
        assert scorer.pieces == ["It is 3.5 m. ", "We go!\n", "x"]
        assert scorer.asked[-1]["answer"] == "It is 3.5 m. We go!\nx"
        assert scorer.asked[0]["task"] == "t" and scorer.asked[0]["request"] == {"messages": []}
    finally:
        await client.close()


async def test_what_has_no_text_is_not_scored(scorer: Scorer) -> None:
    client = ScorerClient()
    try:
        hold = hold_of(scorer, client, by="tokens", size=2)
        assert await hold.take(b": ping\n\n") == b""
        assert await hold.rest(b"data: [DONE]\n\n") == b": ping\n\ndata: [DONE]\n\n"
        assert not scorer.asked
    finally:
        await client.close()


async def test_a_low_score_stops_and_a_missing_one_as_it_is_told(scorer: Scorer) -> None:
    client, scorer.bad = ScorerClient(), "secret"
    try:
        with pytest.raises(RequestError, match="its score is too low"):
            await hold_of(scorer, client, by="whole").rest(event("a secret"))
        scorer.gate.clear()
        late = {"by": "whole", "within": "10ms"}
        with pytest.raises(RequestError, match="not scored in time"):
            await hold_of(scorer, client, **late).rest(event("a"))
        hold = hold_of(scorer, client, **late, late="publish")
        assert await hold.rest(event("a")) == event("a")
    finally:
        await client.close()


def test_times_are_told_by_their_bounds() -> None:
    counts = HoldCounts(HoldRow(scorer="http://a/s"))
    assert counts.snapshot("r")["p50_s"] is None and counts.snapshot("r")["mean_s"] is None
    for seconds in (0.0005, 0.02, 0.02, 99.0):
        counts.published(seconds)
    told = counts.snapshot("r")
    assert (told["pieces"], told["p50_s"], told["p99_s"]) == (4, 0.025, None)
    assert told["mean_s"] == pytest.approx(24.76, abs=0.01)


# ── in a gateway ────────────────────────────────────────────────────────────────────────────


def held(scorer: Scorer, **row: Any) -> tuple[dict[str, Any]]:
    return ({"name": "tiny", "hold": {"scorer": scorer.url, **row}},)


@pytest.mark.parametrize(
    ("row", "pieces"),
    [
        ({"by": "whole"}, [text_of(8)]),
        ({"by": "tokens", "size": 3}, None),
        ({"by": "sentence"}, [text_of(8)]),
    ],
)
@pytest.mark.parametrize("headway", [True, False])
async def test_a_stream_is_complete_when_all_of_it_has_passed(
    scorer: Scorer, row: dict[str, Any], pieces: list[str] | None, headway: bool
) -> None:
    models = held(scorer, **row)
    async with world(Stub("a", headway=headway, token_s=0.005), models=models) as live:
        answer = await live.chat()
        assert answer.is_complete
        assert "".join(scorer.pieces) == text_of(8)
        assert scorer.pieces == pieces if pieces else len(scorer.pieces) > 1
        whole = await live.chat(stream=False)
        assert whole.text == text_of(8) and scorer.pieces[-1] == text_of(8)
        (told,) = (await (await live.http.get("/stats")).json())["holds"]
        assert told["answers"] == 2 and told["pieces"] >= 2 and told["mean_s"] > 0
        text = await (await live.http.get("/metrics")).text()
        assert 'held_total{route="tiny",outcome="answers"} 2' in text


async def test_nothing_is_published_before_its_score(scorer: Scorer) -> None:
    """The upstream has said all of it, and the client nothing, until the scorer answers."""
    scorer.gate.clear()
    stub = Stub("a")
    async with world(stub, models=held(scorer, by="whole", within="600s")) as live:
        running = asyncio.create_task(live.chat())
        while not scorer.asked:
            await asyncio.sleep(0.01)
        assert scorer.pieces == [text_of(8)] and stub.num_tokens == 8 and not running.done()
        assert live.state.metrics.ttft_sum == 0.0
        scorer.gate.set()
        assert (await running).is_complete


async def test_a_stream_that_was_begun_ends_with_an_error(scorer: Scorer) -> None:
    scorer.bad = "t5"
    models = held(scorer, by="tokens", size=2)
    stub = Stub("a", headway=True, token_s=0.01)
    async with world(stub, models=models) as live:
        answer = await live.chat()
        assert answer.status == 200 and answer.text.startswith("t0 t1 ") and "t5" not in answer.text
        assert answer.data.count(b"held_back") == 1
        assert live.state.holds["tiny"].stopped == 1
        assert live.state.upstreams["a"].breaker.state == "closed" and len(stub.asked) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_of_which_nothing_was_published_is_refused(
    scorer: Scorer, stream: bool, tmp_path: Path
) -> None:
    scorer.bad = "t5"
    async with world(Stub("a"), models=held(scorer, by="whole"), folder=tmp_path) as live:
        answer = await live.chat(stream=stream)
        assert answer.status == 422 and answer.json["error"]["code"] == "held_back"
        assert b"t0" not in answer.data
        assert live.state.tasks.totals["all", ""].dollars > 0, "it was paid for all the same"


async def test_a_scorer_that_is_down_stops_or_publishes() -> None:
    for late, status in (("stop", 422), ("publish", 200)):
        hold = {"scorer": "http://127.0.0.1:9/s", "late": late}
        async with world(Stub("a"), models=({"name": "tiny", "hold": hold},)) as live:
            assert (await live.chat()).status == status
            assert live.state.holds["tiny"].late == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{scorer: nowhere}", "is no address"),
        ("{by: sentence}", "missing required field `scorer`"),
        ("{scorer: 'http://a/s', by: word}", "Invalid enum value 'word'"),
        ("{scorer: 'http://a/s', size: 0}", "hold.size"),
        ("{scorer: 'http://a/s', within: soon}", "hold.within"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, row: str, message: str) -> None:
    file = tmp_path / "gateway.yaml"
    models = f"models: [{{name: m, hold: {row}}}]"
    file.write_text(f"upstreams: [{{name: a, url: 'http://a/v1'}}]\n{models}\n")
    with pytest.raises(UsageError) as raised:
        read_config(file)
    assert message in raised.value.cause


async def test_a_cached_answer_was_scored_for_the_same_class_of_task(scorer: Scorer) -> None:
    row = {"name": "tiny", "cache": "10m", "hold": {"scorer": scorer.url}}
    async with world(Stub("a"), models=(row,)) as live:
        for task in ("a", "b", "a"):
            assert (await live.chat(False, metadata={"task": task})).status == 200
    assert [each["task"] for each in scorer.asked] == ["a", "b"]
