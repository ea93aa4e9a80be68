"""The gateway's doors: keys, models, headers, what is passed on, files and batches, reloading."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_runs import begin, over, written
from gateway_world import Stub, config_of, world
from headway.batches import open_runner
from headway.edge.key_file import digest
from headway.edge.relayed import FIELD
from headway.gateway.app import DIALECTS, ROUTES, access, make_app

PUBLIC = {"/health", "/ready"}
PATHS = [*(("POST", path) for path in DIALECTS), *((method, path) for method, path, _ in ROUTES)]


@pytest.mark.parametrize("key", ["", "wrong", "right"])
async def test_every_route_but_the_public_ones_wants_a_key(key: str) -> None:
    headers = {"x-api-key": key} if key else {}
    async with world(Stub("a"), options={"api_key": ["right"]}) as live:
        for method, path in [*PATHS, ("GET", "/nowhere"), ("GET", "/v1//models")]:
            place = path.replace("{name:path}", "tiny").replace("{response_id}", "x")
            async with live.http.request(method, place, headers=headers, data=b"{}") as answer:
                if path in PUBLIC:
                    assert answer.status == 200
                else:
                    assert (answer.status == 401) == (key != "right"), (path, answer.status)


@pytest.mark.parametrize(
    ("path", "who"),
    [("/health", "public"), ("/v1/models", "key"), ("/metrics", "operator"), ("/x", "operator")],
)
def test_what_no_table_names_is_the_operators(path: str, who: str) -> None:
    assert access(path) == who


async def test_models_are_those_of_the_file_or_of_the_upstreams() -> None:
    async def names(live: Any) -> list[str]:
        async with live.http.get("/v1/models") as answer:
            return [card["id"] for card in (await answer.json())["data"]]

    async with world(Stub("a"), Stub("b", model="big")) as live:
        assert await names(live) == ["tiny", "big"]
        assert (await live.chat(model="big")).headers["x-headway-upstream"] == "b"
        missing = await live.chat(model="nobody")
        assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
        unnamed = await live.chat(model=None)
        assert unnamed.json["error"]["param"] == "model"
    async with world(Stub("a"), Stub("b"), models=({"name": "chat"},)) as live:
        assert await names(live) == ["chat"]
        answers = [await live.chat(stream, model="chat") for stream in (True, False)]
        assert {chunk["model"] for chunk in answers[0].chunks} == {"chat"}
        assert b'"model": "chat"' in answers[1].data, "an answer says what was asked for"


async def test_an_upstream_gets_its_own_key_and_nothing_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY_OF_A", "upstream-key")
    stub = Stub("a")
    rows = {"a": {"key_env": "KEY_OF_A"}, "headers": ("x-tenant",)}
    async with world(stub, options={"api_key": ["client-key"]}, **rows) as live:
        sent = {"cookie": "c=1", "x-tenant": "t", "traceparent": "00-1", "x-secret": "s"}
        await live.chat(key="client-key", headers=sent, service_class="batch", slo={"ttft": "1s"})
        await live.chat(key="client-key", cache_salt="mine")
    headers = {name.lower(): value for name, value in stub.headers[0].items()}
    assert headers["authorization"] == "Bearer upstream-key"
    assert (headers["x-tenant"], headers["traceparent"]) == ("t", "00-1")
    assert not {"cookie", "x-secret", "x-headway-user"} & headers.keys()
    assert "client-key" not in str(stub.headers)
    assert not {"service_class", "slo", "cache_salt", FIELD} & {*stub.asked[0], *stub.asked[1]}


@pytest.mark.parametrize("stream", [True, False])
async def test_the_fields_of_the_gateway_are_not_a_clients(stream: bool, tmp_path: Path) -> None:
    """What a client writes into the gateway's own field and header reaches no server."""
    stub, keys = Stub("a", headway=True), tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: alice, sha256: '{digest('key').hex()}'}}]")
    resume = {"id": "resp_of_another", "created": 1, "tokens": [300]}
    sent = {FIELD: {"resume": resume}, "headers": {"x-headway-user": "another"}}
    async with world(stub, options={"key_file": str(keys)}, a={"kind": "headway"}) as live:
        await live.chat(stream, key="key", **sent)
        for path in ("/tokenize", "/v1/embeddings", "/v1/messages/count_tokens"):
            body = {"model": "tiny", "input": "x", FIELD: {"resume": resume}}
            async with live.http.post(path, json=body, headers={"x-api-key": "key"}) as answer:
                await answer.read()
    assert [body.get(FIELD) for body in stub.asked[:1]] == [{"marks": True} if stream else None]
    assert not any(FIELD in body for body in stub.asked[1:])
    assert {name["x-headway-user"] for name in stub.headers} == {"alice"}


async def test_a_stored_response_is_found_by_its_owner_and_its_id() -> None:
    """An upstream that answers another caller with an id which is there already takes nothing."""
    async with world(Stub("a"), Stub("b")) as live:
        state = live.state
        state.keep_response("resp_1", "alice", "a")
        state.keep_response("resp_1", "bob", "b")
        state.keep_response("r" * 10_000, "bob", "b")
        found = [state.keeper_of("resp_1", owner) for owner in ("alice", "bob", "carol")]
        assert [each and each.name for each in found] == ["a", "b", None]
        assert len(state.responses) == 2


async def test_the_salts_of_callers_are_apart_where_an_upstream_keeps_salts() -> None:
    stub = Stub("a")
    keys = {"api_key": ["one", "two"]}
    async with world(stub, options=keys, a={"kind": "vllm"}) as live:
        for key, salt in (("one", "x"), ("two", "x"), ("one", None), ("two", None), ("one", "x")):
            await live.chat(key=key, cache_salt=salt)
    salts = [body["cache_salt"] for body in stub.asked]
    assert len(set(salts[:4])) == 4 and salts[4] == salts[0] != "x"


async def test_usage_is_asked_for_and_shown_to_who_asked() -> None:
    stub = Stub("a")
    async with world(stub) as live:
        plain = await live.chat()
        asked = await live.chat(stream_options={"include_usage": True})
    assert all(body["stream_options"]["include_usage"] for body in stub.asked)
    assert not any(chunk.get("usage") for chunk in plain.chunks)
    assert asked.chunks[-1]["usage"]["completion_tokens"] == 8


async def test_embeddings_go_where_there_are_some() -> None:
    stubs = [Stub("a", headway=True), Stub("b")]
    body = {"model": "tiny", "input": "x"}
    async with (
        world(*stubs, a={"kind": "headway"}, b={"kind": "openai"}) as live,
        live.http.post("/v1/embeddings", json=body) as answer,
    ):
        assert (await answer.json())["object"] == "list"
    assert [len(stub.asked) for stub in stubs] == [0, 1]


async def test_a_configuration_is_read_again_without_a_request_lost() -> None:
    stubs = [Stub("a"), Stub("b")]
    async with world(*stubs, models=({"name": "tiny", "upstreams": ["a"]},)) as live:
        kept = live.state.upstreams["a"]
        running = [asyncio.create_task(live.chat()) for _ in range(5)]
        await asyncio.sleep(0)
        await live.state.reload(config_of(stubs, {"name": "tiny", "upstreams": ["b"]}))
        assert live.state.upstreams["a"] is kept, "what is known of an upstream stays"
        assert all([(await answer).is_complete for answer in running])
        assert (await live.chat()).headers["x-headway-upstream"] == "b"
        await live.state.reload(config_of(stubs[1:]))
        assert set(live.state.upstreams) == {"b"} and (await live.chat()).is_complete


async def test_batches_run_over_the_upstreams(tmp_path: Path) -> None:
    async with world(Stub("a"), Stub("b"), folder=tmp_path) as live:
        runner = open_runner(live.state)
        make_app(live.state, runner)
        await runner.start()
        try:
            runner.endpoints["/v1/completions"] = runner.endpoints["/v1/chat/completions"]
            names = [f"{number}" for number in range(6)]
            batch = await over(runner, await begin(runner, names))
            assert batch.request_counts.completed == 6, batch
            lines = written(runner, batch.output_file_id)
            assert set(lines) == set(names)
        finally:
            await runner.stop()


async def test_a_stored_response_is_its_owners_alone() -> None:
    async with world(Stub("a")) as live:
        live.state.keep_response("resp_1", "anonymous", "a")
        live.state.keep_response("resp_2", "somebody", "a")
        for name, code in (("resp_1", None), ("resp_2", "not_found"), ("resp_3", "not_found")):
            async with live.http.get(f"/v1/responses/{name}") as answer:  # the stub has none
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (404, code), name
        body = {"model": "tiny", "input": "x", "previous_response_id": "resp_2"}
        async with live.http.post("/v1/responses", json=body) as answer:
            code = (await answer.json())["error"]["code"]
            assert code == "previous_response_not_found"
        chat = await live.chat(previous_response_id="resp_2")
        assert chat.status == 200, "a field of /v1/responses is for the upstream to judge elsewhere"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": 1}', b'{"model": NaN}', b"\xff"])
async def test_a_body_that_is_none_is_refused_here(body: bytes) -> None:
    stub = Stub("a")
    async with world(stub) as live:
        for path in DIALECTS:
            async with live.http.post(path, data=body) as answer:
                error = msgspec.json.decode(await answer.read())
                assert answer.status == 400 and json.dumps(error)
    assert not stub.asked
