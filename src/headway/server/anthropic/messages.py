"""POST /v1/messages: messages of blocks in, a message of blocks out; and the count of their tokens.

A body becomes a chat (`edge/chat_builder.py`). A `max_tokens` beyond the context is cut to its
rest, and the stop reason says so: clients of this dialect always send a large one. A last message
of the assistant is continued.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import RequestError
from headway.core.request import check_range
from headway.edge.anthropic_blocks import add_messages, content_blocks, text_parts
from headway.edge.anthropic_tools import offer_tools
from headway.edge.chat_builder import ChatBuilder
from headway.server import body as bodies
from headway.server.anthropic.dialect import MessagesDialect
from headway.server.anthropic.schema import NO_OPS, REFUSED, CountBody, MessagesBody, check
from headway.server.generation import IncomingRequest, Progress
from headway.server.models import ServerState
from headway.server.openai import chat
from headway.server.openai.schema import ChatBody
from headway.server.shorten import shorten_chat
from headway.server.turn import answer_in_turn

COUNT = bodies.BodySpec(CountBody, NO_OPS, REFUSED)


def prepare(state: ServerState, incoming: IncomingRequest) -> MessagesDialect:
    """Check the body, render and encode its messages; raises RequestError."""
    body: MessagesBody = incoming.body
    model = state.model(body.model)
    builder = build_chat(body)
    builder.copy_shared_fields(body)
    builder.set("stop", body.stop_sequences, "stop_sequences")
    builder.set("stream", body.stream, "stream")
    builder.set("service_tier", body.service_tier, "service_tier")
    check_range("max_tokens", body.max_tokens, 1, None)
    chat_body = builder.body(ChatBody)
    chat_body, cut = shorten_chat(model, chat_body, body.context, incoming.owner)
    prompt = encode_chat(state, builder, chat_body)
    room = model.info().max_model_len - len(prompt)
    if room < 1:
        raise RequestError(
            f"prompt is too long: {len(prompt)} tokens; the context holds "
            f"{model.info().max_model_len}, and an answer needs one.",
            param="messages",
            code="context_length_exceeded",
        )
    chat_body.max_completion_tokens = min(body.max_tokens, room)
    with builder.client_names():
        request = chat.build_request(state, incoming, chat_body, prompt, cut)
        request.sampling.grammar = builder.with_client_name(request.sampling.grammar)
    return MessagesDialect(Progress(request), cut=body.max_tokens > room)


def encode_chat(state: ServerState, builder: ChatBuilder, chat_body: ChatBody) -> list[int]:
    """Return the ids of the prompt; one that is too long is refused in Anthropic's words."""
    try:
        with builder.client_names():
            return chat.prompt_ids(state.model(chat_body.model), chat_body)
    except RequestError as error:
        if error.code == "context_length_exceeded":
            error.cause = f"prompt is too long: {error.cause}"
        raise


def build_chat(body: CountBody) -> ChatBuilder:
    """Build the chat of a body; raises RequestError."""
    check(body)
    builder = ChatBuilder()
    builder.set("model", body.model, "model")
    if body.system:
        content = text_parts(content_blocks(body.system, "system"), "system")
        builder.add_message({"role": "system", "content": content}, "system")
    if not body.messages:
        raise RequestError("messages is empty.", param="messages", code="empty_array")
    add_messages(builder, body.messages)
    last = builder.messages[-1]
    if last["role"] == "assistant":
        continue_last(builder, last)
    offer_tools(builder, body.tools, body.tool_choice)
    set_output_format(builder, body)
    options = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        options.setdefault("enable_thinking", body.thinking.type != "disabled")
    builder.set("chat_template_kwargs", options or None, "chat_template_kwargs")
    return builder


def continue_last(builder: ChatBuilder, last: dict[str, Any]) -> None:
    """Let the answer continue the last message of the assistant."""
    if last.get("tool_calls") or last["content"] is None:
        raise RequestError(
            "A last message of the assistant must be text to go on with; send the results of its "
            "tools as a message of the user.",
            param="messages",
            code="invalid_value",
        )
    last["content"] = "\n".join(part["text"] for part in last["content"])
    builder.fields["continue_final_message"] = True
    builder.fields["add_generation_prompt"] = False


def set_output_format(builder: ChatBuilder, body: CountBody) -> None:
    """Set the schema and the effort of `output_config`."""
    config = body.output_config
    if config is not None:
        builder.set("reasoning_effort", config.effort, "output_config.effort")
    format, origin = body.output_format, "output_format"
    if config is not None and config.format is not None:
        format, origin = config.format, "output_config.format"
    if format is not None:
        schema = {"name": "output", "schema": format.schema, "strict": True}
        builder.set("response_format", {"type": "json_schema", "json_schema": schema}, origin)
        builder.names["response_format.json_schema.schema"] = f"{origin}.schema"


# ── counting ────────────────────────────────────────────────────────────────────────────────


def count_prompt_tokens(state: ServerState, body: CountBody) -> int:
    """Return the number of tokens of the prompt of a body."""
    model = state.model(body.model)
    builder = build_chat(body)
    chat_body, _ = shorten_chat(model, builder.body(ChatBody), body.context)
    with builder.client_names():
        return len(chat.counted_prompt_ids(model, chat_body))


async def count_tokens(state: ServerState, request: Request) -> Response:
    """POST /v1/messages/count_tokens."""

    def answer(raw: dict[str, Any]) -> Any:
        body, _ = COUNT.read(raw, state.options.strict_api)
        return {"input_tokens": count_prompt_tokens(state, body)}

    return await answer_in_turn(state, request, CountBody, answer)
