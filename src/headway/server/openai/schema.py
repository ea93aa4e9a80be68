"""The bodies of /v1/chat/completions and /v1/completions, and what they ask of the sampler.

Types are checked by msgspec, ranges by `SamplingParams`; what is left is here. None is "not
given": then the model's generation_config.json decides, else OpenAI's default.
"""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.core.request import MAX_LOGPROBS, SamplingParams, check_range
from headway.core.service import MAX_PRIORITY
from headway.server.openai.calls import called_names, check_answer, checked_calls
from headway.server.openai.structured import asked_grammar
from headway.server.openai.tools import Tool

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
NO_OPS = frozenset(
    "user metadata store prompt_cache_key prompt_cache_retention safety_identifier "
    "verbosity prediction".split()
)
"""Accepted and without effect here; documented in docs/api.md."""
LATER = frozenset(
    "functions function_call guided_json "
    "guided_regex guided_choice guided_grammar bad_words "
    "modalities audio web_search_options use_beam_search length_penalty".split()
)
CHAT_ONLY = frozenset("tools tool_choice parallel_tool_calls".split())
"""Honoured by chat, refused elsewhere."""
MAX_SALT = 256
SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("allowed_token_ids", "skip_special_tokens", "include_stop_str_in_output"),
    "prompt_logprobs",
)


class StreamOptions(msgspec.Struct):
    """`stream_options`: whether a usage chunk closes the stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Common(msgspec.Struct, kw_only=True):
    """The fields that chat and completions share."""

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    slo: dict[str, Any] | None = None
    service_class: str | None = None
    service_tier: str | None = None
    priority: int | None = None
    timings: bool | None = None
    cache_salt: str | None = None


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
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


def sampling_params(
    body: Common,
    defaults: dict[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    max_n: int,
) -> SamplingParams:
    """What `body` asks of the sampler; raises RequestError that names the field."""
    if body.n is not None and body.n > max_n:
        raise RequestError(
            f"n is {body.n}; the maximum here is {max_n}.",
            param="n",
            code="integer_above_max_value",
        )
    values: dict[str, Any] = dict(defaults)
    for name in SAMPLING_FIELDS:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    stop = body.stop
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=[stop] if isinstance(stop, str) else stop or [],
        logit_bias=integer_keys(body.logit_bias or {}),
        grammar=asked_grammar(body.response_format, body.structured_outputs),
    )


def asked_priority(given: int | None) -> int | None:
    """vLLM's `priority`, lower first; RequestError when it is out of range."""
    if given is not None:
        check_range("priority", given, -MAX_PRIORITY, MAX_PRIORITY)
    return given


def integer_keys(bias: dict[str, float]) -> dict[int, float]:
    """{"50256": -100} → {50256: -100}."""
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError:
        raise RequestError(
            "logit_bias must map token ids to numbers.", param="logit_bias", code="invalid_value"
        ) from None


def check_common(body: Common) -> None:
    """What types and ranges do not say, for both endpoints."""
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


def check_chat(body: ChatBody) -> None:
    """What types and ranges do not say of a chat body."""
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
    """Messages as templates expect them: contents are strings; raises RequestError by message."""
    if not messages:
        raise RequestError("messages is empty.", param="messages", code="empty_array")
    checked = [one_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    names = called_names(checked)
    return [
        {"name": names[message["tool_call_id"]], **message}
        if message["role"] == "tool" and message["tool_call_id"] in names
        else message
        for message in checked
    ]


def one_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """One message, its parts joined to a string."""
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
    if role == "tool":
        check_answer(message, where)
    calls = changed.pop("tool_calls", None)
    if calls:
        changed["tool_calls"] = checked_calls(calls, f"{where}.tool_calls")
        changed["content"] = changed["content"] or ""
    return changed


def content_text(content: Any, where: str) -> str | None:
    """A string as it is; text parts joined; anything else is refused by name."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} must be a string or a list of parts.", param=where, code="invalid_type"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            name = f"{where}[{i}]"
            raise RequestError(
                f"{name} is of type {str(kind)[:40]!r}; this model reads text parts only.",
                param=name,
                code="unsupported_value",
            )
        texts.append(part[kind])
    return "\n".join(texts)
