"""The bodies of /v1/chat/completions and /v1/completions, and their sampling parameters.

Types are checked by msgspec, ranges by `SamplingParams`, the rest here. None means "not given":
then the model's generation_config.json decides, else OpenAI's default.
"""

import re
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.core.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    RANGES,
    SamplingParams,
    check_range,
)
from headway.core.service import MAX_PRIORITY
from headway.server.context import ContextAsked
from headway.server.kv import KVField
from headway.server.openai.calls import call_names, check_tool_message, template_calls
from headway.server.openai.documents import document_text
from headway.server.openai.structured import body_grammar
from headway.server.openai.tools import Tool

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
NO_OPS = frozenset(
    "user metadata store prompt_cache_key prompt_cache_retention safety_identifier "
    "verbosity prediction".split()
)
"""Accepted and without effect here; documented in docs/api.md."""
MAX_SALT = 256
TRUNCATION_SIDES = ("left", "right")
TOKEN_ID_PATTERN = re.compile(r"-?[0-9]{1,18}")
COMPUTED = {"max_tokens", "stop", "logprobs", "logit_bias", "grammar"}
"""Fields of `SamplingParams` that follow from several fields of a body."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`: usage in a last chunk, or in every chunk; there is no obfuscation."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Common(msgspec.Struct, kw_only=True):
    """The fields that chat and completions share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    format: dict[str, Any] | str | None = None
    slo: dict[str, Any] | None = None
    service_class: str | None = None
    service_tier: str | None = None
    priority: int | None = None
    timings: bool | None = None
    cache_salt: str | None = None
    kv: KVField = None


class ChatBody(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None
    context: ContextAsked | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


def sampling_params(
    body: Common,
    defaults: dict[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    max_n: int,
) -> SamplingParams:
    """Return the sampling parameters of `body`; RequestError names the field at fault."""
    if body.n is not None and body.n > max_n:
        raise RequestError(
            f"n is {body.n}; the maximum here is {max_n}.",
            param="n",
            code="integer_above_max_value",
        )
    values: dict[str, Any] = dict(defaults)
    for name in SamplingParams.__struct_fields__:
        value = None if name in COMPUTED else getattr(body, name)
        if value is not None:
            values[name] = value
    if body.repeat_penalty is not None:
        values["repetition_penalty"] = repeat_penalty(body)
    stop = body.stop
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=[stop] if isinstance(stop, str) else stop or [],
        logit_bias=parse_logit_bias(body.logit_bias or {}),
        grammar=body_grammar(body),
    )


def repeat_penalty(body: Common) -> float:
    """Return llama.cpp's name of repetition_penalty; RequestError names it."""
    value = body.repeat_penalty
    check_range("repeat_penalty", value, *RANGES["repetition_penalty"])
    if body.repetition_penalty not in (None, value):
        raise conflict_error("repeat_penalty", "repetition_penalty")
    assert value is not None
    return value


def answer_length(body: Common) -> int | None:
    """Return the maximum tokens of the answer, None where no field sets it.

    Read OpenAI's max_completion_tokens and max_tokens, and llama.cpp's n_predict (-1: no limit).
    """
    given: dict[str, int] = {}
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        value = getattr(body, name, None)
        if value is None or (name == "n_predict" and value == -1):
            continue
        lowest = 0 if name == "max_tokens" and isinstance(body, CompletionBody) else 1
        check_range(name, value, lowest, None)
        given[name] = value
    if len(set(given.values())) > 1:
        raise conflict_error(*list(given)[::-1][:2])
    return next(iter(given.values()), None)


def conflict_error(name: str, other: str) -> RequestError:
    """Return the error of two names of one field with different values."""
    return RequestError(f"{name} and {other} differ; give one.", param=name, code="invalid_value")


def check_priority(given: int | None) -> int | None:
    """Return vLLM's `priority` (lower first); RequestError where it is out of range."""
    if given is not None:
        check_range("priority", given, -MAX_PRIORITY, MAX_PRIORITY)
    return given


def parse_logit_bias(bias: dict[str, Any]) -> dict[int, float]:
    """Parse {"50256": -100} as {50256: -100}; RequestError names the key at fault."""
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS}.",
            param="logit_bias",
            code="object_above_max_properties",
        )
    biases = {}
    for key, value in bias.items():
        name = f"logit_bias[{key[:40]!r}]"
        if not TOKEN_ID_PATTERN.fullmatch(key):
            raise RequestError(
                f"{name}: the keys of logit_bias are token ids.",
                param="logit_bias",
                code="invalid_value",
            )
        check_range(name, value, -100, 100, integer=False, param="logit_bias")
        biases[int(key)] = value
    return biases


def check_common(body: Common) -> None:
    """Raise RequestError for what types and ranges do not exclude, in both endpoints."""
    check_truncation(body)
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options needs stream: true.", param="stream_options", code="invalid_value"
        )
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError(
            "prompt_logprobs cannot be streamed.", param="prompt_logprobs", code="invalid_value"
        )
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= MAX_SALT:
        raise RequestError(
            f"cache_salt has {len(body.cache_salt)} characters; it must have 1 to {MAX_SALT}.",
            param="cache_salt",
            code="invalid_value",
        )


def check_truncation(body: Common) -> None:
    """Check that `truncate_prompt_tokens` is -1 or >= 1, `truncation_side` left or right."""
    count, side = body.truncate_prompt_tokens, body.truncation_side
    if count is not None and count != -1:
        check_range("truncate_prompt_tokens", count, 1, None)
    if side not in (None, *TRUNCATION_SIDES):
        raise RequestError(
            f"truncation_side is {side[:40]!r}; it must be one of {', '.join(TRUNCATION_SIDES)}.",
            param="truncation_side",
            code="invalid_value",
        )


def truncate_prompt(body: Common, prompt: list[int], room: int) -> list[int]:
    """Return the last `truncate_prompt_tokens` of a prompt, or the first; -1: all with room."""
    count = room if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    if count is None or len(prompt) <= count:
        return prompt
    return prompt[:count] if body.truncation_side == "right" else prompt[len(prompt) - count :]


def check_chat(body: ChatBody) -> None:
    """Raise RequestError for what types and ranges do not exclude in a chat body."""
    check_common(body)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise RequestError(
                "top_logprobs needs logprobs: true.", param="top_logprobs", code="invalid_value"
            )
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            edge = "below_min" if body.top_logprobs < 0 else "above_max"
            raise RequestError(
                f"top_logprobs is {body.top_logprobs}; it must be between 0 and {MAX_LOGPROBS}.",
                param="top_logprobs",
                code=f"integer_{edge}_value",
            )
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
            code="invalid_value",
        )


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates expect them, with string contents; raises RequestError."""
    if not messages:
        raise RequestError("messages is empty.", param="messages", code="empty_array")
    checked = [check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    names = call_names(checked)
    return [
        {"name": names[message["tool_call_id"]], **message}
        if message["role"] == "tool" and message["tool_call_id"] in names
        else message
        for message in checked
    ]


def check_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return one message with its parts joined to a string; raises RequestError."""
    role = message.get("role")
    if role is None:
        raise RequestError(
            f"{where}.role is required.", param=f"{where}.role", code="missing_required_parameter"
        )
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {str(role)[:40]!r}; it must be one of {', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    content = message.get("content")
    if content is None and role != "assistant":
        raise RequestError(
            f"{where}.content is required.",
            param=f"{where}.content",
            code="missing_required_parameter",
        )
    changed = {**message, "content": content_text(content, f"{where}.content")}
    if role == "assistant":
        changed |= reasoning_fields(message, where)
    if role == "tool":
        check_tool_message(message, where)
    calls = changed.pop("tool_calls", None)
    if calls:
        changed["tool_calls"] = template_calls(calls, f"{where}.tool_calls")
        changed["content"] = changed["content"] or ""
    return changed


REASONING = ("reasoning", "reasoning_content")
"""Names of an assistant's reasoning: that of vLLM, and that of DeepSeek and Headway."""


def reasoning_fields(message: dict[str, Any], where: str) -> dict[str, str]:
    """Return the reasoning under both names, as templates read one or the other."""
    for name in REASONING:
        text = message.get(name)
        if text is not None and not isinstance(text, str):
            raise RequestError(
                f"{where}.{name} must be a string.", param=f"{where}.{name}", code="invalid_type"
            )
    given = next((message[name] for name in REASONING if message.get(name)), None)
    return {} if given is None else dict.fromkeys(REASONING, given)


def content_text(content: Any, where: str) -> str | None:
    """Return the text of a content: a string, or text and document parts joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} must be a string or a list of parts.", param=where, code="invalid_type"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "document":
            texts.append(document_text(part, f"{where}[{i}]"))
            continue
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            name = f"{where}[{i}]"
            raise RequestError(
                f"{name} is of type {str(kind)[:40]!r}; this model reads text parts only.",
                param=name,
                code="unsupported_value",
            )
        texts.append(part[kind])
    return "\n".join(texts)
