"""Work on bodies in the tokenizer pool, where users take turns: small endpoints, and prompts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.edge import body as bodies
from headway.edge.errors import json_response
from headway.edge.principal import turn_of
from headway.server.generation import AnswerDialect, GenerationRow, IncomingRequest
from headway.server.models import ServerState

MAX_INLINE_BYTES = 4096
"""A prompt of a body up to this size is tokenized in 1-2 ms, faster than by way of a thread."""


async def prepare_in_turn(
    state: ServerState, row: GenerationRow, incoming: IncomingRequest
) -> AnswerDialect:
    """Run the `prepare` of a row on a request in its user's turn; raises RequestError."""
    work = partial(row.prepare, state, incoming)
    if not row.is_chat and incoming.num_bytes <= MAX_INLINE_BYTES:
        return work()
    user = turn_of(incoming.scope)
    return await state.pool.run(user, incoming.num_bytes, incoming.receive, work)


async def read_body(
    state: ServerState, request: Request, kind: type[msgspec.Struct]
) -> tuple[dict[str, Any], int]:
    """Read a body of `kind`; return its JSON object and its number of bytes."""
    return await bodies.read_object(
        request.receive,
        state.options.max_body,
        kind,
        pool=state.pool,
        user=turn_of(request.scope),
    )


async def answer_in_turn(
    state: ServerState,
    request: Request,
    kind: type[msgspec.Struct],
    answer: Callable[[dict[str, Any]], Any],
) -> Response:
    """Answer with the JSON of `answer(body)`, run in the tokenizer pool in its user's turn."""
    raw, num_bytes = await read_body(state, request, kind)
    work = partial(encode_answer, answer, raw)
    return await state.pool.run(turn_of(request.scope), num_bytes, request.receive, work)


def encode_answer(answer: Callable[[dict[str, Any]], Any], raw: dict[str, Any]) -> Response:
    """Return the response, with the JSON encoded in the same thread."""
    return json_response(answer(raw))
