"""The OpenAPI document says what is accepted: every route, every field, every range."""

import re
from typing import Any

import pytest

from headway.batches.files.routes import FILE_ROUTES
from headway.batches.message_batches import MESSAGE_BATCH_ROUTES
from headway.batches.routes import BATCH_ROUTES
from headway.config.options import Bytes, ServerOptions
from headway.core.request import RANGES
from headway.server import page
from headway.server.app import GENERATIONS, SMALL_ROUTES
from headway.server.models import ServerState
from headway.server.openapi import OPERATIONS, build_document


def state(**options: Any) -> ServerState:
    return ServerState(models={"a": None, "b": None}, options=ServerOptions(**options))  # type: ignore


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return build_document(state(), GENERATIONS)


def body(told: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of a POST's body."""
    content = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema: dict[str, Any] = told["components"]["schemas"][content["schema"]["$ref"].split("/")[-1]]
    return schema


def test_the_document_has_every_route_and_nothing_else(told: dict[str, Any]) -> None:
    served = {("POST", row.path) for row in GENERATIONS}
    small = [*SMALL_ROUTES, *FILE_ROUTES, *BATCH_ROUTES, *MESSAGE_BATCH_ROUTES]
    served |= {(method, path.replace(":path", "")) for method, path, _ in small}
    assert served == set(OPERATIONS)
    assert served == {(m.upper(), path) for path, ms in told["paths"].items() for m in ms}
    assert not served & {("GET", path) for path in page.PATHS}


def test_every_reference_leads_somewhere(told: dict[str, Any]) -> None:
    import msgspec

    names = re.findall(rb'"#/components/schemas/([^"]+)"', msgspec.json.encode(told))
    assert len(set(names)) > 10
    assert {name.decode() for name in names} <= set(told["components"]["schemas"])


@pytest.mark.parametrize("row", GENERATIONS, ids=lambda row: row.path)
def test_the_document_has_every_field_with_its_range(told: dict[str, Any], row: Any) -> None:
    properties = body(told, row.path)["properties"]
    fields = set(row.body_spec.body.__struct_fields__)
    assert set(properties) == fields | row.body_spec.no_ops | row.body_spec.refused
    for name in fields & set(RANGES) - {"max_tokens", "logprobs", "top_k"}:
        low, high = RANGES[name]
        branches = properties[name]["anyOf"]
        number = next(b for b in branches if b["type"] in ("integer", "number"))
        assert number["minimum"] == low
        assert number["maximum"] == (16 if name == "n" else high)
    names, null = properties["model"]["anyOf"]
    assert names["enum"] == ["a", "b"] and null["type"] == "null"


def test_strict_servers_say_that_they_are() -> None:
    strict = build_document(state(strict_api=True), GENERATIONS)
    assert body(strict, "/v1/chat/completions")["additionalProperties"] is False
    loose = build_document(state(), GENERATIONS)
    assert "additionalProperties" not in body(loose, "/v1/chat/completions")


def test_what_is_without_effect_or_refused_is_called_so(told: dict[str, Any]) -> None:
    for row in GENERATIONS:
        properties = body(told, row.path)["properties"]
        assert all(
            "without effect" in properties[name]["description"] for name in row.body_spec.no_ops
        )
        assert all(properties[name]["type"] == "null" for name in row.body_spec.refused)


def test_errors_have_the_shape_of_their_dialect(told: dict[str, Any]) -> None:
    for path, methods in told["paths"].items():
        for operation in methods.values():
            if path == "/ready":
                continue
            content = operation["responses"]["400"]["content"]["application/json"]["schema"]
            wanted = "AnthropicError" if path.startswith("/v1/messages") else "Error"
            assert content == {"$ref": f"#/components/schemas/{wanted}"}


def test_a_server_without_memory_still_has_a_document() -> None:
    assert build_document(state(response_memory=Bytes(0)), GENERATIONS)["openapi"] == "3.1.0"
