"""Small endpoints that read a body: their work waits for its turn in the tokenizer pool."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.edge.errors import json_response
from headway.edge.principal import turn_of
from headway.server import body as bodies
from headway.server.models import State


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
