"""Anthropic's batches with the official client, at a server and at a gateway before it."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from live_gateway import LiveGateway
from live_server import NO_TORCH, PATIENT, LiveAddress, LiveServer, wait_until

from conftest import StartServer
from raw_upstream import raw_upstream

ALICE, BOB = "alice-key", "bob-key"
KEYS = (f"--api-key={ALICE}", f"--api-key={BOB}")


def request_of(name: str, **params: Any) -> Any:
    """One of `requests`."""
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    return {
        "custom_id": name,
        "params": {"model": "tiny", "max_tokens": 4, "messages": messages, **params},
    }


@contextlib.contextmanager
def client_of(live: LiveAddress, key: str = "any") -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key=key, max_retries=0) as client:
        yield client


def wait_for_end(client: anthropic.Anthropic, batch_id: str) -> Any:
    """The batch, once it has ended."""

    def over() -> Any:
        batch = client.messages.batches.retrieve(batch_id)
        return batch if batch.processing_status == "ended" else None

    return wait_until(over)


def results_of(client: anthropic.Anthropic, batch_id: str) -> dict[str, Any]:
    """custom_id → result; every id once."""
    lines = list(client.messages.batches.results(batch_id))
    found = {line.custom_id: line.result for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture(scope="module")
def keyed(tiny_model: Path) -> Iterator[LiveServer]:
    live = LiveServer(
        tiny_model, "--served-model-name=tiny", "--kv-memory=64MiB", NO_TORCH, PATIENT, *KEYS
    )
    live.headers = {"authorization": f"Bearer {ALICE}"}
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture
def alice(keyed: LiveServer) -> Iterator[anthropic.Anthropic]:
    with client_of(keyed, ALICE) as client:
        yield client


@pytest.fixture
def bob(keyed: LiveServer) -> Iterator[anthropic.Anthropic]:
    with client_of(keyed, BOB) as client:
        yield client


def test_a_message_batch_from_its_requests_to_its_results(alice: anthropic.Anthropic) -> None:
    good = [request_of(f"good-{i}", max_tokens=2 + i) for i in range(3)]
    batch = alice.messages.batches.create(requests=[*good, request_of("hot", temperature=9)])
    assert batch.id.startswith("msgbatch_") and batch.type == "message_batch"
    assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
    over = wait_for_end(alice, batch.id)
    assert over.ended_at >= over.created_at and over.cancel_initiated_at is None
    assert over.request_counts.model_dump() == {
        "processing": 0, "succeeded": 3, "errored": 1, "canceled": 0, "expired": 0,
    }  # fmt: skip
    found = results_of(alice, batch.id)
    assert found.keys() == {"good-0", "good-1", "good-2", "hot"}
    for i in range(3):
        message = found[f"good-{i}"].message
        assert found[f"good-{i}"].type == "succeeded" and message.role == "assistant"
        assert message.model == "tiny" and message.usage.output_tokens <= 2 + i
    assert found["hot"].type == "errored"
    error = found["hot"].error
    assert error.type == "error" and error.error.type == "invalid_request_error"
    assert "temperature" in error.error.message


def test_what_is_wrong_with_a_request_fails_it_alone(alice: anthropic.Anthropic) -> None:
    """A model that is not served, a stream, no messages, a field of another type."""
    requests = [
        request_of("fine"),
        request_of("model", model="nobody"),
        request_of("stream", stream=True),
        request_of("empty", messages=[]),
        request_of("type", max_tokens="many"),
        request_of("no-model", model=5),
    ]
    batch = alice.messages.batches.create(requests=requests)
    wait_for_end(alice, batch.id)
    found = results_of(alice, batch.id)
    assert {name: result.type for name, result in found.items()} == {
        **dict.fromkeys(("model", "stream", "empty", "type", "no-model"), "errored"),
        "fine": "succeeded",
    }
    assert found["model"].error.error.type == "not_found_error"


def test_what_a_client_gets_alone_it_gets_in_a_batch(server: LiveServer) -> None:
    """Of real tokens: the others' engine makes them up."""
    request = request_of("a", max_tokens=8)
    with client_of(server) as client:
        alone = client.messages.create(**request["params"], extra_body={"temperature": 0})
        request["params"]["temperature"] = 0
        batch = client.messages.batches.create(requests=[request])
        over = wait_for_end(client, batch.id)
        assert over.results_url == f"{server.url}/v1/messages/batches/{batch.id}/results"
        assert results_of(client, batch.id)["a"].message.content == alone.content


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "requests has 0 entries"),
        (
            [request_of("a"), request_of("b"), request_of("a")],
            "requests.2.custom_id is 'a', and so is requests.0",
        ),
        ([request_of("a b")], "requests.0.custom_id"),
        ([request_of("")], "requests.0.custom_id"),
        ([request_of("x" * 65)], "requests.0.custom_id"),
        ([{"custom_id": "a"}], "params is required"),
        ([{"custom_id": 7, "params": {}}], "custom_id"),
    ],
)
def test_an_envelope_that_is_wrong_is_refused(
    alice: anthropic.Anthropic, requests: Any, words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        alice.messages.batches.create(requests=requests)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"] and body["request_id"]


def test_another_key_sees_nothing_of_it(
    keyed: LiveServer, alice: anthropic.Anthropic, bob: anthropic.Anthropic
) -> None:
    batch_id = alice.messages.batches.create(requests=[request_of("a")]).id
    wait_for_end(alice, batch_id)
    for call in (
        bob.messages.batches.retrieve,
        bob.messages.batches.cancel,
        bob.messages.batches.delete,
    ):
        with pytest.raises(anthropic.NotFoundError) as caught:
            call(batch_id)
        body: Any = caught.value.body
        assert body["error"]["type"] == "not_found_error"
    path = f"/v1/messages/batches/{batch_id}/results"
    with pytest.raises(anthropic.NotFoundError):
        bob.get(path, cast_to=object)
    assert batch_id not in [batch.id for batch in bob.messages.batches.list()]
    with openai.OpenAI(base_url=keyed.url + "/v1", api_key=ALICE, max_retries=0) as other:
        assert not [batch for batch in other.batches.list() if batch.id == batch_id]
        assert not [file for file in other.files.list() if file.filename == "requests.jsonl"]
        with pytest.raises(openai.NotFoundError):
            other.batches.retrieve(batch_id)


def test_batches_are_listed_by_pages_both_ways(bob: anthropic.Anthropic) -> None:
    made = {bob.messages.batches.create(requests=[request_of("a")]).id for _ in range(5)}
    first = bob.messages.batches.list(limit=2)
    ids = [batch.id for batch in bob.messages.batches.list(limit=2)]  # follows the pages
    assert set(ids) == made and len(ids) == 5
    assert [batch.id for batch in first.data] == ids[:2]
    assert first.has_more and (first.first_id, first.last_id) == (ids[0], ids[1])
    second = bob.messages.batches.list(limit=2, after_id=ids[1])
    assert [batch.id for batch in second.data] == ids[2:4] and second.has_more
    before = bob.messages.batches.list(limit=2, before_id=ids[4])
    assert [batch.id for batch in before.data] == ids[2:4] and before.has_more
    edge = bob.messages.batches.list(limit=3, before_id=ids[2])
    assert [batch.id for batch in edge.data] == ids[:2] and not edge.has_more
    for query in ({"limit": 0}, {"limit": 1001}, {"after_id": ids[0], "before_id": ids[1]}):
        with pytest.raises(anthropic.BadRequestError):
            bob.messages.batches.list(**query)
    with pytest.raises(anthropic.NotFoundError):
        bob.messages.batches.list(after_id="msgbatch_none")


def test_a_batch_is_cancelled_and_deleted(keyed: LiveServer, alice: anthropic.Anthropic) -> None:
    os.kill(keyed.engine_pid(), signal.SIGSTOP)  # so that nothing is answered
    try:
        batch = alice.messages.batches.create(requests=[request_of(f"r-{i}") for i in range(4)])
        assert batch.processing_status == "in_progress" and batch.results_url is None
        assert batch.request_counts.processing == 4
        with pytest.raises(anthropic.BadRequestError):
            alice.messages.batches.delete(batch.id)
        with pytest.raises(anthropic.BadRequestError):
            alice.get(f"/v1/messages/batches/{batch.id}/results", cast_to=object)
        cancelled = alice.messages.batches.cancel(batch.id)
        assert cancelled.processing_status in ("canceling", "ended")
        assert cancelled.cancel_initiated_at is not None
        over = wait_for_end(alice, batch.id)
    finally:
        os.kill(keyed.engine_pid(), signal.SIGCONT)
    assert over.request_counts.canceled == 4
    found = results_of(alice, batch.id)
    assert found.keys() == {f"r-{i}" for i in range(4)}
    assert {result.type for result in found.values()} == {"canceled"}
    assert alice.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        alice.messages.batches.retrieve(batch.id)
    assert not [path for path in (keyed.temp / "data" / "files").iterdir() if is_of(path, "r-0")]


def is_of(path: Path, custom_id: str) -> bool:
    """Whether a file of the data folder has a line of this request."""
    return f'"custom_id":"{custom_id}"' in path.read_text()


def test_a_batch_goes_on_after_a_kill(start_server: StartServer, tmp_path: Path) -> None:
    flags = (NO_TORCH, PATIENT, "--served-model-name=tiny")
    data = {"HEADWAY_DATA_DIR": str(tmp_path / "data")}
    live = start_server(*flags, env=data).wait_ready()
    engine = live.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    with client_of(live) as client:
        batch = client.messages.batches.create(requests=[request_of(f"r-{i}") for i in range(20)])
        live.signal(signal.SIGKILL)
        live.wait_end()
    live = start_server(*flags, env=data).wait_ready()
    with client_of(live) as client:
        over = wait_for_end(client, batch.id)
        assert over.request_counts.succeeded == 20
        assert len(results_of(client, batch.id)) == 20


def test_a_gateway_runs_message_batches_over_its_upstreams(start_server: StartServer) -> None:
    upstream = start_server(NO_TORCH, "--served-model-name=tiny").wait_ready()
    gateway = LiveGateway(upstream.url)
    try:
        with client_of(gateway) as client:
            requests = [request_of("a"), request_of("b"), request_of("wrong", temperature=9)]
            batch = client.messages.batches.create(requests=requests)
            over = wait_for_end(client, batch.id)
            assert over.results_url.startswith(gateway.url)
            found = results_of(client, batch.id)
        assert {name: result.type for name, result in found.items()} == {
            "a": "succeeded", "b": "succeeded", "wrong": "errored",
        }  # fmt: skip
        assert found["a"].message.role == "assistant"
        assert found["wrong"].error.error.type == "invalid_request_error"
    finally:
        gateway.close()


ANSWER = b"""{
  "type": "message", "id": "msg_1", "role": "assistant", "model": "tiny", "more":
{"custom_id": "b", "result": {"type": "canceled"}},
  "content": [{"type": "text", "text": "5"}],
  "stop_reason": "end_turn", "stop_sequence": null,
  "usage": {"input_tokens": 3, "output_tokens": 1, "cache_read_input_tokens": null}
}
"""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"


def test_an_answer_of_many_lines_is_one_result() -> None:
    """OpenAI indents its answers, and others tell null where they count nothing."""
    answer = HEAD + b"content-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
    with raw_upstream(answer) as upstream:
        gateway = LiveGateway(upstream.url.removesuffix("/v1"))
        try:
            with client_of(gateway) as client:
                requests = [request_of("a"), request_of("b")]
                batch = client.messages.batches.create(requests=requests)
                wait_for_end(client, batch.id)
                found = results_of(client, batch.id)
        finally:
            gateway.close()
    assert {name: result.type for name, result in found.items()} == {
        "a": "succeeded", "b": "succeeded",
    }  # fmt: skip
    assert found["b"].message.usage.input_tokens == 3
