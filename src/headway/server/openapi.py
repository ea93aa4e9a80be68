"""The OpenAPI document, made from the same structs and tables that check requests.

Bodies come from their msgspec structs, ranges from `core.request`, names without effect and refused
ones from the table of endpoints, model names from the served models. It is served at /openapi.json;
a test holds that it names every route, and another sends what it describes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

import headway
from headway.batches.message_batches import RESULTS_TYPE, MessageBatchBody
from headway.batches.routes import CreateBody
from headway.core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOPS, RANGES
from headway.edge.errors import speaks_anthropic
from headway.server.anthropic.messages import COUNT as COUNT_MESSAGES
from headway.server.body import BodySpec
from headway.server.forgetting import ForgetBody
from headway.server.models import ServerState
from headway.server.openai.schema import ROLES, TRUNCATION_SIDES
from headway.server.responses.routes import COUNT as COUNT_RESPONSES
from headway.server.tokens import TEMPLATE, DetokenizeBody, TokenizeBody
from headway.telemetry.tasks import Outcome

REFERENCE = "#/components/schemas/{name}"
STATUSES = {
    400: "something in the request is wrong; `param` names it",
    401: "no key, or a wrong one",
    403: "the key may not do this",
    404: "there is no such model, path or stored thing",
    405: "the path does not take this method",
    413: "the body is too large",
    429: "the key's own limit is reached; `retry-after` says when to come back",
    500: "the server failed on this request",
    503: "not ready, or full; `retry-after` says when to come back",
    507: "the disk of files and batches is full",
}
MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
                {"type": "null"},
            ]
        },
    },
}
COUNT_AT_LEAST_ONE = {"minimum": 1}
LIMITS: dict[str, dict[str, Any]] = {
    **{
        name: {key: edge for key, edge in (("minimum", low), ("maximum", high)) if edge is not None}
        for name, (low, high) in RANGES.items()
    },
    "top_k": {"minimum": -1},
    "repeat_penalty": dict(zip(("minimum", "maximum"), RANGES["repetition_penalty"], strict=True)),
    "n_predict": {"minimum": -1},
    "truncate_prompt_tokens": {"minimum": -1},
    "truncation_side": {"enum": list(TRUNCATION_SIDES)},
    "max_completion_tokens": COUNT_AT_LEAST_ONE,
    "max_output_tokens": COUNT_AT_LEAST_ONE,
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "stop": {"minLength": 1, "maxItems": MAX_STOPS, "items": {"type": "string", "minLength": 1}},
    "stop_sequences": {"maxItems": MAX_STOPS, "items": {"type": "string", "minLength": 1}},
    "logit_bias": {
        "maxProperties": MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "messages": {"minItems": 1, "items": MESSAGE},
    "truncation": {"enum": ["disabled"]},
}
"""Limits of a field beyond its type; each goes to the branch of its type."""
BY_TYPE = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "minLength": ("string",),
    "enum": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "items": ("array",),
    "maxProperties": ("object",),
    "propertyNames": ("object",),
    "additionalProperties": ("object",),
}


class EndpointRow(Protocol):
    """A row of the table of endpoints that generate."""

    @property
    def path(self) -> str: ...
    @property
    def body_spec(self) -> BodySpec: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path: its body, and the keys that its answer always has."""

    summary: str
    body: BodySpec | None = None
    answers: tuple[str, ...] = ()
    streams: bool = False
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    media: str = "application/json"
    form: tuple[str, ...] = ()
    """Fields of a multipart form, the file first."""


MODEL_QUERY: dict[str, dict[str, Any]] = {"model": {"type": "string"}}
WINDOW: dict[str, dict[str, Any]] = {
    "seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 300},
    **MODEL_QUERY,
}
RESPONSE_KEYS = ("id", "object", "created_at", "status", "model", "output", "usage")
FILE_KEYS = ("id", "object", "bytes", "created_at", "filename", "purpose")
BATCH_KEYS = ("id", "object", "endpoint", "input_file_id", "status", "created_at")
MESSAGE_BATCH_KEYS = (
    *("id", "type", "processing_status", "request_counts", "created_at", "expires_at"),
    *("ended_at", "cancel_initiated_at", "archived_at", "results_url"),
)
PAGE: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1},
    "after": {"type": "string"},
}
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/health"): Operation(summary="200 while the process lives", answers=("status",)),
    ("GET", "/ready"): Operation(
        summary="200 when every model takes requests, else 503", answers=("status", "models")
    ),
    ("GET", "/version"): Operation(summary="The server's version", answers=("version",)),
    ("GET", "/metrics"): Operation(summary="Metrics for Prometheus", media="text/plain"),
    ("GET", "/stats"): Operation(
        summary="One model, now and over the last minutes",
        query={
            "seconds": {"type": "integer", "minimum": 1, "maximum": 300},
            "history": {"type": "boolean"},
            **MODEL_QUERY,
        },
    ),
    ("GET", "/trace"): Operation(summary="The last seconds as a Chrome trace", query=WINDOW),
    ("GET", "/calibration"): Operation(
        summary="What steps and the host took here, for headway simulate", query=WINDOW
    ),
    ("GET", "/openapi.json"): Operation(summary="This document", answers=("openapi", "paths")),
    ("GET", "/v1/load"): Operation(summary="The load of each model; for a gateway's key"),
    ("GET", "/v1/models"): Operation(summary="The models served", answers=("object", "data")),
    ("GET", "/v1/models/{name}"): Operation(summary="One model", answers=("id", "object")),
    ("POST", "/v1/chat/completions"): Operation(
        summary="Messages in, a message out",
        answers=("id", "object", "created", "model", "choices", "usage"),
        streams=True,
    ),
    ("POST", "/v1/completions"): Operation(
        summary="A prompt in, its continuation out",
        answers=("id", "object", "created", "model", "choices", "usage"),
        streams=True,
    ),
    ("POST", "/v1/responses"): Operation(
        summary="Items in, items out", answers=RESPONSE_KEYS, streams=True
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        summary="A stored response", answers=RESPONSE_KEYS
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        summary="Forget a stored response", answers=("id", "object", "deleted")
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        summary="End a response that runs in the background", answers=RESPONSE_KEYS
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        summary="What the model was given",
        answers=("object", "data", "has_more", "first_id", "last_id"),
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "order": {"enum": ["asc", "desc"]},
            "after": {"type": "string"},
        },
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        summary="How many tokens the items have",
        body=COUNT_RESPONSES,
        answers=("object", "input_tokens"),
    ),
    ("POST", "/v1/messages"): Operation(
        summary="Messages of blocks in, a message of blocks out",
        answers=("id", "type", "role", "model", "content", "stop_reason", "usage"),
        streams=True,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="How many tokens the messages have",
        body=COUNT_MESSAGES,
        answers=("input_tokens",),
    ),
    ("POST", "/v1/messages/batches"): Operation(
        summary="Run these messages when there is room",
        body=BodySpec(MessageBatchBody),
        answers=MESSAGE_BATCH_KEYS,
    ),
    ("GET", "/v1/messages/batches"): Operation(
        summary="The message batches of this key",
        answers=("data", "has_more", "first_id", "last_id"),
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
            "after_id": {"type": "string"},
            "before_id": {"type": "string"},
        },
    ),
    ("GET", "/v1/messages/batches/{id}"): Operation(
        summary="One message batch", answers=MESSAGE_BATCH_KEYS
    ),
    ("DELETE", "/v1/messages/batches/{id}"): Operation(
        summary="Delete a message batch that has ended", answers=("id", "type")
    ),
    ("POST", "/v1/messages/batches/{id}/cancel"): Operation(
        summary="End a message batch", answers=MESSAGE_BATCH_KEYS
    ),
    ("GET", "/v1/messages/batches/{id}/results"): Operation(
        summary="What became of each request", media=RESULTS_TYPE
    ),
    ("POST", "/v1/files"): Operation(
        summary="Upload a file", form=("file", "purpose"), answers=FILE_KEYS
    ),
    ("GET", "/v1/files"): Operation(
        summary="The files of this key",
        answers=("object", "data", "has_more"),
        query={**PAGE, "order": {"enum": ["asc", "desc"]}, "purpose": {"type": "string"}},
    ),
    ("GET", "/v1/files/{id}"): Operation(summary="One file", answers=FILE_KEYS),
    ("GET", "/v1/files/{id}/content"): Operation(
        summary="What is in a file", media="application/octet-stream"
    ),
    ("DELETE", "/v1/files/{id}"): Operation(
        summary="Delete a file", answers=("id", "object", "deleted")
    ),
    ("POST", "/v1/batches"): Operation(
        summary="Run the requests of a file", body=BodySpec(CreateBody), answers=BATCH_KEYS
    ),
    ("GET", "/v1/batches"): Operation(
        summary="The batches of this key", answers=("object", "data", "has_more"), query=PAGE
    ),
    ("GET", "/v1/batches/{id}"): Operation(summary="One batch", answers=BATCH_KEYS),
    ("POST", "/v1/batches/{id}/cancel"): Operation(summary="End a batch", answers=BATCH_KEYS),
    ("POST", "/v1/outcomes"): Operation(
        summary="Whether a task of this key has succeeded",
        body=BodySpec(Outcome),
        answers=("task_id", "success"),
    ),
    ("POST", "/cache/forget"): Operation(
        summary="Forget the KV blocks of this key",
        body=BodySpec(ForgetBody),
        answers=("object", "key", "cache_salt"),
    ),
    ("POST", "/tokenize"): Operation(
        summary="Text or messages in, token ids out",
        body=BodySpec(TokenizeBody),
        answers=("tokens", "count", "max_model_len"),
    ),
    ("POST", "/detokenize"): Operation(
        summary="Token ids in, text out", body=BodySpec(DetokenizeBody), answers=("prompt",)
    ),
    ("POST", "/apply-template"): Operation(
        summary="Messages in, the prompt's text out", body=TEMPLATE, answers=("prompt",)
    ),
}


def build_document(state: ServerState, rows: Iterable[EndpointRow]) -> dict[str, Any]:
    """Return the document of this server; `rows` are the endpoints that generate."""
    body_specs = {row.path: row.body_spec for row in rows}
    specs = {key: operation.body or body_specs.get(key[1]) for key, operation in OPERATIONS.items()}
    structs = list(dict.fromkeys(row.body for row in specs.values() if row is not None))
    references, schemas = msgspec.json.schema_components(structs, ref_template=REFERENCE)
    names = dict(zip(structs, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        spec = specs[method, path]
        entry: dict[str, Any]
        entry = paths.setdefault(path, {})[method.lower()] = describe(path, operation)
        if spec is not None:
            reference = names[spec.body]
            add_limits(schemas[reference["$ref"].rpartition("/")[2]], spec, state)
            entry["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": reference}},
            }
        elif operation.form:
            entry["requestBody"] = {"required": True, "content": form_content(operation.form)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": headway.__version__},
        "servers": [{"url": state.options.root_path.rstrip("/") or "/"}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": OPENAI_ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"x-api-key": []}, {}],
    }


def form_content(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of a multipart form, with the file as the first field."""
    fields: dict[str, Any] = {name: {"type": "string"} for name in names}
    fields[names[0]]["format"] = "binary"
    schema = {"type": "object", "required": list(names), "properties": fields}
    return {"multipart/form-data": {"schema": schema}}


def describe(path: str, operation: Operation) -> dict[str, Any]:
    """Return the parameters and responses of one operation, without its body."""
    answer: dict[str, Any] = {"type": "object", "required": list(operation.answers)}
    content = {operation.media: {"schema": answer if operation.answers else {}}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"description": "server-sent events"}}
    error = REFERENCE.format(name="AnthropicError" if speaks_anthropic(path) else "Error")
    fault = {"application/json": {"schema": {"$ref": error}}}
    return {
        "summary": operation.summary,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)}", path)
            ),
            *(
                {"name": name, "in": "query", "schema": schema}
                for name, schema in operation.query.items()
            ),
        ],
        "responses": {
            "200": {"description": operation.summary, "content": content},
            **{
                str(status): {"description": text, "content": {} if path == "/ready" else fault}
                for status, text in STATUSES.items()
            },
        },
    }


def add_limits(schema: dict[str, Any], spec: BodySpec, state: ServerState) -> None:
    """Add the limits that types do not state to the schema of a body."""
    properties: dict[str, Any] = schema["properties"]
    for name, limits in LIMITS.items():
        if name in properties:
            restrict(properties[name], limits)
    if "n" in properties:
        restrict(properties["n"], {"maximum": state.options.max_n})
    if "model" in properties:
        restrict(properties["model"], {"enum": list(state.models)})
    for name in sorted(spec.no_ops):
        properties.setdefault(name, {"description": "Accepted, without effect."})
    for name in sorted(spec.refused):
        properties.setdefault(name, {"type": "null", "description": "Refused: not honoured."})
    if state.options.strict_api:
        schema["additionalProperties"] = False


def restrict(schema: dict[str, Any], limits: dict[str, Any]) -> None:
    """Put each limit on the branch of `schema` that has its type."""
    for branch in schema.get("anyOf", [schema]):
        for key, value in limits.items():
            if branch.get("type") in BY_TYPE[key]:
                branch[key] = value


OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
