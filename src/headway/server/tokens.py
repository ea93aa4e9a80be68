"""Text and tokens: POST /tokenize, /detokenize, /apply-template."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import RequestError
from headway.engine.text import Tokenizer
from headway.server import body as bodies
from headway.server.endpoints import accepts
from headway.server.errors import json_response
from headway.server.models import State
from headway.server.openai import chat
from headway.server.openai.schema import NO_OPS, ChatBody, chat_messages

TEMPLATE = accepts(ChatBody, NO_OPS)


class TokenizeBody(msgspec.Struct):
    """POST /tokenize: vLLM's fields; a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


async def read_object(state: State, request: Request) -> dict[str, Any]:
    return bodies.parse_object(await bodies.read_body(request.receive, state.options.max_body))


async def tokenize(state: State, request: Request) -> Response:
    body = bodies.typed(await read_object(state, request), TokenizeBody)
    model = state.named_or_first(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(
            "Give either prompt or messages.", param="prompt", code="missing_required_parameter"
        )
    tokenizer = model.needs_tokenizer("prompt")
    ids = await asyncio.to_thread(prompt_ids, tokenizer, body)  # 10 MB of text take seconds
    content: dict[str, Any] = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": model.info().max_model_len,
    }
    if body.return_token_strs:
        content["token_strs"] = [tokenizer.token(token_id) for token_id in ids]
    return json_response(content)


def prompt_ids(tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    """The ids of a prompt or of messages."""
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    messages = chat_messages(body.messages or [])
    return tokenizer.chat_ids(messages, add_generation_prompt=body.add_generation_prompt)


async def detokenize(state: State, request: Request) -> Response:
    body = bodies.typed(await read_object(state, request), DetokenizeBody)
    model = state.named_or_first(body.model)
    tokenizer = model.needs_tokenizer("tokens")
    vocab_size = model.info().vocab_size
    if any(not 0 <= token < vocab_size for token in body.tokens):
        raise RequestError(
            f"tokens holds an id outside 0 … {vocab_size - 1}.",
            param="tokens",
            code="invalid_value",
        )
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


async def apply_template(state: State, request: Request) -> Response:
    """The text that the messages of a chat become; the body is a chat's."""
    body, _ = TEMPLATE.read(await read_object(state, request), state.options.strict_api)
    text = await asyncio.to_thread(chat.prompt_text, state.model(body.model), body)
    return json_response({"prompt": text})
