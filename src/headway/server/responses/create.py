"""POST /v1/responses: items in, items out; /v1/responses/input_tokens: how long the items are.

A body becomes a chat (`translate.Chat`) of the stored conversation before it and its own items. It
is answered at once, as a stream, or in the background, and kept unless `store` is false.
"""

import asyncio
import logging
from typing import Any

import msgspec

from headway.core.errors import EngineDownError, RequestError, ServerFaultError
from headway.edge.errors import json_response
from headway.edge.event_stream import send_response
from headway.server.generation import Incoming, Progress
from headway.server.models import State
from headway.server.openai import chat
from headway.server.prompt_text import RENDERED_BYTES
from headway.server.responses.dialect import ResponsesDialect
from headway.server.responses.items import Item, numbered, say_items
from headway.server.responses.schema import (
    InputBody,
    ResponsesBody,
    TextFormat,
    check,
    check_input,
    wants_logprobs,
)
from headway.server.responses.store import Entry
from headway.server.responses.tools import Tools, offer_tools
from headway.server.session import Session
from headway.server.shorten import shortened
from headway.server.translate import Chat

PREFIX = "resp_"
MAX_BACKGROUND = 256

log = logging.getLogger(__name__)


def prepare(state: State, incoming: Incoming) -> ResponsesDialect:
    """Check the body, find what it goes on from, render and encode; raises RequestError."""
    body: ResponsesBody = incoming.body
    request_id, owner = incoming.request_id, incoming.owner
    check(body)
    stored = wants_store(state, body)
    items, asked, tools = conversation(state, body, request_id.removeprefix(PREFIX), owner)
    asked.share(body)
    asked.set("max_completion_tokens", body.max_output_tokens, "max_output_tokens")
    asked.set("stop", body.stop, "stop")
    asked.set("service_tier", body.service_tier, "service_tier")
    asked.set("stream", body.stream, "stream")
    asked.set("top_logprobs", body.top_logprobs, "top_logprobs")
    asked.set("logprobs", wants_logprobs(body) or None, "include")
    incoming.ignored.extend(asked.unheeded)
    chat_body = asked.body()
    with asked.told():
        model = state.model(body.model)
        chat_body, cut = shortened(model, chat_body, body.context, owner)
        prompt = chat.prompt_ids(model, chat_body)
        request = chat.request_of(state, incoming, chat_body, prompt, cut)
        request.sampling.grammar = asked.own(request.sampling.grammar)
    entry = Entry(
        response_id=request_id,
        owner=owner,
        previous_id=body.previous_response_id,
        items=msgspec.json.encode(items),
    )
    return ResponsesDialect(state, Progress(request), body, tools, entry if stored else None)


def wants_store(state: State, body: ResponsesBody) -> bool:
    """Whether the response is to be kept; RequestError where nothing can be."""
    possible = state.responses.limit_bytes > 0
    for name in ("store", "background"):
        if getattr(body, name) and not possible:
            raise RequestError(
                f"{name}: this server stores no responses (--response-memory 0).",
                param=name,
                code="unsupported_value",
            )
    return possible and body.store is not False


def conversation(
    state: State, body: InputBody, stem: str, owner: str
) -> tuple[list[Item], Chat, Tools]:
    """The body's own items, the chat of all there is to say, and the tools behind its functions."""
    asked = Chat()
    asked.set("model", body.model, "model")
    if body.instructions:
        asked.say({"role": "system", "content": body.instructions}, "instructions")
    for entry in state.responses.chain(body.previous_response_id, owner):
        say_items(asked, entry.input_items(), "previous_response_id")
        say_items(asked, entry.output_items(), "previous_response_id")
    items = resolved(state, numbered(body.input, stem), owner)
    say_items(asked, items)
    asked.names["messages"] = "input"
    tools = offer_tools(asked, body.tools, body.tool_choice, body.parallel_tool_calls)
    if body.text is not None and body.text.format is not None:
        asked.set("response_format", response_format(body.text.format), "text.format")
        asked.names["response_format.json_schema"] = "text.format"
    effort = body.reasoning.effort if body.reasoning else None
    asked.set("reasoning_effort", effort, "reasoning.effort")
    asked.set("chat_template_kwargs", body.chat_template_kwargs, "chat_template_kwargs")
    return items, asked, tools


def resolved(state: State, items: list[Item], owner: str) -> list[Item]:
    """The items, with those that are stored in place of references to them."""
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


def response_format(wanted: TextFormat) -> dict[str, Any]:
    """`text.format` as chat's `response_format`: a schema lies one level deeper there."""
    if wanted.type != "json_schema":
        return {"type": wanted.type, "schema": wanted.schema}
    fields = ("name", "schema", "strict", "description")
    given = {name: getattr(wanted, name) for name in fields if getattr(wanted, name) is not None}
    return {"type": "json_schema", "json_schema": given}


def count_tokens(state: State, body: InputBody, owner: str) -> dict[str, Any]:
    """POST /v1/responses/input_tokens."""
    check_input(body)
    _, asked, _ = conversation(state, body, "0", owner)
    chat_body = asked.body()
    with asked.told():
        model = state.model(body.model)
        chat_body, _ = shortened(model, chat_body, body.context, owner)
        ids = chat.counted_ids(model, chat_body)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


# ── answering ───────────────────────────────────────────────────────────────────────────────


async def respond(session: Session) -> None:
    """Answer now, or say that it is queued and go on in the background."""
    dialect = session.dialect
    assert isinstance(dialect, ResponsesDialect)
    if not dialect.background:
        await session.answer()
        return
    tasks = session.state.responses.tasks
    if len(tasks) >= MAX_BACKGROUND:
        raise EngineDownError(f"{MAX_BACKGROUND} responses run in the background already.")
    background = session.hand_over()
    task = asyncio.create_task(in_background(background, dialect))
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(lambda _: background.close())  # where it was cancelled before it began
    response = json_response(dialect.queued(task))
    await send_response(response, session.incoming.send, session.headers)


async def in_background(session: Session, dialect: ResponsesDialect) -> None:
    """Generate with nobody waiting; however it ends, the stored response says how."""
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
