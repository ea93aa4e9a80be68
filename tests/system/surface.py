"""The surface, field by field: what each does, shown through the official clients.

`ROWS` is a table of proofs. Each is run for every endpoint that takes the field, whole and
streamed, by test_surface.py; `make surface` writes docs/surface.md from the same rows. A field that
no row proves fails the test.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai

PAGE = Path(__file__).parents[2] / "docs" / "surface.md"
EOS = 2
LENGTH = 32
CHAT, TEXT, RESPONSES, MESSAGES = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/responses", "/v1/messages"),
)
ENDPOINTS = (CHAT, TEXT, RESPONSES, MESSAGES)
CLIENTS = {CHAT: "openai", TEXT: "openai", RESPONSES: "openai", MESSAGES: "anthropic"}
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '{{ \'<tool_call>{"name": …, "arguments": …}</tool_call>\' }}<|im_end|>\n{% endif %}'
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% if enable_thinking %}think first\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that shows all that a request can tell it."""


@dataclass
class Got:
    """An answer, whichever endpoint it came from and however it came."""

    texts: list[str]
    finish: list[str | None]
    num_prompt: int = 0
    num_answer: int = 0
    logprobs: list[Any] = field(default_factory=list)
    raw: Any = None
    """The whole object, or the last chunk or event that has one."""
    chunks: list[Any] = field(default_factory=list)

    def extra(self, name: str) -> Any:
        """What is in the answer beside what the client knows."""
        return (self.raw.model_extra or {}).get(name)


Ask = Callable[..., Got]


@dataclass(frozen=True)
class Row:
    """One field: where it is taken, what is shown, and the proof; `whole`: it is not streamed."""

    name: str
    where: tuple[str, ...]
    shows: str
    proof: Callable[[Ask], None]
    whole: bool = False


# ── asking ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class Clients:
    """The official clients on one server."""

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic

    def ask(self, endpoint: str, streamed: bool) -> Ask:
        """Asks `endpoint` with the usual fields and some more; `...` leaves one out."""
        whole, stream, base = ADAPTERS[endpoint]
        cached: list[Got] = []

        def ask(**fields: Any) -> Got:
            if not fields and cached:
                return cached[0]
            asked = {k: v for k, v in {**base, **fields}.items() if v is not ...}
            got = stream(self, asked) if streamed else whole(self, asked)
            if not fields:
                cached.append(got)
            return got

        return ask


def call(create: Callable[..., Any], fields: dict[str, Any]) -> Any:
    """`create` with the fields it knows as arguments, the others in the body."""
    known = inspect.signature(create).parameters
    extra = {name: value for name, value in fields.items() if name not in known}
    return create(**{k: v for k, v in fields.items() if k in known}, extra_body=extra)


def whole_choices(clients: Clients, fields: dict[str, Any]) -> Got:
    """Chat or completions."""
    raw = call(creator(clients, fields), fields)
    texts = [c.message.content if "messages" in fields else c.text for c in raw.choices]
    return Got(
        texts=texts,
        finish=[c.finish_reason for c in raw.choices],
        num_prompt=raw.usage.prompt_tokens,
        num_answer=raw.usage.completion_tokens,
        logprobs=[entry for c in raw.choices for entry in entries(c)],
        raw=raw,
    )


def creator(clients: Clients, fields: dict[str, Any]) -> Callable[..., Any]:
    if "messages" in fields:
        return clients.openai.chat.completions.create
    return clients.openai.completions.create


def entries(choice: Any) -> list[Any]:
    """The log-probabilities of a choice, one for each token."""
    if choice.logprobs is None:
        return []
    return getattr(choice.logprobs, "content", None) or choice.logprobs.token_logprobs


def streamed_choices(clients: Clients, fields: dict[str, Any]) -> Got:
    fields = {"stream_options": {"include_usage": True}, **fields, "stream": True}
    chunks = list(call(creator(clients, fields), fields))
    got = Got(texts=[], finish=[], raw=chunks[-1], chunks=chunks)
    for chunk in chunks:
        if chunk.usage:
            got.num_prompt, got.num_answer = (
                chunk.usage.prompt_tokens,
                chunk.usage.completion_tokens,
            )
        for choice in chunk.choices:
            while len(got.texts) <= choice.index:
                got.texts.append("")
                got.finish.append(None)
            text = choice.delta.content if "messages" in fields else choice.text
            got.texts[choice.index] += text or ""
            got.finish[choice.index] = choice.finish_reason or got.finish[choice.index]
            got.logprobs += entries(choice)
    return got


def whole_response(clients: Clients, fields: dict[str, Any]) -> Got:
    return response_got(call(clients.openai.responses.create, fields))


def response_got(raw: Any) -> Got:
    details = raw.incomplete_details
    parts = [p for item in raw.output if item.type == "message" for p in item.content]
    return Got(
        texts=[raw.output_text],
        finish=["length" if details and details.reason == "max_output_tokens" else "stop"],
        num_prompt=raw.usage.input_tokens,
        num_answer=raw.usage.output_tokens,
        logprobs=[entry for part in parts for entry in part.logprobs or []],
        raw=raw,
    )


def streamed_response(clients: Clients, fields: dict[str, Any]) -> Got:
    events = list(call(clients.openai.responses.create, {**fields, "stream": True}))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    got = response_got(events[-1].response)
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == got.texts[0]
    got.chunks = events
    return got


FINISHES = {"max_tokens": "length", "model_context_window_exceeded": "length"}


def whole_message(clients: Clients, fields: dict[str, Any]) -> Got:
    return message_got(call(clients.anthropic.messages.create, fields))


def message_got(raw: Any) -> Got:
    return Got(
        texts=["".join(block.text for block in raw.content if block.type == "text")],
        finish=[FINISHES.get(raw.stop_reason, "stop")],
        num_prompt=raw.usage.input_tokens,
        num_answer=raw.usage.output_tokens,
        raw=raw,
    )


def streamed_message(clients: Clients, fields: dict[str, Any]) -> Got:
    events = list(call(clients.anthropic.messages.create, {**fields, "stream": True}))
    started, told = events[0].message, events[-2]
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta")
    return Got(
        texts=[text],
        finish=[FINISHES.get(told.delta.stop_reason, "stop")],
        num_prompt=started.usage.input_tokens,
        num_answer=told.usage.output_tokens,
        raw=told if told.model_extra else started,
        chunks=events,
    )


USER: Any = [{"role": "user", "content": "Tell me about the sea."}]
ADAPTERS: dict[str, tuple[Callable[..., Got], Callable[..., Got], dict[str, Any]]] = {
    CHAT: (
        whole_choices,
        streamed_choices,
        {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": LENGTH},
    ),
    TEXT: (
        whole_choices,
        streamed_choices,
        {"model": "tiny", "prompt": "Once upon", "temperature": 0, "max_tokens": LENGTH},
    ),
    RESPONSES: (
        whole_response,
        streamed_response,
        {
            "model": "tiny",
            "input": "Tell me about the sea.",
            "temperature": 0,
            "max_output_tokens": LENGTH,
        },
    ),
    MESSAGES: (
        whole_message,
        streamed_message,
        {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": LENGTH},
    ),
}


# ── proofs ──────────────────────────────────────────────────────────────────────────────────

HOT = {"temperature": 1.5, "seed": 5}
END_NOW = {"logit_bias": {str(EOS): 100}}


def follows(pattern: str, **fields: Any) -> Callable[[Ask], None]:
    """The answer's text is held to a grammar."""

    def proof(ask: Ask) -> None:
        got = ask(**fields)
        assert got.texts and all(re.fullmatch(pattern, text) for text in got.texts), got.texts

    return proof


def same(**fields: Any) -> Callable[[Ask], None]:
    """With these fields the answer is what it is without."""

    def proof(ask: Ask) -> None:
        assert ask(**fields).texts == ask().texts

    return proof


def changes(**fields: Any) -> Callable[[Ask], None]:
    """With these fields the answer is another."""

    def proof(ask: Ask) -> None:
        assert ask(**fields).texts != ask().texts

    return proof


def lengthens(**fields: Any) -> Callable[[Ask], None]:
    """With these fields the prompt is longer."""

    def proof(ask: Ask) -> None:
        assert ask(**fields).num_prompt > ask().num_prompt

    return proof


def tells(name: str, value: Any) -> Callable[[Ask], None]:
    """The field comes back in the answer, which is the same."""

    def proof(ask: Ask) -> None:
        got = ask(**{name: value})
        told = getattr(got.raw, name)
        assert (
            told.model_dump(exclude_none=True) if hasattr(told, "model_dump") else told
        ) == value
        assert got.texts == ask().texts

    return proof


def model(ask: Ask) -> None:
    got = ask(model="nickname")
    assert got.texts == ask().texts
    assert got.raw.model == "nickname" if hasattr(got.raw, "model") else True


def several(ask: Ask) -> None:
    got = ask(n=3)
    assert got.texts == ask().texts * 3 and got.num_answer == 3 * LENGTH


def seed(ask: Ask) -> None:
    first, again = ask(**HOT), ask(**HOT)
    assert first.texts == again.texts != ask(temperature=1.5, seed=6).texts


def stop(name: str) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        (text,) = ask().texts
        mark = text[4:8]
        got = ask(**{name: [mark]})
        assert got.texts == [text[: text.index(mark)]] and got.finish == ["stop"]

    return proof


def keeps_stop(name: str) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        (text,) = ask().texts
        mark = text[4:8]
        got = ask(**{name: [mark], "include_stop_str_in_output": True})
        assert got.texts == [text[: text.index(mark) + len(mark)]]

    return proof


def length(name: str) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        others = dict.fromkeys({"max_tokens", "max_output_tokens"} - {name}, ...)
        got = ask(**{**others, name: 5})
        assert got.num_answer == 5 and got.finish == ["length"]
        assert ask().texts[0].startswith(got.texts[0])

    return proof


def end_token(ask: Ask) -> None:
    got = ask(**END_NOW)
    assert (got.texts, got.finish, got.num_answer) == ([""], ["stop"], 1)


def ignores_end(ask: Ask) -> None:
    assert ask(**END_NOW, ignore_eos=True).num_answer == LENGTH


def at_least(ask: Ask) -> None:
    assert ask(**END_NOW, min_tokens=5).num_answer == 6


def stop_ids(ask: Ask) -> None:
    got = ask(allowed_token_ids=[40, 41], stop_token_ids=[40, 41])
    assert got.num_answer == 1 and got.finish == ["stop"]


def allowed(ask: Ask) -> None:
    (text,) = ask(allowed_token_ids=[40]).texts
    assert text == text[0] * LENGTH


def specials(ask: Ask) -> None:
    only = {"allowed_token_ids": [1]}
    assert ask(**only).texts == [""]
    assert ask(**only, skip_special_tokens=False).texts == ["<|im_start|>" * LENGTH]


def timings(ask: Ask) -> None:
    assert ask().extra("timings") is None
    assert ask(timings=True).extra("timings")["e2e_s"] > 0


def token_ids(ask: Ask) -> None:
    got = ask(return_token_ids=True)
    chunks = got.chunks or [got.raw]
    found = [t for c in chunks for x in c.choices for t in x.model_extra.get("token_ids") or []]
    assert len(found) == LENGTH


def prompt_scores(ask: Ask) -> None:
    got = ask(prompt_logprobs=1)
    scores = got.extra("prompt_logprobs") or got.raw.choices[0].model_extra["prompt_logprobs"]
    assert len(scores) == got.num_prompt and scores[0] is None


def usage_last(ask: Ask) -> None:
    if ask().chunks:
        plain = ask(stream_options={"include_usage": False})
        assert plain.num_prompt == 0 and all(chunk.choices for chunk in plain.chunks)
    assert ask().num_answer == LENGTH


def obfuscation(ask: Ask) -> None:
    if ask().chunks:
        assert ask(stream_options={"include_obfuscation": False}).texts == ask().texts


def parts(name: str, kind: str) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        content = [{"type": kind, "text": USER[0]["content"]}]
        assert ask(**{name: [{"role": "user", "content": content}]}).texts == ask().texts
        longer = [*USER, {"role": "assistant", "content": "It is"}, *USER]
        assert ask(**{name: longer}).num_prompt > ask().num_prompt

    return proof


def continued(ask: Ask) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    got = ask(messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert ask().num_prompt < got.num_prompt < ask(messages=begun).num_prompt


def no_prompt(ask: Ask) -> None:
    assert ask(add_generation_prompt=False).num_prompt < ask().num_prompt


def logprobs(**fields: Any) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        got = ask(**fields)
        assert len(got.logprobs) == LENGTH and got.texts == ask().texts
        assert ask().logprobs == []

    return proof


def alternatives(**fields: Any) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        assert all(len(entry.top_logprobs) == 3 for entry in ask(**fields).logprobs)

    return proof


def echoes(ask: Ask) -> None:
    assert ask(echo=True).texts == ["Once upon" + ask().texts[0]]


def prompts(ask: Ask) -> None:
    assert ask(prompt=["Once upon"]).texts == ask().texts
    assert ask(prompt=["Once upon", "The sea"]).texts[0] == ask().texts[0]
    assert ask(prompt=[40, 41, 42]).num_prompt == 3
    assert ask(prompt=[[40, 41], [42]]).num_prompt == 3


def stored(ask: Ask) -> None:
    assert ask(store=True).raw.model_extra["store"] is True
    assert ask(store=False).raw.model_extra["store"] is False


def goes_on(ask: Ask) -> None:
    first = ask(instructions="Be brief.")
    got = ask(previous_response_id=first.raw.id)
    assert got.raw.previous_response_id == first.raw.id
    assert got.num_prompt > ask().num_prompt


def system(ask: Ask) -> None:
    as_text = ask(system="Be brief.")
    assert as_text.num_prompt > ask().num_prompt
    assert ask(system=[{"type": "text", "text": "Be brief."}]).texts == as_text.texts


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMED = {"name": "get_weather", "description": "Tell the weather"}
TOOLS: dict[str, Any] = {
    CHAT: [{"type": "function", "function": {**NAMED, "parameters": CITY}}],
    RESPONSES: [{"type": "function", **NAMED, "parameters": CITY, "strict": False}],
    MESSAGES: [{**NAMED, "input_schema": CITY}],
}


YES = {"enum": ["yes", "no"]}


def text_format(ask: Ask) -> None:
    same(text={"format": {"type": "text"}, "verbosity": "low"})(ask)
    wanted = {"type": "json_schema", "name": "answer", "schema": YES}
    follows('"(yes|no)"', text={"format": wanted})(ask)


def output(ask: Ask) -> None:
    lengthens(output_config={"effort": "low"})(ask)
    follows('"(yes|no)"', output_config={"format": {"type": "json_schema", "schema": YES}})(ask)


def offered(endpoint: str) -> Callable[[Ask], None]:
    return lengthens(tools=TOOLS[endpoint])


def no_choice(endpoint: str, none: Any) -> Callable[[Ask], None]:
    return same(tools=TOOLS[endpoint], tool_choice=none)


def one_call(endpoint: str) -> Callable[[Ask], None]:
    return lengthens(tools=TOOLS[endpoint], parallel_tool_calls=False)


ALL, CHATS, LISTS = ENDPOINTS, (CHAT, RESPONSES, MESSAGES), (CHAT, TEXT)
OBJECTIVE = {"ttft_ms": 60_000, "tpot_ms": 10_000}
ROWS: list[Row] = [
    Row("model", ALL, "each served name answers, and is told", model),
    Row("stream", ALL, "what is streamed adds up to the whole", same()),
    Row("temperature", ALL, "0 takes the likeliest token, 1.5 does not", changes(**HOT)),
    Row("top_p", ALL, "next to 0 leaves the likeliest token", same(**HOT, top_p=1e-6)),
    Row("top_k", ALL, "1 leaves the likeliest token", same(**HOT, top_k=1)),
    Row("min_p", ALL, "1 leaves the likeliest token", same(**HOT, min_p=1)),
    Row("presence_penalty", ALL, "another answer", changes(presence_penalty=2)),
    Row("frequency_penalty", ALL, "another answer", changes(frequency_penalty=2)),
    Row("repetition_penalty", ALL, "another answer", changes(repetition_penalty=5)),
    Row("seed", ALL, "the same seed, the same answer; another, another", seed),
    Row("min_tokens", ALL, "no end token before", at_least),
    Row("ignore_eos", ALL, "end tokens do not end", ignores_end),
    Row("stop_token_ids", ALL, "they end the answer", stop_ids),
    Row("logit_bias", ALL, "100 on the end token ends at once", end_token),
    Row("allowed_token_ids", ALL, "nothing else is said", allowed),
    Row("skip_special_tokens", ALL, "special tokens are shown", specials),
    Row("timings", ALL, "times come with the answer", timings),
    Row("slo", ALL, "taken, see docs/telemetry.md", same(slo=OBJECTIVE)),
    Row("service_class", ALL, "taken, see docs/telemetry.md", same(service_class="default")),
    Row("service_tier", ALL, "taken, see docs/telemetry.md", same(service_tier="auto")),
    Row("stop", (CHAT, TEXT, RESPONSES), "the text ends before it", stop("stop")),
    Row("stop_sequences", (MESSAGES,), "the text ends before it", stop("stop_sequences")),
    Row(
        "include_stop_str_in_output",
        (CHAT, TEXT, RESPONSES),
        "the text ends after the stop string",
        keeps_stop("stop"),
    ),
    Row(
        "include_stop_str_in_output",
        (MESSAGES,),
        "the text ends after the stop string",
        keeps_stop("stop_sequences"),
    ),
    Row("max_tokens", (CHAT, TEXT, MESSAGES), "so many, and no more", length("max_tokens")),
    Row("max_completion_tokens", (CHAT,), "so many", length("max_completion_tokens")),
    Row("max_output_tokens", (RESPONSES,), "so many", length("max_output_tokens")),
    Row("n", LISTS, "so many choices", several),
    Row("return_token_ids", LISTS, "ids beside the text", token_ids),
    Row("prompt_logprobs", LISTS, "one entry for each prompt token", prompt_scores, whole=True),
    Row("stream_options", LISTS, "usage in the last chunk", usage_last),
    Row("stream_options", (RESPONSES,), "taken", obfuscation),
    Row(
        "response_format",
        LISTS,
        "a schema is kept",
        follows(
            '"(yes|no)"',
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": YES},
            },
        ),
    ),
    Row(
        "structured_outputs",
        ALL,
        "the whole text matches",
        follows("(ab|cd)!", structured_outputs={"regex": "(ab|cd)!"}),
    ),
    # chat
    Row("messages", (CHAT, MESSAGES), "strings, parts, several turns", parts("messages", "text")),
    Row("logprobs", (CHAT,), "one entry for each token", logprobs(logprobs=True)),
    Row("top_logprobs", (CHAT,), "so many", alternatives(logprobs=True, top_logprobs=3)),
    Row("add_generation_prompt", (CHAT,), "false leaves it out", no_prompt),
    Row("continue_final_message", (CHAT,), "the answer goes on with it", continued),
    Row("reasoning_effort", (CHAT,), "told to the template", lengthens(reasoning_effort="low")),
    Row(
        "chat_template_kwargs",
        CHATS,
        "told to the template",
        lengthens(chat_template_kwargs={"enable_thinking": True}),
    ),
    Row("tools", (CHAT,), "shown to the model", offered(CHAT)),
    Row("tool_choice", (CHAT,), "none hides them", no_choice(CHAT, "none")),
    Row("parallel_tool_calls", (CHAT,), "taken", one_call(CHAT)),
    # completions
    Row("prompt", (TEXT,), "text, texts, ids, lists of ids", prompts),
    Row("echo", (TEXT,), "the prompt before the answer", echoes),
    Row("logprobs", (TEXT,), "one entry for each token", logprobs(logprobs=2)),
    Row("best_of", (TEXT,), "as many as n", same(best_of=1)),
    Row("suffix", (TEXT,), "refused, null taken", same(suffix=None)),
    Row("add_special_tokens", (TEXT,), "taken", same(add_special_tokens=False)),
    # responses
    Row("input", (RESPONSES,), "text, items, several turns", parts("input", "input_text")),
    Row("instructions", (RESPONSES,), "before the input", lengthens(instructions="Be brief.")),
    Row("previous_response_id", (RESPONSES,), "the conversation goes on", goes_on),
    Row("store", (RESPONSES,), "kept, or not", stored),
    Row("background", (RESPONSES,), "false; true is shown below", same(background=False)),
    Row("metadata", (RESPONSES,), "told", tells("metadata", {"a": "b"})),
    Row(
        "include",
        (RESPONSES,),
        "log-probabilities",
        logprobs(include=["message.output_text.logprobs"]),
    ),
    Row("top_logprobs", (RESPONSES,), "so many", alternatives(top_logprobs=3)),
    Row("text", (RESPONSES,), "text; a schema is kept", text_format),
    Row("reasoning", (RESPONSES,), "told to the template", lengthens(reasoning={"effort": "low"})),
    Row("truncation", (RESPONSES,), "disabled", same(truncation="disabled")),
    Row("tools", (RESPONSES,), "shown to the model", offered(RESPONSES)),
    Row("tool_choice", (RESPONSES,), "none hides them", no_choice(RESPONSES, "none")),
    Row("parallel_tool_calls", (RESPONSES,), "taken", one_call(RESPONSES)),
    # messages
    Row("system", (MESSAGES,), "text or blocks, before the messages", system),
    Row("thinking", (MESSAGES,), "told to the template", lengthens(thinking={"type": "adaptive"})),
    Row("output_config", (MESSAGES,), "effort told to the template; a schema is kept", output),
    Row("tools", (MESSAGES,), "shown to the model", offered(MESSAGES)),
    Row("tool_choice", (MESSAGES,), "none hides them", no_choice(MESSAGES, {"type": "none"})),
]
NO_EFFECT: dict[str, Any] = {
    "user": "a",
    "metadata": {"user_id": "a"},
    "store": True,
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "safety_identifier": "a",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "a"},
    "max_tool_calls": 3,
    "image": {"context_compression": "auto"},
    "personality": "friendly",
    "client_metadata": {"a": "b"},
    "cache_control": {"type": "ephemeral"},
    "speed": "standard",
    "inference_geo": "us",
    "user_profile_id": "a",
    "workspace_id": "a",
    "diagnostics": {},
}
"""Values of the fields that are accepted without effect."""


def no_ops() -> Iterator[Row]:
    """A row for each field that an endpoint takes without effect."""
    from headway.server.app import GENERATIONS

    for endpoint in GENERATIONS:
        for name in sorted(endpoint.accepts.no_ops):
            yield Row(name, (endpoint.path,), "no effect", same(**{name: NO_EFFECT[name]}))


# ── the page ────────────────────────────────────────────────────────────────────────────────

INTRODUCTION = """# The surface, as tested

Written from the table of tests/system/surface.py by `make surface`; the tests run each row through
the official Python clients (openai for the first three endpoints, anthropic for the last).
**w** the whole answer, **s** the streamed one; "no effect" is accepted and changes nothing. A field
that is not here is refused by name, or ignored and named in a header: [the API](api.md).

| field | chat | completions | responses | messages | what is shown |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """docs/surface.md."""
    shown: dict[tuple[str, str], dict[str, str]] = {}
    for row in [*ROWS, *no_ops()]:
        cells = shown.setdefault((row.name, row.shows), {})
        cells |= dict.fromkeys(row.where, "w" if row.whole else "w s")
    lines = [
        f"| `{name}` | {' | '.join(cells.get(path, '') for path in ENDPOINTS)} | {shows} |"
        for (name, shows), cells in shown.items()
    ]
    return INTRODUCTION + "\n".join(lines) + "\n\n" + other_calls()


def other_calls() -> str:
    """The table of calls that generate nothing."""
    import test_surface

    rows = "\n".join(
        f"| {what} | {client} | {shows} |" for what, client, shows in calls(test_surface)
    )
    return "| call | client | what is shown |\n| --- | --- | --- |\n" + rows + "\n"


def calls(module: Any) -> Iterator[tuple[str, str, str]]:
    """Each test of a call, from its docstring: "GET /v1/models (openai): what is shown"."""
    for test in vars(module).values():
        text = inspect.getdoc(test) if inspect.isfunction(test) else None
        what, closing, shows = (text or "").partition("): ")
        path, opening, client = what.rpartition(" (")
        if closing and opening and test.__name__.startswith("test_call"):
            yield f"`{path}`", client, shows.rstrip(".")


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    PAGE.write_text(page(), encoding="utf-8")
