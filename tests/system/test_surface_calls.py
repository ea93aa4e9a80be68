"""Every call beside those that generate, through the official clients.

The first line of a docstring here is the row of its call in docs/surface.md.
"""

import time
from typing import Any

import aiohttp
import openai
import pytest
from live_server import LiveServer, wait_until
from surface_clients import (
    USER,
    Clients,
    prompt_tokens,
)
from surface_server import INPUT, clients, told

FIXTURES = (clients, told)


# ── stored responses ────────────────────────────────────────────────────────────────────────


def test_call_retrieve(clients: Clients) -> None:
    """GET /v1/responses/{id} (openai): a stored response, as it was answered."""
    made = clients.openai.responses.create(**INPUT)
    assert clients.openai.responses.retrieve(made.id).to_dict() == made.to_dict()
    last: Any = list(clients.openai.responses.create(**INPUT, stream=True))[-1]
    found = clients.openai.responses.retrieve(last.response.id)
    assert found.to_dict() == last.response.to_dict()
    unstored = clients.openai.responses.create(**INPUT, store=False)
    with pytest.raises(openai.NotFoundError):
        clients.openai.responses.retrieve(unstored.id)
    with pytest.raises(openai.BadRequestError) as caught:
        clients.openai.responses.retrieve(made.id, stream=True)
    assert caught.value.param == "stream"


def test_call_delete(clients: Clients) -> None:
    """DELETE /v1/responses/{id} (openai): it is forgotten."""
    made = clients.openai.responses.create(**INPUT)
    clients.openai.responses.delete(made.id)
    for again in (clients.openai.responses.retrieve, clients.openai.responses.delete):
        with pytest.raises(openai.NotFoundError):
            again(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        clients.openai.responses.create(**INPUT, previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"


def test_call_input_items(clients: Clients) -> None:
    """GET /v1/responses/{id}/input_items (openai): all the model was given, by pages."""
    first = clients.openai.responses.create(**INPUT)
    second = clients.openai.responses.create(**INPUT, previous_response_id=first.id)
    given = clients.openai.responses.input_items
    items = list(given.list(second.id, order="asc", limit=1))
    roles = [item.role for item in items]  # type: ignore[union-attr]
    assert roles == ["user", "assistant", "user"]
    assert items[1].content[0].text == first.output_text  # type: ignore[union-attr]
    newest = given.list(second.id).data
    assert [item.id for item in newest] == [item.id for item in items][::-1]
    assert given.list(second.id, after=str(newest[0].id)).data == newest[1:]
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nowhere"}):
        with pytest.raises(openai.BadRequestError) as caught:
            given.list(second.id, **wrong)  # type: ignore[arg-type]
        assert caught.value.param == next(iter(wrong))


def test_call_input_tokens(clients: Clients) -> None:
    """POST /v1/responses/input_tokens (openai): as many as the response then has."""
    made = clients.openai.responses.create(**INPUT, instructions="Be brief.")
    counted = clients.openai.responses.input_tokens.count(
        model="tiny", input=USER, instructions="Be brief."
    )
    assert counted.input_tokens == made.usage.input_tokens  # type: ignore[union-attr]


def test_call_cancel(clients: Clients, told: LiveServer) -> None:
    """POST /v1/responses/{id}/cancel (openai): what runs in the background ends."""
    long = {**INPUT, "max_output_tokens": 470, "extra_body": {"ignore_eos": True}}
    running = clients.openai.responses.create(**long, background=True)
    assert running.status == "queued" and running.background
    assert clients.openai.responses.cancel(running.id).status == "cancelled"
    wait_for(clients, running.id, "cancelled")
    wait_until(told.idle)
    assert clients.openai.responses.cancel(running.id).status == "cancelled"
    at_once = clients.openai.responses.create(**INPUT)
    with pytest.raises(openai.BadRequestError):
        clients.openai.responses.cancel(at_once.id)


def test_call_background(clients: Clients) -> None:
    """POST /v1/responses (openai): in the background it says the same, later."""
    at_once = clients.openai.responses.create(**INPUT)
    queued = clients.openai.responses.create(**INPUT, background=True)
    done = wait_for(clients, queued.id, "incomplete")
    assert done.output_text == at_once.output_text and done.usage == at_once.usage
    deleted = clients.openai.responses.create(**INPUT, background=True)
    clients.openai.responses.delete(deleted.id)
    with pytest.raises(openai.NotFoundError):
        clients.openai.responses.retrieve(deleted.id)


def wait_for(clients: Clients, response_id: str, status: str) -> Any:
    """The stored response once it has this status."""
    deadline = time.monotonic() + 60
    while (found := clients.openai.responses.retrieve(response_id)).status != status:
        assert time.monotonic() < deadline, found.status
        time.sleep(0.02)
    return found


def test_call_parse_and_stream(clients: Clients) -> None:
    """POST /v1/responses (openai, as a stream): `responses.stream` follows it to its end."""
    wanted = clients.openai.responses.create(**{**INPUT, "extra_body": {"stop": " "}})
    with clients.openai.responses.stream(**INPUT, extra_body={"stop": " "}) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert wanted.status == "completed" and wanted.output_text == text
    assert stream.get_final_response().output_text == text


# ── Anthropic's other calls, models ─────────────────────────────────────────────────────────


def test_call_count_tokens(clients: Clients) -> None:
    """POST /v1/messages/count_tokens (anthropic): as many as the message then has."""
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "system": "Be brief."}
    made = clients.anthropic.messages.create(**asked, max_tokens=3)
    counted = clients.anthropic.messages.count_tokens(**asked)
    assert counted.input_tokens == prompt_tokens(made.usage)


def test_call_message_batches(clients: Clients) -> None:
    """POST /v1/messages/batches (anthropic): created, waited for, listed, its results read."""
    batches = clients.anthropic.messages.batches
    params: Any = {"model": "tiny", "max_tokens": 4, "messages": USER}
    batch = batches.create(requests=[{"custom_id": "a", "params": params}])
    wait_until(lambda: batches.retrieve(batch.id).processing_status == "ended")
    assert batch.id in [each.id for each in batches.list()]
    (line,) = batches.results(batch.id)
    assert line.custom_id == "a" and line.result.type == "succeeded"
    assert batches.delete(batch.id).id == batch.id


def test_call_message_stream(clients: Clients) -> None:
    """POST /v1/messages (anthropic, as a stream): `messages.stream` adds it up."""
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 8}
    greedy = {"temperature": 0}
    whole = clients.anthropic.messages.create(**asked, extra_body=greedy)
    with clients.anthropic.messages.stream(**asked, extra_body=greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 8


def test_call_models(clients: Clients) -> None:
    """GET /v1/models (openai, anthropic): every served name."""
    for models in (clients.openai.models, clients.anthropic.models):
        assert [m.id for m in models.list()] == ["tiny", "nickname"]  # type: ignore[attr-defined]


def test_call_one_model(clients: Clients) -> None:
    """GET /v1/models/{id} (openai, anthropic): one of them."""
    assert clients.openai.models.retrieve("nickname").id == "nickname"
    found = clients.anthropic.models.retrieve("nickname")
    assert found.type == "model" and found.display_name == "nickname"
    with pytest.raises(openai.NotFoundError):
        clients.openai.models.retrieve("another")


async def test_call_apply_template(told: LiveServer) -> None:
    """POST /apply-template (plain HTTP): the prompt's text, as chat tokenizes it."""
    async with aiohttp.ClientSession(told.url) as http:
        body = {"model": "tiny", "messages": USER, "reasoning_effort": "low"}
        async with http.post("/apply-template", json=body) as answer:
            text = (await answer.json())["prompt"]
        async with http.post("/v1/chat/completions", json={**body, "max_tokens": 1}) as answer:
            tokens = (await answer.json())["usage"]["prompt_tokens"]
        asked = {"prompt": text, "add_special_tokens": False}
        async with http.post("/tokenize", json=asked) as answer:
            assert (await answer.json())["count"] == tokens
    assert text.startswith("effort low\n<|im_start|>user\nTell me")
