"""Structured output over HTTP: what the official client asks for, or a 400 that says why not.

The tiny model's text is nonsense, so whatever is right here is right by construction. Hostile
grammars are in `test_grammar_bombs.py`.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from live_server import LiveServer, alive, children, wait_until

from conftest import StartServer
from headway import LLM, SamplingParams
from headway.core.errors import RequestError
from headway.core.grammar import json_schema, regex

DOCS = Path(__file__).resolve().parents[2] / "docs" / "structured-output.md"
MESSAGES: Any = [{"role": "user", "content": "Plan a trip."}]
TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Zürich"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "stops": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "return": {"type": ["boolean", "null"]},
    },
    "required": ["city", "days", "stops", "return"],
    "additionalProperties": False,
}
ENOUGH = 300
"""Tokens that a trip never takes: its indentation is at most 32 spaces at 15 places."""


def named(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, "max_tokens": ENOUGH, **fields}
    )


def structured(client: openai.OpenAI, rule: dict[str, Any], **fields: Any) -> Any:
    """A text completion under `structured_outputs`."""
    return client.completions.create(
        **{"model": "tiny", "prompt": "The answer is ", "max_tokens": ENOUGH, **fields},
        extra_body={"structured_outputs": rule},
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_is_kept(client: openai.OpenAI, temperature: float) -> None:
    answer = chat(client, response_format=named(TRIP), n=4, temperature=temperature, seed=11)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), TRIP)


def test_streamed_it_is_the_same(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"response_format": named(TRIP), "n": 2, "seed": 5, "temperature": 0.8}
    whole = [choice.message.content for choice in chat(client, **fields).choices]
    texts: dict[int, str] = defaultdict(str)
    for chunk in chat(client, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [texts[0], texts[1]] == whole


def test_a_number_ends_though_the_model_would_write_digits_for_ever(
    client: openai.OpenAI, server: LiveServer
) -> None:
    """Its answer is whole, not cut off by its length."""
    _, told = server.post("/tokenize", {"prompt": "0123456789", "add_special_tokens": False})
    schema = {
        "type": "object",
        "properties": {"share": {"type": "number", "minimum": 0.1, "maximum": 0.25}},
        "required": ["share"],
        "additionalProperties": False,
    }
    (choice,) = chat(
        client,
        response_format=named(schema),
        logit_bias=dict.fromkeys(map(str, told["tokens"]), 100),
    ).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), schema)
    assert len(choice.message.content) < 100


def test_the_rules_of_structured_outputs(client: openai.OpenAI) -> None:
    asked: list[tuple[dict[str, Any], Any]] = [
        ({"json": TRIP}, lambda text: jsonschema.validate(json.loads(text), TRIP) is None),
        ({"regex": "[a-z]{2,5}@(home|work)"}, re.compile("[a-z]{2,5}@(home|work)").fullmatch),
        ({"choice": ["yes", "no", "maybe – later"]}, {"yes", "no", "maybe – later"}.__contains__),
        ({"grammar": 'start: "<" /[0-9]{3}/ ">"'}, re.compile("<[0-9]{3}>").fullmatch),
    ]
    for rule, follows in asked:
        for choice in structured(client, rule, n=3, seed=2).choices:
            assert follows(choice.text), (rule, choice.text)
            assert choice.finish_reason == "stop"


def test_any_object_is_an_object(client: openai.OpenAI, server: LiveServer) -> None:
    """Some end in time and parse; those cut off say `length`, and are counted."""
    counted = server.metric("validation_failures_total", kind="json_object")
    answer = chat(client, response_format={"type": "json_object"}, n=8, seed=3, max_tokens=40)
    cut = 0
    for choice in answer.choices:
        assert choice.message.content.startswith("{")
        cut += choice.finish_reason == "length"
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
    now = server.metric("validation_failures_total", kind="json_object")
    assert now - counted == cut


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_kept_is_a_400_that_names_the_keyword(
    client: openai.OpenAI, server: LiveServer, stream: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    before = server.metric("validation_failures_total", kind="request")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format=named(schema), stream=stream)
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["code"] == "unsupported_keyword"
    assert body["param"] == "response_format.json_schema.schema"
    assert "The schema keyword not is not supported" in body["message"]
    assert server.metric("validation_failures_total", kind="request") == before + 1


def test_free_and_structured_requests_share_steps(server: LiveServer) -> None:
    """A structured request among others changes none of them."""
    alone = server.probe()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 60, "structured_outputs": {"json": TRIP}}
    status, answer = server.post("/v1/completions", {**body, "n": 8, "seed": 4})
    assert status == 200 and server.probe() == alone
    assert all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])


def test_what_it_costs_is_measured(client: openai.OpenAI, server: LiveServer) -> None:
    structured(client, {"regex": "measured [0-9]"})
    for name in ("grammar_compile_seconds", "grammar_mask_seconds", "grammar_mask_wait_seconds"):
        assert server.metric(f"{name}_count") > 0, name


def test_the_page_of_the_docs_runs(server: LiveServer) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block.replace("http://127.0.0.1:8000", server.url), str(DOCS), "exec"), names)
    choice = names["answer"].choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), names["schema"])


def test_the_child_process_ends_with_the_server(start_server: StartServer) -> None:
    """One child of the engine, started with the first grammar, gone with the engine: killed too."""
    live = start_server().wait_ready()
    engine = live.engine_pid()
    assert children(engine) == []
    body = {"model": live.model, "prompt": "x", "structured_outputs": {"regex": "ab"}}
    assert live.post("/v1/completions", body)[0] == 200
    (trial,) = children(engine)
    live.process.kill()
    live.process.wait()
    wait_until(lambda: not alive(engine) and not alive(trial), 20)


def test_offline_too(tiny_model: Path) -> None:
    llm = LLM(tiny_model, kv_memory="16MiB")
    rules = [json_schema(TRIP, "schema"), regex("(ab|cd)+!", "regex"), None]
    params = [SamplingParams(grammar=rule, seed=6, max_tokens=ENOUGH) for rule in rules]
    trip, letters, free = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    jsonschema.validate(json.loads(trip.outputs[0].text), TRIP)
    assert re.fullmatch("(ab|cd)+!", letters.outputs[0].text)
    assert free.outputs[0].token_ids
    bad = SamplingParams(grammar=json_schema({"uniqueItems": True}, "schema"))
    with pytest.raises(RequestError, match="uniqueItems"):
        llm.generate(["a"], bad, use_tqdm=False)
    assert llm.engine.num_requests == 0
    llm.engine.step()
    llm.engine.check_integrity()
