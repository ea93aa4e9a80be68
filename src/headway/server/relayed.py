"""A gateway asks this server: streams with marks, streams that go on, and the load of a model.

What the gateway may say stands in `edge/relayed.py`; whoever else says it is refused.
"""

import uuid
from statistics import fmean
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headway.core.errors import RequestError
from headway.core.request import SequenceUpdate
from headway.edge.auth import forbidden
from headway.edge.errors import json_response
from headway.edge.keys import Caller
from headway.edge.relayed import (
    FIELD,
    LOAD_HEADER,
    MAX_RESUMED,
    LoadReport,
    Relayed,
    encode_load,
    mark,
)
from headway.engine.messages import Ready
from headway.frontend.answer import Stream
from headway.server.generation import Dialect, GenerationRequest, Progress
from headway.server.models import ServedModel, State

PROCESS = uuid.uuid4().hex[:8]


def take_field(raw: dict[str, Any], caller: Caller, prefix: str) -> Relayed | None:
    """The gateway's field, taken out of a body; raises RequestError where the key may not send it.

    `prefix` begins the ids of the endpoint that was asked.
    """
    content = raw.pop(FIELD, None)
    if content is None:
        return None
    if not caller.relays:
        raise forbidden(f"{FIELD} is for a gateway's key (gateway: true in the key file).")
    try:
        asked = msgspec.convert(content, Relayed)
    except msgspec.ValidationError as error:
        raise RequestError(f"{FIELD}: {error}.", param=FIELD, code="invalid_type") from error
    resume = asked.resume
    if resume is not None and len(resume.tokens) > MAX_RESUMED:
        raise bad_resume("is too long")
    if resume is not None and not resume.id.startswith(prefix):
        raise bad_resume(f"has an id that does not begin with {prefix}")
    return asked


def bad_resume(why: str) -> RequestError:
    """The error of what another server had begun, where this one cannot go on with it."""
    return RequestError(f"{FIELD}.resume {why}.", param=FIELD, code="invalid_value")


def check_resumed(asked: Relayed | None, request: GenerationRequest) -> None:
    """Raise RequestError where a stream cannot go on: several answers, or log-probabilities."""
    if asked is None or asked.resume is None:
        return
    sampling = request.sampling
    plain = sampling.logprobs is None and sampling.prompt_logprobs is None
    if not (request.stream and request.num_choices == 1 and plain):
        raise bad_resume("needs a stream of one answer without log-probabilities")
    tokens = asked.resume.tokens
    info = request.model.info()
    room = request.longest_answer
    if len(tokens) >= room or any(not 0 <= token < info.vocab_size for token in tokens):
        raise bad_resume("has tokens that are no beginning of an answer here")


def replay(tokens: list[int], stream: Stream, dialect: Dialect) -> None:
    """Bring the text of the answer and its writer to where another server's stream broke off."""
    for token in tokens:
        for delta, _ in stream.answer.pushed(SequenceUpdate(0, 0, [token])):
            for choice, each in dialect.progress.count(0, [delta]):
                dialect.chunk(choice, each)


class Marks:
    """The marks of a stream of one answer; what is not shown yet is told with what shows it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._untold: list[int] = []

    def after(self, content: bytes, tokens: list[int]) -> bytes:
        """`content` and the mark behind it; b"" while nothing can be shown of these tokens."""
        self._untold += tokens
        if not content:
            return b""
        told, self._untold = self._untold, []
        progress = self._progress
        return content + mark(progress.request.num_prompt_tokens, progress.num_cached, told)


# ── load ────────────────────────────────────────────────────────────────────────────────────


def load_of(model: ServedModel) -> LoadReport:
    """What a gateway chooses by."""
    lines, info = model.admission.lines, model.client.info
    forecasts = [lines.of[number].forecast for number in lines.taking]
    now = model.telemetry.engines.last
    return LoadReport(
        queue_s=round(min(each.queue_s() for each in forecasts), 6),
        token_s=round(fmean(each.token_s for each in forecasts), 9),
        kv=round(now.kv_usage, 4),
        rows=model.admission.num_admitted,
        max_rows=info.max_num_seqs * len(lines.of) if info else 0,
        boot=f"{PROCESS}-{model.client.num_restarts}",
        context=info.max_model_len if info else 0,
        cache_tokens=num_cached_tokens(info) * len(lines.of) if info else 0,
    )


def num_cached_tokens(info: Ready) -> int:
    """What the KV blocks of one engine hold."""
    return max(info.group_blocks, default=0) * info.block_size


def load_header(model: ServedModel) -> tuple[bytes, bytes]:
    return LOAD_HEADER, encode_load(load_of(model))


async def load(state: State, request: Request) -> Response:
    """GET /v1/load: of each model by its first name; for a gateway's key."""
    check_relays(state, request.scope)
    models = {
        row.names[0]: msgspec.structs.replace(load_of(row), fingerprint=state.fingerprint)
        for row in state.rows
        if row.client.ready
    }
    return json_response(models)


def check_relays(state: State, scope: Scope) -> None:
    """Raise RequestError 403 for a caller who is no gateway."""
    caller: Caller = scope.get("caller") or state.keyring.anonymous
    if not caller.relays:
        raise forbidden("This path is for a gateway's key (gateway: true in the key file).")
