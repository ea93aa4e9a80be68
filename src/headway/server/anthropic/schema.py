"""The bodies of /v1/messages and /v1/messages/count_tokens.

Types are checked by msgspec, most ranges by the chat that a body becomes, the rest here.
"""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.edge.anthropic_tools import ToolChoice, check_choice
from headway.server.context import ContextAsked
from headway.server.kv import KVField

NO_OPS = frozenset(
    "metadata cache_control speed inference_geo user_profile_id workspace_id diagnostics".split()
)
"""Accepted and without effect here; documented in docs/api.md."""
REFUSED = frozenset("container mcp_servers".split())
NESTED_NO_OPS = ("thinking.budget_tokens", "thinking.display")
"""Nested fields without effect, of which clients must send the first; named in a header."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = ("enabled", "adaptive", "disabled", "between_tools")


class Thinking(msgspec.Struct):
    """`thinking`: whether the template lets the model think; `NESTED_NO_OPS` has the rest."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class JSONFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config.format`, and its older place `output_format`: json_schema alone."""

    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """`output_config`: the format of the text, and the reasoning effort for the template."""

    format: JSONFormat | None = None
    effort: str | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """The fields of a prompt: POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JSONFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context: ContextAsked | None = None


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
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


def check(body: CountBody) -> None:
    """Raise RequestError for what types do not exclude."""
    check_choice("thinking.type", body.thinking.type if body.thinking else None, THINKING)
    config = body.output_config
    if config is not None:
        check_choice("output_config.effort", config.effort, EFFORTS)
        format_type = config.format.type if config.format else None
        check_choice("output_config.format.type", format_type, ("json_schema",))
    if body.output_format is not None:
        check_choice("output_format.type", body.output_format.type, ("json_schema",))
        if config is not None and config.format is not None:
            raise RequestError(
                "output_format and output_config.format are the same; give one.",
                param="output_format",
                code="invalid_value",
            )
