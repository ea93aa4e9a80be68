"""POST /v1/messages: messages of blocks in, a message of blocks out; and how long a prompt is.

A body becomes a chat (`translate.Chat`). `max_tokens` beyond the context is cut to what is left of
it, and the stop reason says so: clients of this dialect always send a large one. A last message of
the assistant is gone on with.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import RequestError
from headway.core.request import check_range
from headway.server import body as bodies
from headway.server.anthropic.blocks import blocks_of, say_messages, texts
from headway.server.anthropic.dialect import MessagesDialect
from headway.server.anthropic.schema import NO_OPS, REFUSED, CountBody, MessagesBody, check
from headway.server.anthropic.tools import offer_tools
from headway.server.generation import Incoming, Progress
from headway.server.models import State
from headway.server.openai import chat
from headway.server.openai.schema import ChatBody
from headway.server.shorten import shortened
from headway.server.translate import Chat
from headway.server.turn import in_turn

COUNT = bodies.Accepts(CountBody, NO_OPS, REFUSED)


def prepare(state: State, incoming: Incoming) -> MessagesDialect:
    """Check the body, render and encode its messages; raises RequestError."""
    body: MessagesBody = incoming.body
    model = state.model(body.model)
    asked = conversation(body)
    asked.share(body)
    asked.set("stop", body.stop_sequences, "stop_sequences")
    asked.set("stream", body.stream, "stream")
    asked.set("service_tier", body.service_tier, "service_tier")
    check_range("max_tokens", body.max_tokens, 1, None)
    chat_body = asked.body()
    chat_body, cut = shortened(model, chat_body, body.context, incoming.owner)
    prompt = encoded(state, asked, chat_body)
    left = model.info().max_model_len - len(prompt)
    if left < 1:
        raise RequestError(
            f"prompt is too long: {len(prompt)} tokens; the context holds "
            f"{model.info().max_model_len}, and an answer needs one.",
            param="messages",
            code="context_length_exceeded",
        )
    chat_body.max_completion_tokens = min(body.max_tokens, left)
    with asked.told():
        request = chat.request_of(state, incoming, chat_body, prompt, cut)
        request.sampling.grammar = asked.own(request.sampling.grammar)
    return MessagesDialect(Progress(request), cut=body.max_tokens > left)


def encoded(state: State, asked: Chat, chat_body: ChatBody) -> list[int]:
    """The ids of the chat's prompt; one that is too long is refused as clients here know it."""
    try:
        with asked.told():
            return chat.prompt_ids(state.model(chat_body.model), chat_body)
    except RequestError as error:
        if error.code == "context_length_exceeded":
            error.cause = f"prompt is too long: {error.cause}"
        raise


def conversation(body: CountBody) -> Chat:
    """The chat that `body` asks for."""
    check(body)
    asked = Chat()
    asked.set("model", body.model, "model")
    if body.system:
        content = texts(blocks_of(body.system, "system"), "system")
        asked.say({"role": "system", "content": content}, "system")
    if not body.messages:
        raise RequestError("messages is empty.", param="messages", code="empty_array")
    say_messages(asked, body.messages)
    last = asked.messages[-1]
    if last["role"] == "assistant":
        continue_last(asked, last)
    offer_tools(asked, body)
    ask_output(asked, body)
    options = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        options.setdefault("enable_thinking", body.thinking.type != "disabled")
    asked.set("chat_template_kwargs", options or None, "chat_template_kwargs")
    return asked


def continue_last(asked: Chat, last: dict[str, Any]) -> None:
    """Let the answer go on with the assistant's message that the client began."""
    if last.get("tool_calls") or last["content"] is None:
        raise RequestError(
            "A last message of the assistant must be text to go on with; send the results of its "
            "tools as a message of the user.",
            param="messages",
            code="invalid_value",
        )
    last["content"] = "\n".join(part["text"] for part in last["content"])
    asked.fields["continue_final_message"] = True
    asked.fields["add_generation_prompt"] = False


def ask_output(asked: Chat, body: CountBody) -> None:
    """`output_config`: a schema and an effort."""
    config = body.output_config
    if config is not None:
        asked.set("reasoning_effort", config.effort, "output_config.effort")
    wanted, origin = body.output_format, "output_format"
    if config is not None and config.format is not None:
        wanted, origin = config.format, "output_config.format"
    if wanted is not None:
        schema = {"name": "output", "schema": wanted.schema, "strict": True}
        asked.set("response_format", {"type": "json_schema", "json_schema": schema}, origin)
        asked.names["response_format.json_schema.schema"] = f"{origin}.schema"


# ── counting ────────────────────────────────────────────────────────────────────────────────


def num_tokens(state: State, body: CountBody) -> int:
    """Tokens of the prompt that `body` makes."""
    model = state.model(body.model)
    asked = conversation(body)
    chat_body, _ = shortened(model, asked.body(), body.context)
    with asked.told():
        return len(chat.counted_ids(model, chat_body))


async def count_tokens(state: State, request: Request) -> Response:
    """POST /v1/messages/count_tokens."""

    def answer(raw: dict[str, Any]) -> Any:
        body, _ = COUNT.read(raw, state.options.strict_api)
        return {"input_tokens": num_tokens(state, body)}

    return await in_turn(state, request, CountBody, answer)
