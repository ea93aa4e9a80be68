"""Routes of stored responses: retrieve, delete, cancel, and the items a response was made from."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import RequestError
from headway.edge.errors import json_response
from headway.edge.principal import owner_of
from headway.server import body as bodies
from headway.server.models import ServerState
from headway.server.responses.create import count_tokens
from headway.server.responses.schema import NO_OPS, REFUSED, InputBody, check_include
from headway.server.responses.store import StoredResponse
from headway.server.turn import answer_in_turn

COUNT = bodies.BodySpec(InputBody, NO_OPS, REFUSED)
DEFAULT_ITEMS, MAX_ITEMS = 20, 100


def requested_entry(state: ServerState, request: Request) -> StoredResponse:
    """Return the stored response that the path names; RequestError 404 without one."""
    return state.responses.get(request.path_params["response_id"], owner_of(request.scope))


async def retrieve(state: ServerState, request: Request) -> Response:
    """GET /v1/responses/{response_id}."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise RequestError(
            "A stored response is not streamed again; ask for it without stream.",
            param="stream",
            code="unsupported_value",
        )
    check_include(request.query_params.getlist("include[]"))
    entry = requested_entry(state, request)
    return Response(entry.response, media_type="application/json")


async def delete(state: ServerState, request: Request) -> Response:
    """DELETE /v1/responses/{response_id}: drop it, and cancel it if it runs."""
    response_id = request.path_params["response_id"]
    state.responses.delete(response_id, owner_of(request.scope))
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel(state: ServerState, request: Request) -> Response:
    """POST /v1/responses/{response_id}/cancel: cancel a background response."""
    entry = requested_entry(state, request)
    response: dict[str, Any] = msgspec.json.decode(entry.response)
    if not response["background"]:
        raise RequestError(
            "Only a response with background: true can be cancelled; close the connection of "
            "another.",
            param="response_id",
            code="invalid_value",
        )
    if entry.task is not None:
        entry.task.cancel()
        response["status"] = "cancelled"
    return json_response(response)


async def input_items(state: ServerState, request: Request) -> Response:
    """GET /v1/responses/{response_id}/input_items: all items of the prompt, newest first."""
    params = request.query_params
    limit, order = limit_param(params.get("limit")), params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(
            f"order is {order[:40]!r}; it must be asc or desc.", param="order", code="invalid_value"
        )
    entry = requested_entry(state, request)
    items: list[dict[str, Any]] = []
    for before in state.responses.chain(entry.previous_id, entry.owner):
        items += [*before.input_items(), *before.output_items()]
    items += entry.input_items()
    if order == "desc":
        items.reverse()
    page = items_after(items, params.get("after"))
    shown = page[:limit]
    return json_response(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else "",
            "last_id": shown[-1]["id"] if shown else "",
            "has_more": len(page) > limit,
        }
    )


def limit_param(text: str | None) -> int:
    """Parse `?limit=` from 1 to 100, 20 without it."""
    limit = (
        DEFAULT_ITEMS if text is None else int(text) if text.isdecimal() and len(text) < 5 else 0
    )
    if not 1 <= limit <= MAX_ITEMS:
        raise RequestError(
            f"limit is {(text or '')[:40]!r}; it must be between 1 and {MAX_ITEMS}.",
            param="limit",
            code="invalid_value",
        )
    return limit


def items_after(items: list[dict[str, Any]], item_id: str | None) -> list[dict[str, Any]]:
    """Return the items after `item_id`; RequestError where it is not among them."""
    if item_id is None:
        return items
    places = [i for i, item in enumerate(items) if item.get("id") == item_id]
    if not places:
        raise RequestError(
            f"after: there is no item {item_id[:80]!r}.", param="after", code="item_not_found"
        )
    return items[places[0] + 1 :]


async def input_tokens(state: ServerState, request: Request) -> Response:
    """POST /v1/responses/input_tokens: answer with the number of tokens of a prompt."""

    def answer(raw: dict[str, Any]) -> Any:
        body, _ = COUNT.read(raw, state.options.strict_api)
        return count_tokens(state, body, owner_of(request.scope))

    return await answer_in_turn(state, request, InputBody, answer)
