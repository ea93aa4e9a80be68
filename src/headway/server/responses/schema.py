"""The bodies of /v1/responses and /v1/responses/input_tokens.

Types are checked by msgspec, most ranges by the chat that a body becomes, the rest here.
"""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.server.context import ContextAsked
from headway.server.kv import KVField

NO_OPS = frozenset(
    "user safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "max_tool_calls image personality client_metadata".split()
)
"""Accepted and without effect here; documented in docs/api.md."""
REFUSED = frozenset("conversation prompt context_management moderation access_programs".split())
INCLUDABLE = frozenset(
    "message.output_text.logprobs reasoning.encrypted_content file_search_call.results "
    "web_search_call.results web_search_call.action.sources message.input_image.image_url "
    "computer_call_output.output.image_url code_interpreter_call.outputs".split()
)
"""Names that `include` may have; all but the first are of items that never occur here."""
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`text.format`: text, json_object, or json_schema with its name and schema."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    """`text`: the format of the text; `verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    """`reasoning`: `effort` goes to the chat template; there are no summaries."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`: there is no obfuscation."""

    include_obfuscation: bool = False


class InputBody(msgspec.Struct, kw_only=True):
    """The fields of a prompt: POST /v1/responses/input_tokens."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context: ContextAsked | None = None


class ResponsesBody(InputBody, kw_only=True):
    """POST /v1/responses."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    slo: dict[str, Any] | None = None
    service_class: str | None = None
    service_tier: str | None = None
    priority: int | None = None
    timings: bool | None = None
    cache_salt: str | None = None
    kv: KVField = None


def check_input(body: InputBody) -> None:
    """Raise RequestError for what types do not exclude in the prompt's fields."""
    if body.truncation not in (None, "disabled"):
        raise RequestError(
            f"truncation is {body.truncation[:40]!r}; it can only be disabled: send fewer items.",
            param="truncation",
            code="unsupported_value",
        )


def check(body: ResponsesBody) -> None:
    """Raise RequestError for what types and ranges do not exclude."""
    check_input(body)
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options needs stream: true.", param="stream_options", code="invalid_value"
        )
    if body.background and body.stream:
        raise RequestError(
            "background and stream exclude each other here; ask for the response by its id.",
            param="background",
            code="unsupported_value",
        )
    if body.background and body.store is False:
        raise RequestError("background needs store.", param="background", code="invalid_value")
    check_include(body.include or [])
    check_metadata(body.metadata or {})


def check_include(names: list[str]) -> None:
    """Raise RequestError for an unknown name in `include`."""
    for i, name in enumerate(names):
        if name not in INCLUDABLE:
            raise RequestError(
                f"include[{i}] is {name[:60]!r}; it must be one of "
                f"{', '.join(sorted(INCLUDABLE))}.",
                param=f"include[{i}]",
                code="invalid_value",
            )


def check_metadata(metadata: dict[str, str]) -> None:
    """Check the limits: 16 pairs, keys of 64 characters, values of 512."""
    if len(metadata) > MAX_PAIRS:
        raise RequestError(
            f"metadata has {len(metadata)} pairs; at most {MAX_PAIRS} are accepted.",
            param="metadata",
            code="object_above_max_properties",
        )
    for key, value in metadata.items():
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise RequestError(
                f"metadata may have keys of {MAX_KEY} and values of {MAX_VALUE} characters.",
                param="metadata",
                code="string_above_max_length",
            )


def wants_logprobs(body: ResponsesBody) -> bool:
    """Whether the text comes with log-probabilities."""
    return body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or [])
