"""Work on a body waits for its turn in the tokenizer pool: small endpoints, and prompts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.edge import body as bodies
from headway.edge.errors import json_response
from headway.edge.principal import turn_of
from headway.server.generation import Dialect, GenerationRow, Incoming
from headway.server.models import State

INLINE_BYTES = 4096
"""The prompt of so small a body is tokenized in a millisecond or two, sooner than in a thread."""


async def prepared(state: State, row: GenerationRow, incoming: Incoming) -> Dialect:
    """What a row's `prepare` makes of a request, in its sender's turn; raises RequestError."""
    work = partial(row.prepare, state, incoming)
    if not row.chats and incoming.num_bytes <= INLINE_BYTES:
        return work()
    user = turn_of(incoming.scope)
    return await state.pool.run(user, incoming.num_bytes, incoming.receive, work)


async def in_turn(
    state: State,
    request: Request,
    kind: type[msgspec.Struct],
    answer: Callable[[dict[str, Any]], Any],
) -> Response:
    """What `answer` makes of the body, as JSON; in the tokenizer pool, in its sender's turn."""
    user = turn_of(request.scope)
    raw, num_bytes = await bodies.read_object(
        request.receive, state.options.max_body, kind, pool=state.pool, user=user
    )
    work = partial(answered, answer, raw)
    return await state.pool.run(user, num_bytes, request.receive, work)


def answered(answer: Callable[[dict[str, Any]], Any], raw: dict[str, Any]) -> Response:
    """The response, its JSON written in the thread that made it."""
    return json_response(answer(raw))
