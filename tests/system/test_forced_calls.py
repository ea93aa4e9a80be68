"""A model that knows nothing calls tools all the same: required, named and strict, by grammar.

The model is the tiny one with random weights; what it writes is nonsense within the grammar.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from live_server import LiveServer
from tiny_model import tiny_config, tiny_weights, write_json, write_tokenizer
from tool_scripts import HERMES, MISTRAL, calls_of, gathered

pytest.importorskip("headway.engine.grammar", reason="this engine has no grammars")

MESSAGES: Any = [{"role": "user", "content": "How is Rome?"}]
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Oslo", "Köln"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "sure": {"type": "boolean"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "get_time": {
        "type": "object",
        "properties": {"zones": {"type": "array", "items": {"const": "CET"}, "maxItems": 3}},
        "required": ["zones"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
CITY_ALONE: Any = {"properties": {"city": {"const": "Rome"}}, "required": ["city"]}
LLAMA = (
    '{% if tools %}{{ tools | tojson }}{{ \'{"name": …, "parameters": …}\' }}{% endif %}'
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
GEMMA = (
    "{% if tools %}{{ tools | tojson }}<start_function_call>call:{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
QWEN_CODER = (
    "{% if tools %}{{ tools | tojson }}<tool_call><function={{ f }}><parameter={{ k }}>{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": (HERMES, ()),
    "mistral": (MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    "llama": (LLAMA, ("<|python_tag|>",)),
    "qwen3_coder": (QWEN_CODER, ("<tool_call>", "</tool_call>")),
    "gemma": (GEMMA, ("<start_function_call>", "<end_function_call>", "<escape>")),
}


def write_model(folder: Path, template: str, specials: tuple[str, ...]) -> Path:
    """The tiny model with a longer context, this template and these special tokens."""
    folder.mkdir(parents=True)
    tokenizer = write_tokenizer(folder)
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**config, "chat_template": template})
    size = tokenizer.get_vocab_size()
    write_json(folder / "config.json", {**tiny_config(size), "max_position_embeddings": 2048})
    from safetensors.torch import save_file

    save_file(tiny_weights(tokenizer, size), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=MODELS)
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of a random model that writes calls in one of the formats."""
    folder = tmp_path_factory.mktemp("forced") / request.param
    live = LiveServer(write_model(folder, *MODELS[request.param]), "--kv-memory=64MiB")
    try:
        yield live.wait_ready()
        assert live.metric("engine_restarts_total") == 0, live.stderr
    finally:
        live.close()


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def ask(client: openai.OpenAI, server: LiveServer, **fields: Any) -> Any:
    """An answer without thinking, which a model that knows nothing would not end."""
    asked = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, **fields}
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    return client.chat.completions.create(model=server.model, extra_body=options, **asked)


def check(calls: list[tuple[str, str]]) -> None:
    """Every call names a tool, and its arguments validate."""
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_required_calls_validate(server: LiveServer, client: openai.OpenAI) -> None:
    before = server.metric("tool_calls_total")
    seen = 0
    for seed in range(2):
        for stream in (False, True):
            answer = ask(
                client, server, tool_choice="required", temperature=1, seed=seed, stream=stream
            )
            if stream:
                content, _, calls, reason = gathered(answer)
            else:
                message = answer.choices[0].message
                content, calls = message.content or "", calls_of(message)
                reason = answer.choices[0].finish_reason
            assert content == "" and calls
            seen += len(calls)
            check(calls if reason == "tool_calls" else calls[:-1])
    assert server.metric("tool_calls_total") == before + seen


def test_a_named_call_is_that_one_alone(server: LiveServer, client: openai.OpenAI) -> None:
    for name in SCHEMAS:
        choice: Any = {"type": "function", "function": {"name": name}}
        answer = ask(client, server, tool_choice=choice, temperature=1, seed=1).choices[0]
        ((called, arguments),) = calls_of(answer.message)
        assert (called, answer.finish_reason) == (name, "tool_calls")
        check([(called, arguments)])


@pytest.mark.parametrize("parameters", [None, {"type": "object", "properties": {}}, CITY_ALONE])
def test_arguments_that_no_tool_declares_are_not_invented(
    server: LiveServer, client: openai.OpenAI, parameters: Any
) -> None:
    """A tool without parameters is called with {}; one with some, with these alone."""
    tool: Any = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    if parameters is None:
        del tool["function"]["parameters"]
    for seed in range(2):
        answer = ask(
            client,
            server,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1,
            seed=seed,
        ).choices[0]
        ((_, arguments),) = calls_of(answer.message)
        assert json.loads(arguments) == ({"city": "Rome"} if parameters is CITY_ALONE else {})


def test_one_call_where_calls_are_not_parallel(server: LiveServer, client: openai.OpenAI) -> None:
    for seed in range(2):
        answer = ask(
            client, server, tool_choice="required", parallel_tool_calls=False, seed=seed, n=2
        )
        for choice in answer.choices:
            calls = calls_of(choice.message)
            assert len(calls) == 1 and choice.finish_reason == "tool_calls"
            check(calls)
    assert server.metric("validation_failures_total", kind="tool_arguments") == 0


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("more", [{"min_tokens": 1}, {"allowed_token_ids": [5]}])
def test_what_a_grammar_of_calls_excludes_is_refused(
    server: LiveServer, choice: str, more: dict[str, Any]
) -> None:
    """It was dropped by the engine once, and its client waited for ever."""
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 30, **more}
    status, answer = server.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, next(iter(more)))
    assert "(tools) exclude each other" in answer["error"]["message"]


def test_a_free_choice_of_strict_tools_is_free(server: LiveServer, client: openai.OpenAI) -> None:
    answer = ask(client, server, temperature=1, seed=3, max_tokens=30).choices[0]
    assert answer.message.content and answer.finish_reason == "length"


def test_a_keyword_no_grammar_keeps_is_named_or_let_be(
    server: LiveServer, client: openai.OpenAI
) -> None:
    """Strict tools are refused for it; forced ones do without it."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
        "unevaluatedItems": False,
    }
    loose = {"type": "function", "function": {"name": "f", "parameters": schema}}
    calls = calls_of(ask(client, server, tools=[loose], tool_choice="required").choices[0].message)
    assert {name for name, _ in calls} == {"f"}
    if "gemma" in server.model or "qwen3_coder" in server.model:
        return  # keeps to the plain keywords only, strict or not
    strict = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="unevaluatedItems") as refused:
        ask(client, server, tools=[strict])
    assert refused.value.param == "tools"
