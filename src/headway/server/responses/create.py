"""POST /v1/responses: items in, items out; /v1/responses/input_tokens: the number of their tokens.

A body becomes a chat (`edge/chat_builder.py`) of the stored conversation before it and its own
items. It is answered at once, as a stream, or in the background, and stored unless `store` is
false.
"""

import asyncio
import logging
from typing import Any

import msgspec

from headway.core.errors import EngineDownError, RequestError, ServerFaultError
from headway.edge.chat_builder import ChatBuilder
from headway.edge.errors import json_response
from headway.edge.event_stream import send_response
from headway.server.generation import IncomingRequest, Progress
from headway.server.models import ServerState
from headway.server.openai import chat
from headway.server.openai.schema import ChatBody
from headway.server.prompt_text import RENDERED_BYTES
from headway.server.responses.dialect import ResponsesDialect
from headway.server.responses.items import Item, add_items, with_ids
from headway.server.responses.schema import (
    InputBody,
    ResponsesBody,
    TextFormat,
    check,
    check_input,
    wants_logprobs,
)
from headway.server.responses.store import StoredResponse
from headway.server.responses.tools import Tools, offer_tools
from headway.server.session import Session
from headway.server.shorten import shorten_chat

PREFIX = "resp_"
MAX_BACKGROUND = 256

log = logging.getLogger(__name__)


def prepare(state: ServerState, incoming: IncomingRequest) -> ResponsesDialect:
    """Check the body, look up its conversation, render and encode; raises RequestError."""
    body: ResponsesBody = incoming.body
    request_id, owner = incoming.request_id, incoming.owner
    check(body)
    stored = wants_store(state, body)
    items, builder, tools = build_chat(state, body, request_id.removeprefix(PREFIX), owner)
    builder.copy_shared_fields(body)
    builder.set("max_completion_tokens", body.max_output_tokens, "max_output_tokens")
    builder.set("stop", body.stop, "stop")
    builder.set("service_tier", body.service_tier, "service_tier")
    builder.set("stream", body.stream, "stream")
    builder.set("top_logprobs", body.top_logprobs, "top_logprobs")
    builder.set("logprobs", wants_logprobs(body) or None, "include")
    incoming.ignored.extend(builder.unenforced)
    chat_body = builder.body(ChatBody)
    with builder.client_names():
        model = state.model(body.model)
        chat_body, cut = shorten_chat(model, chat_body, body.context, owner)
        prompt = chat.prompt_ids(model, chat_body)
        request = chat.build_request(state, incoming, chat_body, prompt, cut)
        request.sampling.grammar = builder.with_client_name(request.sampling.grammar)
    entry = StoredResponse(
        response_id=request_id,
        owner=owner,
        previous_id=body.previous_response_id,
        items=msgspec.json.encode(items),
    )
    return ResponsesDialect(state, Progress(request), body, tools, entry if stored else None)


def wants_store(state: ServerState, body: ResponsesBody) -> bool:
    """Whether the response is to be stored; RequestError where the server stores none."""
    possible = state.responses.limit_bytes > 0
    for name in ("store", "background"):
        if getattr(body, name) and not possible:
            raise RequestError(
                f"{name}: this server stores no responses (--response-memory 0).",
                param=name,
                code="unsupported_value",
            )
    return possible and body.store is not False


def build_chat(
    state: ServerState, body: InputBody, stem: str, owner: str
) -> tuple[list[Item], ChatBuilder, Tools]:
    """Return the body's own items, the chat of the whole conversation, and its tools."""
    builder = ChatBuilder()
    builder.set("model", body.model, "model")
    if body.instructions:
        builder.add_message({"role": "system", "content": body.instructions}, "instructions")
    for entry in state.responses.chain(body.previous_response_id, owner):
        add_items(builder, entry.input_items(), "previous_response_id")
        add_items(builder, entry.output_items(), "previous_response_id")
    items = resolve_references(state, with_ids(body.input, stem), owner)
    add_items(builder, items)
    builder.names["messages"] = "input"
    tools = offer_tools(builder, body.tools, body.tool_choice, body.parallel_tool_calls)
    if body.text is not None and body.text.format is not None:
        builder.set("response_format", response_format(body.text.format), "text.format")
        builder.names["response_format.json_schema"] = "text.format"
    effort = body.reasoning.effort if body.reasoning else None
    builder.set("reasoning_effort", effort, "reasoning.effort")
    builder.set("chat_template_kwargs", body.chat_template_kwargs, "chat_template_kwargs")
    return items, builder, tools


def resolve_references(state: ServerState, items: list[Item], owner: str) -> list[Item]:
    """Return the items with stored ones in place of references."""
    references = [item["id"] for item in items if item["type"] == "item_reference"]
    if not references:
        return items
    stored = state.responses.items(references, owner)
    sizes = {item_id: len(msgspec.json.encode(item)) for item_id, item in stored.items()}
    if sum(sizes.get(item_id, 0) for item_id in references) > RENDERED_BYTES:
        raise RequestError(
            f"The items that input refers to have more than {RENDERED_BYTES} bytes.",
            param="input",
            code="context_length_exceeded",
        )
    return [
        stored.get(item["id"], item) if item["type"] == "item_reference" else item for item in items
    ]


def response_format(format: TextFormat) -> dict[str, Any]:
    """Return `text.format` as chat's `response_format`, where a schema is one level deeper."""
    if format.type != "json_schema":
        return {"type": format.type, "schema": format.schema}
    fields = ("name", "schema", "strict", "description")
    given = {name: getattr(format, name) for name in fields if getattr(format, name) is not None}
    return {"type": "json_schema", "json_schema": given}


def count_tokens(state: ServerState, body: InputBody, owner: str) -> dict[str, Any]:
    """POST /v1/responses/input_tokens."""
    check_input(body)
    _, builder, _ = build_chat(state, body, "0", owner)
    chat_body = builder.body(ChatBody)
    with builder.client_names():
        model = state.model(body.model)
        chat_body, _ = shorten_chat(model, chat_body, body.context, owner)
        ids = chat.counted_prompt_ids(model, chat_body)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


# ── answering ───────────────────────────────────────────────────────────────────────────────


async def respond(session: Session) -> None:
    """Answer now, or answer that it is queued and continue in the background."""
    dialect = session.dialect
    assert isinstance(dialect, ResponsesDialect)
    if not dialect.background:
        await session.answer()
        return
    tasks = session.state.responses.tasks
    if len(tasks) >= MAX_BACKGROUND:
        raise EngineDownError(f"{MAX_BACKGROUND} responses run in the background already.")
    background = session.hand_over()
    task = asyncio.create_task(run_in_background(background, dialect))
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(lambda _: background.close())  # if it was cancelled before it began
    response = json_response(dialect.queued(task))
    await send_response(response, session.incoming.send, session.headers)


async def run_in_background(session: Session, dialect: ResponsesDialect) -> None:
    """Generate without a connection; the stored response records how it ends."""
    meter = session.request.caller.meter
    meter.num_running += 1
    try:
        async with session:
            await session.collect()
    except asyncio.CancelledError:
        dialect.cancelled()
        raise
    except RequestError as error:
        dialect.failure(error)
    except Exception:
        log.exception("response %s failed", session.request.request_id)
        dialect.failure(ServerFaultError())
    finally:
        meter.leave()
