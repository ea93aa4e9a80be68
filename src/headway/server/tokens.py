"""Text and tokens: POST /tokenize, /detokenize, /apply-template."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import RequestError
from headway.edge import body as bodies
from headway.edge.lanes import checkpoint
from headway.server import prompt_text
from headway.server.context import ContextAsked
from headway.server.endpoints import body_spec
from headway.server.models import ServedModel, ServerState
from headway.server.openai import chat
from headway.server.openai.schema import NO_OPS, ChatBody, chat_messages
from headway.server.shorten import shorten_chat
from headway.server.turn import answer_in_turn

TEMPLATE = body_spec(ChatBody, NO_OPS)


class TokenizeBody(msgspec.Struct):
    """POST /tokenize: a prompt or messages, with the fields of vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    context: ContextAsked | None = None


class DetokenizeBody(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


async def tokenize(state: ServerState, request: Request) -> Response:
    """POST /tokenize: answer with the ids of a prompt or of messages."""

    def answer(raw: dict[str, Any]) -> Any:
        body = bodies.typed(raw, TokenizeBody)
        model = state.named_or_first(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError(
                "Give either prompt or messages.", param="prompt", code="missing_required_parameter"
            )
        ids = prompt_ids(model, body)
        content = {"tokens": ids, "count": len(ids), "max_model_len": model.info().max_model_len}
        return content | ({"token_strs": token_strs(model, ids)} if body.return_token_strs else {})

    return await answer_in_turn(state, request, TokenizeBody, answer)


def prompt_ids(model: ServedModel, body: TokenizeBody) -> list[int]:
    """Return the ids of a prompt or of messages; RequestError for a text that is too long."""
    if body.prompt is not None:
        if body.context is not None:
            raise RequestError(
                "context needs messages: nothing of a prompt is marked.",
                param="context",
                code="unsupported_parameter",
            )
        specials = body.add_special_tokens
        return prompt_text.count(model, body.prompt, "prompt", add_special_tokens=specials)
    chat_body, _ = shorten_chat(model, ChatBody(messages=body.messages or []), body.context)
    tokenizer, messages = model.needs_tokenizer("messages"), chat_messages(chat_body.messages)
    prompt_text.check_messages(model, messages, counted=True)
    text = tokenizer.render(messages, add_generation_prompt=body.add_generation_prompt)
    return prompt_text.count(model, text, "messages", add_special_tokens=False)


def token_strs(model: ServedModel, ids: list[int]) -> list[str]:
    """Return the vocabulary entries of ids."""
    tokenizer = model.needs_tokenizer("prompt")
    checkpoint()
    entries = {token_id: tokenizer.token(token_id) for token_id in set(ids)}
    return [entries[token_id] for token_id in ids]


async def detokenize(state: ServerState, request: Request) -> Response:
    """POST /detokenize: answer with the text of token ids."""

    def answer(raw: dict[str, Any]) -> Any:
        body = bodies.typed(raw, DetokenizeBody)
        model = state.named_or_first(body.model)
        tokenizer, vocab_size = model.needs_tokenizer("tokens"), model.info().vocab_size
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocab_size:
            raise RequestError(
                f"tokens holds an id outside 0 … {vocab_size - 1}.",
                param="tokens",
                code="invalid_value",
            )
        return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return await answer_in_turn(state, request, DetokenizeBody, answer)


async def apply_template(state: ServerState, request: Request) -> Response:
    """POST /apply-template: answer with the prompt text of a chat body."""

    def answer(raw: dict[str, Any]) -> Any:
        body, _ = TEMPLATE.read(raw, state.options.strict_api)
        model = state.model(body.model)
        body, _ = shorten_chat(model, body, body.context)
        rendered = chat.render_chat(model, body, counted=True)
        return {"prompt": model.needs_tokenizer("messages").unquoted(rendered)}

    return await answer_in_turn(state, request, ChatBody, answer)
