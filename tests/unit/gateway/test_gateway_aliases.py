"""Aliases, retries and the cache of a model row; prices with a unit; names that no key has."""

from pathlib import Path
from typing import Any

import pytest

from gateway_world import Stub, config_of, world
from headway.cli.main import main
from headway.core.clock import SystemClock
from headway.core.errors import UsageError
from headway.edge.key_file import digest
from headway.gateway.config import UpstreamPrice
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.money import dollars_of, format_price
from headway.gateway.response_cache import MAX_ANSWER, MAX_BYTES, ResponseCache
from headway.gateway.speed import Speed


async def test_an_alias_is_its_model_under_another_name(tmp_path: Path) -> None:
    """Upstreams, accounts and the rights of keys have the row's name, answers the alias."""
    stub, models = Stub("a"), ({"name": "tiny", "aliases": ["gpt-4o", "claude"]}, {"name": "big"})
    async with world(stub, folder=tmp_path, models=models) as live:
        for stream in (True, False):
            answer = await live.chat(stream, model="gpt-4o")
            assert answer.status == 200 and b'"gpt-4o"' in answer.data
        assert {body["model"] for body in stub.asked} == {"tiny"}
        cards = await (await live.http.get("/v1/models")).json()
        assert [card["id"] for card in cards["data"]] == ["tiny", "big", "gpt-4o", "claude"]
        spend = await (await live.http.get("/spend?by=model")).json()
        assert [(row["model"], row["requests"]) for row in spend["rows"]] == [("tiny", 2)]
        assert (await live.chat(model="gpt-5")).status == 404
    async with world(Stub("a"), models=models[:1]) as live:
        body = {"messages": [{"role": "user", "content": "x"}]}
        async with live.http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, "an alias does not make a second model"


@pytest.mark.parametrize(("retries", "asked"), [(0, 1), (1, 2), (2, 3), (None, 3)])
async def test_retries_bound_the_attempts_of_a_model(retries: int | None, asked: int) -> None:
    stubs = [Stub(name, fault=lambda number: "close") for name in ("a", "b", "c")]
    row = {"name": "tiny", "policy": "round_robin", "retries": retries}
    async with world(*stubs, models=(row,)) as live:
        assert (await live.chat(False)).status == 502
        found = sum(len(stub.asked) for stub in stubs)
    assert found == asked if retries is not None else found >= asked


async def test_the_same_request_of_the_same_key_is_answered_from_the_cache(tmp_path: Path) -> None:
    """Not another's, not another body, no stream, nothing after a reload, nothing unasked for."""
    stub, row = Stub("a"), {"name": "tiny", "cache": "10m"}
    options = {"api_key": ["one", "two"]}
    async with world(stub, folder=tmp_path, models=(row, {"name": "big"}), options=options) as live:

        async def hit(key: str, stream: bool = False, **fields: Any) -> bool:
            answer = await live.chat(stream, key=key, **fields)
            assert answer.status == 200
            found = answer.headers.get("x-headway-cache") == "hit"
            assert found == (len(stub.asked) == counts[-1])
            counts.append(len(stub.asked))
            return found

        counts = [0]
        assert [await hit("one"), await hit("one"), await hit("two")] == [False, True, False]
        assert await hit("one", metadata={"task": "t"}), "metadata changes no answer"
        assert not await hit("one", temperature=0.1)
        assert not await hit("one", headers={"cache-control": "no-cache"})
        assert [await hit("one", stream=True) for _ in range(2)] == [False, False]
        assert [await hit("one", model="big") for _ in range(2)] == [False, False]
        headers = {"authorization": "Bearer one"}
        spend = await (await live.http.get("/spend?by=model", headers=headers)).json()
        live.state.cache.check_integrity()
        await live.state.reload(config_of([stub], row, {"name": "big"}))
        assert not await hit("one")
    assert spend["rows"][0]["requests"] + spend["rows"][1]["requests"] == 10
    priced = [row["dollars"] > 0 for row in spend["rows"]]
    assert priced == [True, True]


async def test_another_key_of_the_same_name_has_no_cached_answer(tmp_path: Path) -> None:
    """The old one was deleted, and the new one may be somebody else's."""
    stub, file = Stub("a"), tmp_path / "keys.yaml"
    file.write_text(f"keys: [{{name: alice, sha256: '{digest('old').hex()}'}}]")
    row, options = {"name": "tiny", "cache": "10m"}, {"key_file": str(file)}
    async with world(stub, models=(row,), options=options) as live:
        await live.chat(False, key="old")
        file.write_text(f"keys: [{{name: alice, sha256: '{digest('new').hex()}'}}]")
        live.state.keyring.reload()
        answer = await live.chat(False, key="new")
        assert (answer.status, len(stub.asked)) == (200, 2)


def test_the_cache_is_bounded_in_bytes_and_time() -> None:
    cache = ResponseCache(SystemClock())
    cache.add(b"large", b"x" * (MAX_ANSWER + 1), 60)
    assert cache.find(b"large") is None
    for number in range(MAX_BYTES // MAX_ANSWER + 2):
        cache.add(b"%d" % number, b"x" * MAX_ANSWER, 60)
        cache.check_integrity()
    assert cache.find(b"0") is None and cache.find(b"9") is not None
    cache.add(b"9", b"y", 0)
    assert cache.find(b"9") is None
    cache.check_integrity()
    for number in range(200_000):
        cache.add(b"%d" % number, b"{}", 60)
    assert cache.find(b"0") is None, "small answers take memory as well"
    cache.check_integrity()


def test_a_price_has_a_unit() -> None:
    usage = UpstreamUsage(1000, 500, 100)
    for price in (
        UpstreamPrice(input=1, cached=0.1, output=4),
        UpstreamPrice(input=0.001, cached=0.0001, output=0.004, per="1k"),
        UpstreamPrice(input=1e-6, cached=1e-7, output=4e-6, per="token"),
    ):
        assert dollars_of(price, usage, Speed(SystemClock())) == pytest.approx(0.00095)
    assert format_price(price) == "$0.0000010 in, $0.00000010 cached, $0.0000040 out per token"
    assert format_price(UpstreamPrice(hour=2.5)) == "$2.50 per hour"


def test_a_budget_of_a_key_that_is_not_there_fails_the_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, file = tmp_path / "keys.yaml", tmp_path / "gateway.yaml"
    keys.write_text(f"keys: [{{name: alice, sha256: '{digest('key').hex()}'}}]")
    words = ["gateway", str(file), "--dry-run", f"--key-file={keys}", f"--data-dir={tmp_path}"]
    upstream = "upstreams: [{name: a, url: 'http://a:1', price: {input: 1, per: 1k}}]\n"
    for text, named in [
        ("budgets: {alice: {dollars: 1}, '*': {dollars: 2}}\nteams: {t: {keys: [alice]}}", ""),
        ("budgets: {alcie: {dollars: 1}}", "budgets: there is no key 'alcie'"),
        ("teams: {t: {keys: [bob]}}", "teams: t: there is no key 'bob'"),
    ]:
        file.write_text(upstream + text)
        assert main(words) == (2 if named else 0)
        shown = capsys.readouterr()
        assert named in shown.err and "$1.00 in, $0.00 out per 1k tokens" in shown.out
        assert not named or "alice" in shown.err
    file.write_text(upstream + "budgets: {alice: {dollars: 1}}")
    assert main(["gateway", str(file), "--dry-run"]) == 2, "without keys there is no alice"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"name": "a", "aliases": ["b"]}, "'b' is there twice"),
        ({"name": "a", "aliases": ["a"]}, "'a' is there twice"),
        ({"name": "a", "retries": -1}, "retries must be"),
        ({"name": "a", "cache": "10"}, "not a duration"),
        ({"name": "*", "aliases": ["c"]}, "answers any name"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], named: str) -> None:
    stub = Stub("a")
    stub.url = "http://a:1/v1"
    with pytest.raises(UsageError) as raised:
        config_of([stub], row, {"name": "b"})
    assert named in raised.value.cause
