"""The surface, field by field: what each does, shown through the official clients.

`ROWS` is a table of proofs. Each is run for every endpoint that takes the field, whole and
streamed, by test_surface.py; `make surface` writes docs/surface.md from the same rows. A field that
no row proves fails the test.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import surface_proofs as prove
from surface_clients import CHAT, ENDPOINTS, MESSAGES, RESPONSES, TEXT, Ask

PAGE = Path(__file__).parents[2] / "docs" / "surface.md"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '{{ \'<tool_call>{"name": …, "arguments": …}</tool_call>\' }}<|im_end|>\n{% endif %}'
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% for d in documents or [] %}{{ d.text }}\n{% endfor %}"
    "{% if enable_thinking %}think first\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that shows all that a request can tell it."""


@dataclass(frozen=True)
class Row:
    """One field: where it is taken, what is shown, and the proof; `whole`: it is not streamed."""

    name: str
    where: tuple[str, ...]
    shows: str
    proof: Callable[[Ask], None]
    whole: bool = False


ALL, CHATS, LISTS = ENDPOINTS, (CHAT, RESPONSES, MESSAGES), (CHAT, TEXT)
OBJECTIVE = {"ttft_ms": 60_000, "tpot_ms": 10_000}
ROWS: list[Row] = [
    Row("model", ALL, "each served name answers, and is told", prove.model),
    Row("stream", ALL, "what is streamed adds up to the whole", prove.Same()),
    Row(
        "temperature", ALL, "0 takes the likeliest token, 1.5 does not", prove.changes(**prove.HOT)
    ),
    Row("top_p", ALL, "next to 0 leaves the likeliest token", prove.Same(**prove.HOT, top_p=1e-6)),
    Row("top_k", ALL, "1 leaves the likeliest token", prove.Same(**prove.HOT, top_k=1)),
    Row("min_p", ALL, "1 leaves the likeliest token", prove.Same(**prove.HOT, min_p=1)),
    Row("presence_penalty", ALL, "another answer", prove.changes(presence_penalty=2)),
    Row("frequency_penalty", ALL, "another answer", prove.changes(frequency_penalty=2)),
    Row("repetition_penalty", ALL, "another answer", prove.changes(repetition_penalty=5)),
    Row("repeat_penalty", LISTS, "llama.cpp's name of it", prove.changes(repeat_penalty=5)),
    Row("seed", ALL, "the same seed, the same answer; another, another", prove.seed),
    Row("min_tokens", ALL, "no end token before", prove.at_least),
    Row("ignore_eos", ALL, "end tokens do not end", prove.ignores_end),
    Row("stop_token_ids", ALL, "they end the answer", prove.stop_ids),
    Row("logit_bias", ALL, "100 on the end token ends at once", prove.end_token),
    Row("allowed_token_ids", ALL, "nothing else is said", prove.allowed),
    Row("skip_special_tokens", ALL, "special tokens are shown", prove.specials),
    Row("timings", ALL, "times come with the answer", prove.timings),
    Row("cache_salt", ALL, "kept apart from other salts", prove.Same(cache_salt="mine")),
    Row("kv", ALL, "exact is honoured, and what is not held refused", prove.Same(kv="exact")),
    Row(
        "context",
        CHATS,
        "nothing is cut where nothing is marked",
        prove.Same(context={"keep": 0.5, "method": "random"}),
    ),
    Row("slo", ALL, "taken, see docs/admission.md", prove.Same(slo=OBJECTIVE)),
    Row("service_class", ALL, "taken, see docs/admission.md", prove.Same(service_class="default")),
    Row("service_tier", ALL, "taken, see docs/admission.md", prove.Same(service_tier="auto")),
    Row("priority", ALL, "taken, see docs/admission.md", prove.Same(priority=-1)),
    Row("stop", (CHAT, TEXT, RESPONSES), "the text ends before it", prove.stop("stop")),
    Row("stop_sequences", (MESSAGES,), "the text ends before it", prove.stop("stop_sequences")),
    Row(
        "include_stop_str_in_output",
        (CHAT, TEXT, RESPONSES),
        "the text ends after the stop string",
        prove.keeps_stop("stop"),
    ),
    Row(
        "include_stop_str_in_output",
        (MESSAGES,),
        "the text ends after the stop string",
        prove.keeps_stop("stop_sequences"),
    ),
    Row("max_tokens", (CHAT, TEXT, MESSAGES), "so many, and no more", prove.length("max_tokens")),
    Row("max_completion_tokens", (CHAT,), "so many", prove.length("max_completion_tokens")),
    Row("max_output_tokens", (RESPONSES,), "so many", prove.length("max_output_tokens")),
    Row("n_predict", LISTS, "so many; -1 is no limit", prove.length("n_predict")),
    Row("n", LISTS, "so many choices", prove.several),
    Row("return_token_ids", LISTS, "ids beside the text, the prompt's first", prove.token_ids),
    Row("return_tokens_as_token_ids", LISTS, "token_id:5 in logprobs", prove.tokens_as_ids),
    Row("truncate_prompt_tokens", LISTS, "the last so many; -1: what has room", prove.truncates),
    Row("truncation_side", LISTS, "right keeps the first", prove.truncates_right),
    Row("add_special_tokens", LISTS, "taken", prove.Same(add_special_tokens=False)),
    Row(
        "prompt_logprobs", LISTS, "one entry for each prompt token", prove.prompt_scores, whole=True
    ),
    Row("stream_options", LISTS, "usage in the last chunk, or in each", prove.usage_last),
    Row("stream_options", (RESPONSES,), "taken", prove.obfuscation),
    Row(
        "response_format",
        LISTS,
        "a schema is kept",
        prove.follows(
            '"(yes|no)"',
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": prove.YES},
            },
        ),
    ),
    *(Row(name, LISTS, shows, proof) for name, shows, proof in prove.CONSTRAINTS),
    Row(
        "structured_outputs",
        ALL,
        "the whole text matches",
        prove.follows("(ab|cd)!", structured_outputs={"regex": "(ab|cd)!"}),
    ),
    # chat
    Row(
        "messages",
        (CHAT, MESSAGES),
        "strings, parts, several turns",
        prove.parts("messages", "text"),
    ),
    Row("logprobs", (CHAT,), "one entry for each token", prove.logprobs(logprobs=True)),
    Row("top_logprobs", (CHAT,), "so many", prove.alternatives(logprobs=True, top_logprobs=3)),
    Row("add_generation_prompt", (CHAT,), "false leaves it out", prove.no_prompt),
    Row("continue_final_message", (CHAT,), "the answer goes on with it", prove.continued),
    Row(
        "reasoning_effort", (CHAT,), "told to the template", prove.lengthens(reasoning_effort="low")
    ),
    Row("documents", (CHAT,), "told to the template", prove.lengthens(documents=[{"text": "a"}])),
    Row("include_reasoning", (CHAT,), "false leaves reasoning out", prove.no_reasoning),
    Row("echo", (CHAT,), "the assistant's last message before the answer", prove.echoes_chat),
    Row(
        "chat_template_kwargs",
        CHATS,
        "told to the template",
        prove.lengthens(chat_template_kwargs={"enable_thinking": True}),
    ),
    Row("tools", (CHAT,), "shown to the model", prove.offered(CHAT)),
    Row("tool_choice", (CHAT,), "none hides them", prove.no_choice(CHAT, "none")),
    Row("parallel_tool_calls", (CHAT,), "taken", prove.one_call(CHAT)),
    # completions
    Row("prompt", (TEXT,), "text, texts, ids, lists of ids", prove.prompts),
    Row("echo", (TEXT,), "the prompt before the answer", prove.echoes),
    Row("logprobs", (TEXT,), "one entry for each token", prove.logprobs(logprobs=2)),
    Row("best_of", (TEXT,), "as many as n", prove.Same(best_of=1)),
    Row("suffix", (TEXT,), "refused, null taken", prove.Same(suffix=None)),
    # responses
    Row("input", (RESPONSES,), "text, items, several turns", prove.parts("input", "input_text")),
    Row(
        "instructions", (RESPONSES,), "before the input", prove.lengthens(instructions="Be brief.")
    ),
    Row("previous_response_id", (RESPONSES,), "the conversation goes on", prove.goes_on),
    Row("store", (RESPONSES,), "kept, or not", prove.stored),
    Row("background", (RESPONSES,), "false; true is shown below", prove.Same(background=False)),
    Row("metadata", (RESPONSES,), "told", prove.tells("metadata", {"a": "b"})),
    Row(
        "include",
        (RESPONSES,),
        "log-probabilities",
        prove.logprobs(include=["message.output_text.logprobs"]),
    ),
    Row("top_logprobs", (RESPONSES,), "so many", prove.alternatives(top_logprobs=3)),
    Row("text", (RESPONSES,), "text; a schema is kept", prove.text_format),
    Row(
        "reasoning",
        (RESPONSES,),
        "told to the template",
        prove.lengthens(reasoning={"effort": "low"}),
    ),
    Row("truncation", (RESPONSES,), "disabled", prove.Same(truncation="disabled")),
    Row("tools", (RESPONSES,), "shown to the model", prove.offered(RESPONSES)),
    Row("tool_choice", (RESPONSES,), "none hides them", prove.no_choice(RESPONSES, "none")),
    Row("parallel_tool_calls", (RESPONSES,), "taken", prove.one_call(RESPONSES)),
    # messages
    Row("system", (MESSAGES,), "text or blocks, before the messages", prove.system),
    Row(
        "thinking",
        (MESSAGES,),
        "told to the template",
        prove.lengthens(thinking={"type": "adaptive"}),
    ),
    Row(
        "output_config", (MESSAGES,), "effort told to the template; a schema is kept", prove.output
    ),
    Row(
        "output_format",
        (MESSAGES,),
        "the older place of output_config.format",
        prove.follows('"(yes|no)"', output_format={"type": "json_schema", "schema": prove.YES}),
    ),
    Row("tools", (MESSAGES,), "shown to the model", prove.offered(MESSAGES)),
    Row("tool_choice", (MESSAGES,), "none hides them", prove.no_choice(MESSAGES, {"type": "none"})),
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
        for name in sorted(endpoint.body_spec.no_ops):
            yield Row(name, (endpoint.path,), "no effect", prove.Same(**{name: NO_EFFECT[name]}))


# ── the page ────────────────────────────────────────────────────────────────────────────────────

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
    import test_surface_calls

    rows = "\n".join(
        f"| {what} | {client} | {shows} |" for what, client, shows in calls(test_surface_calls)
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
