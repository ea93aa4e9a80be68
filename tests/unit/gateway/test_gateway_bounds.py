"""What a request may say, what an answer may hold, and which addresses are taken."""

from typing import Any

import msgspec
import pytest

from gateway_world import Stub, gateway, text_of, world
from headway.core.clock import VirtualClock
from headway.edge.relayed import FIELD
from headway.edge.upstream import FallbackUpstream
from headway.gateway.config import UpstreamRow, config_of_urls
from headway.gateway.dialects import DIALECTS
from headway.gateway.upstream import Upstream

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/embeddings": {"input": "hi"},
}
WRONG: list[tuple[str, Any]] = [
    *[("stream", value) for value in ("true", 1, "yes", [])],
    *[("n", value) for value in ("128", 128.0, True, int("9" * 400))],
    *[(name, "600") for name in ("best_of", "max_tokens", "max_output_tokens", "n_predict")],
    *[("background", "true"), ("store", 0), ("model", 1)],
]


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_field_that_the_gateway_goes_by_has_its_type(path: str) -> None:
    """`stream: "true"` is a stream at some upstreams and none at others, as `n: "128"` is 128."""
    stub = Stub("a")
    async with world(stub) as live:
        for name, value in WRONG:
            body = {"model": "tiny", **BODIES[path], name: value}
            async with live.http.post(path, json=body) as answer:
                error = (await answer.json())["error"]
                assert answer.status == 400 and name in error["message"], (name, value, error)
                assert path == "/v1/messages" or error["param"] == name
        assert not stub.asked
        body = {"model": "tiny", **BODIES[path], "stream": None, "n": None, "best_of": None}
        async with live.http.post(path, json=body) as answer:
            assert answer.status == 200


async def test_the_length_of_llama_is_said_to_others_in_their_words() -> None:
    stubs = [Stub("a"), Stub("b", headway=True)]
    models = tuple({"name": stub.name, "upstreams": [stub.name]} for stub in stubs)
    async with world(*stubs, models=models) as live:
        for name in ("a", "b"):
            answer = await live.chat(False, model=name, max_tokens=None, n_predict=5)
            assert answer.status == 200
    lengths = [(stub.asked[0].get("max_tokens"), stub.asked[0].get("n_predict")) for stub in stubs]
    assert lengths == [(5, None), (None, 5)]


class LongStub(Stub):
    """Its whole answers hold more than was asked for."""

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        return super()._whole(body) | {"more": "x" * 3_000_000}


async def test_a_whole_answer_is_as_long_as_what_was_asked_for() -> None:
    """2 MiB more than eight tokens have is no answer; of an answer of 16,000 tokens it may be."""
    long = LongStub("a", context=32_768)
    models = ({"name": "tiny", "upstreams": ["a", "b"]},)
    async with world(long, Stub("b", headway=True), models=models) as live:
        for _ in range(2):
            answer = await live.chat(False)
            assert (answer.text, answer.headers["x-headway-upstream"]) == (text_of(8), "b")
            live.state.upstreams["a"].breaker.succeeded()
        assert live.state.metrics.of("attempts", upstream="a", outcome="lied") >= 1
        assert live.state.upstreams["a"].num_buffered == 0
        live.state.upstreams["b"].is_unavailable = True
        answer = await live.chat(False, max_tokens=16_000)
        assert answer.headers["x-headway-upstream"] == "a" and len(answer.data) > 3_000_000


async def test_the_answers_of_one_upstream_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.gateway.upstream.MAX_BUFFERED", 100)
    models = ({"name": "tiny", "policy": "round_robin"},)
    async with world(Stub("a"), models=models) as live:
        assert (await live.chat(False)).status == 502
        assert live.state.upstreams["a"].num_buffered == 0
        assert (await live.chat()).is_complete, "a stream is handed on as it comes"


@pytest.mark.parametrize("size", [1000, 2 * 2**20])
async def test_a_count_is_as_long_as_what_was_counted(size: int) -> None:
    """Of a short text no 2 MiB of tokens come."""
    stub = Stub("a", headway=True)
    stub.padding = size
    async with world(stub) as live:
        async with live.http.post("/tokenize", json={"model": "tiny", "prompt": "a"}) as answer:
            assert answer.status == (200 if size == 1000 else 502)
        assert live.state.upstreams["a"].num_buffered == 0


class UnmarkedStub(Stub):
    """A Headway server that sends no marks behind its tokens."""

    async def _write(self, request: Any, answer: Any, body: Any, fault: str) -> None:
        await super()._write(request, answer, {**body, FIELD: None}, fault)


@pytest.mark.parametrize(
    ("stub", "limit"),
    [(Stub("a", token_s=0.1), 50), (UnmarkedStub("a", headway=True, token_s=0.02), 500)],
)
async def test_what_waits_for_a_token_or_its_mark_is_bounded(
    stub: Stub, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.gateway.stream.MAX_HELD_BYTES", limit)
    async with world(stub) as live:
        answer = await live.chat()
    assert answer.status == 502 and answer.json["error"]["code"] == "lied"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("http://host:8000/v1/", "http://host:8000/v1"),
        ("https://host/v1beta/openai", "https://host/v1beta/openai"),
    ],
)
def test_an_address_may_leave_out_its_version(given: str, asked: str) -> None:
    assert Upstream(UpstreamRow(url=given), VirtualClock()).url == asked
    assert FallbackUpstream(given).url == asked


async def test_an_upstream_may_be_named_without_its_version() -> None:
    stub = await Stub("a", headway=True).start()
    try:
        async with gateway(config_of_urls([stub.url.removesuffix("/v1")])) as live:
            assert (await live.chat()).is_complete and live.state.upstreams
            assert next(iter(live.state.upstreams.values())).relays
    finally:
        await stub.stop()


class OddStub(Stub):
    """Its whole answers are JSON, and no chats."""

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"message": 5}]}


async def test_names_and_codes_of_others_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an upstream was never found its models are not known: any name may be one of them."""
    monkeypatch.setattr("headway.gateway.metrics.MAX_SERIES", 20)
    async with world(Stub("a")) as live:
        live.state.upstreams["a"].was_reached = False
        live.state.upstreams["a"].check_health = never  # type: ignore[method-assign]
        assert (await live.chat(False, model="m" * 201)).status == 404
        for number in range(40):
            await live.chat(False, model=f"made-up-{number}")
        for series in live.state.metrics.values.values():
            assert len(series) <= 21
        assert live.state.metrics.of("requests", route="other") > 0
        assert live.state.metrics.of("requests") == 40


async def never() -> None:
    """A look that finds nobody."""


async def test_an_answer_that_no_scorer_can_read_is_no_fault_of_the_gateway() -> None:
    hold = {"scorer": "http://127.0.0.1:9/score", "by": "whole"}
    async with world(OddStub("a"), models=({"name": "tiny", "hold": hold},)) as live:
        answer = await live.chat(False)
    assert (answer.status, answer.json["error"]["code"]) == (502, "lied")


class DeepStub(Stub):
    """Its whole answers are nested deeper than a stack is."""

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        return super()._whole(body) | {"more": msgspec.Raw(b"[" * 300_000 + b"]" * 300_000)}


async def test_an_answer_that_is_nested_too_deep_costs_its_upstream_alone() -> None:
    async with world(DeepStub("a"), Stub("b"), models=({"name": "tiny"},)) as live:
        answers = [await live.chat(False) for _ in range(4)]
    assert [each.text for each in answers] == [text_of(8)] * 4
