"""Requests of a gateway: streams with marks, resumed streams, and the load of a model.

The fields are in `edge/relayed.py`; only a gateway's key may send them.
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
from headway.server.generation import AnswerDialect, GenerationRequest, Progress
from headway.server.models import ServedModel, ServerState

PROCESS = uuid.uuid4().hex[:8]


def pop_relay_field(raw: dict[str, Any], caller: Caller, prefix: str) -> Relayed | None:
    """Remove the gateway's field from a body and return it; RequestError for another caller.

    `prefix` is that of the endpoint's ids.
    """
    content = raw.pop(FIELD, None)
    if content is None:
        return None
    if not caller.relays:
        raise forbidden(f"{FIELD} is for a gateway's key (gateway: true in the key file).")
    try:
        relayed = msgspec.convert(content, Relayed)
    except msgspec.ValidationError as error:
        raise RequestError(f"{FIELD}: {error}.", param=FIELD, code="invalid_type") from error
    resume = relayed.resume
    if resume is not None and len(resume.tokens) > MAX_RESUMED:
        raise resume_error("is too long")
    if resume is not None and not resume.id.startswith(prefix):
        raise resume_error(f"has an id that does not begin with {prefix}")
    return relayed


def resume_error(why: str) -> RequestError:
    """Return the error of a stream that cannot be resumed here."""
    return RequestError(f"{FIELD}.resume {why}.", param=FIELD, code="invalid_value")


def check_resume(relayed: Relayed | None, request: GenerationRequest) -> None:
    """Raise RequestError where a stream cannot resume: several answers or log-probabilities."""
    if relayed is None or relayed.resume is None:
        return
    sampling = request.sampling
    plain = sampling.logprobs is None and sampling.prompt_logprobs is None
    if not (request.stream and request.num_choices == 1 and plain):
        raise resume_error("needs a stream of one answer without log-probabilities")
    tokens = relayed.resume.tokens
    info = request.model.info()
    room = request.longest_answer
    if len(tokens) >= room or any(not 0 <= token < info.vocab_size for token in tokens):
        raise resume_error("has tokens that are no beginning of an answer here")


def replay(tokens: list[int], stream: Stream, dialect: AnswerDialect) -> None:
    """Bring the text of the answer and its dialect to where the other server's stream ended."""
    for token in tokens:
        for delta, _ in stream.answer.push_all(SequenceUpdate(0, 0, [token])):
            for choice, each in dialect.progress.count(0, [delta]):
                dialect.chunk(choice, each)


class MarkWriter:
    """Writer of the marks of a stream of one answer; tokens are marked when their text is shown."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._unmarked: list[int] = []

    def after(self, content: bytes, tokens: list[int]) -> bytes:
        """Return `content` with its mark; b"" while no text of these tokens can be shown."""
        self._unmarked += tokens
        if not content:
            return b""
        tokens, self._unmarked = self._unmarked, []
        progress = self._progress
        return content + mark(progress.request.num_prompt_tokens, progress.num_cached, tokens)


# ── load ────────────────────────────────────────────────────────────────────────────────────


def load_report(model: ServedModel) -> LoadReport:
    """Return the load of a model, by which a gateway chooses."""
    queues, info = model.admission.queues, model.client.info
    forecasts = [queues.by_engine[number].forecast for number in queues.accepting]
    now = model.telemetry.engines.last
    return LoadReport(
        queue_s=round(min(each.queue_s() for each in forecasts), 6),
        token_s=round(fmean(each.token_s for each in forecasts), 9),
        kv=round(now.kv_usage, 4),
        rows=model.admission.num_admitted,
        max_rows=info.max_num_seqs * len(queues.by_engine) if info else 0,
        boot=f"{PROCESS}-{model.client.num_restarts}",
        context=info.max_model_len if info else 0,
        cache_tokens=num_cached_tokens(info) * len(queues.by_engine) if info else 0,
    )


def num_cached_tokens(info: Ready) -> int:
    """Return how many tokens the KV blocks of one engine hold."""
    return max(info.group_blocks, default=0) * info.block_size


def load_header(model: ServedModel) -> tuple[bytes, bytes]:
    return LOAD_HEADER, encode_load(load_report(model))


async def load(state: ServerState, request: Request) -> Response:
    """GET /v1/load: the load of each model by its first name; for a gateway's key."""
    check_relays(state, request.scope)
    models = {
        row.names[0]: msgspec.structs.replace(load_report(row), fingerprint=state.fingerprint)
        for row in state.rows
        if row.client.ready
    }
    return json_response(models)


def check_relays(state: ServerState, scope: Scope) -> None:
    """Raise RequestError 403 for a caller that is no gateway."""
    caller: Caller = scope.get("caller") or state.keyring.anonymous
    if not caller.relays:
        raise forbidden("This path is for a gateway's key (gateway: true in the key file).")
