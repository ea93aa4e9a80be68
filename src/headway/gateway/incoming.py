"""A generation request as the gateway reads it: dialect, model, task, deadline."""

from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from headway.core.errors import RequestError
from headway.edge import body as bodies
from headway.edge.auth import header
from headway.edge.keys import Caller
from headway.edge.principal import owner_of, turn_of
from headway.edge.relayed import FIELD
from headway.edge.tasks import DEFAULT_CLASS, task_name
from headway.gateway.answers import last_text
from headway.gateway.arm import Arm, arm_of
from headway.gateway.bodies import Body, answer_length, needs_of, num_ids
from headway.gateway.cascade.rows import task_class_of
from headway.gateway.choose import RoutingQuery
from headway.gateway.config import GatewayModelRow
from headway.gateway.dialects import Dialect, Embeddings, Responses
from headway.gateway.hold import Hold
from headway.gateway.prefix import page_keys
from headway.gateway.providers import endpoint_need
from headway.gateway.state import GatewayState, canonical_name


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRequest:
    """One generation request. `prompt_bytes` is the size of what a prefix cache compares, `num_ids`
    the number of token ids in its prompts, `num_answers` prompts times choices."""

    scope: Scope
    receive: Receive
    send: Send
    raw: dict[str, Any]
    caller: Caller
    owner: str
    request_id: str
    dialect: Dialect
    model: str
    """Name of its model row, or the name that was asked for where the row is for any."""
    shown_model: str
    """Name that was asked for, maybe an alias: answers have it."""
    route: GatewayModelRow
    query: RoutingQuery
    prompt_bytes: int
    num_ids: int
    num_prompts: int
    num_answers: int
    answer_param: str | None
    stream: bool
    task: str
    task_class: str
    began_s: float
    num_retry: int = 0
    tags: tuple[str, ...] = ()
    arm: Arm | None = None
    """Its arm, if its model has a rollout."""

    @property
    def deadline_s(self) -> float:
        """Return the deadline on the clock of `began_s`."""
        return self.began_s + self.route.deadline_s


async def read_object(state: GatewayState, scope: Scope, receive: Receive) -> dict[str, Any]:
    """Return the body's object without fields reserved to gateways; raises RequestError."""
    raw, _ = await bodies.read_object(
        receive, state.options.max_body, Body, pool=state.pool, user=turn_of(scope)
    )
    raw.pop(FIELD, None)
    return raw


async def read_generation_request(
    state: GatewayState, dialect: Dialect, scope: Scope, receive: Receive, send: Send
) -> GatewayRequest:
    """Read a request at a generation endpoint; raises RequestError."""
    raw = await read_object(state, scope, receive)
    began_s, owner = state.clock.now_s(), owner_of(scope)
    shown, route = state.route(typed_body(dialect, raw).model)
    state.check_use(owner, shown, route)
    model = canonical_name(shown, route)
    prompt = dialect.prompt_bytes(raw)
    answer, param = answer_length(raw, dialect.lengths)
    task, task_class, num_retry = task_of(state, scope, raw, owner, prompt)
    caller: Caller = scope.get("caller") or state.keyring.anonymous
    generates = not isinstance(dialect, Embeddings)
    rollout = state.rollouts.get(route.name) if generates else None
    arm = arm_of(rollout, raw, owner, scope["request_id"])
    if arm is not None:
        arm[0].record_task(owner, task, arm[1])
    salt = f"{caller.principal.cache_salt} {owner} {raw.get('cache_salt')}"
    return GatewayRequest(
        scope=scope,
        receive=receive,
        send=send,
        raw=raw,
        caller=caller,
        owner=owner,
        request_id=scope["request_id"],
        dialect=dialect,
        model=model,
        shown_model=shown,
        route=route,
        query=RoutingQuery(
            model=model,
            keys=page_keys(f"{model} {salt}", prompt) if generates else (),
            num_bytes=len(prompt),
            answer=answer if generates else 0,
            needs=needs_of(raw) | endpoint_need(dialect.path)
            if generates
            else frozenset({"embeddings"}),
            pinned=upstream_of_previous(state, raw, owner)
            if isinstance(dialect, Responses)
            else "",
        ),
        prompt_bytes=len(prompt),
        num_ids=num_ids(raw.get("prompt" if generates else "input")),
        num_prompts=dialect.num_prompts(raw),
        num_answers=dialect.num_answers(raw),
        answer_param=param,
        stream=raw.get("stream") is True,
        task=task,
        task_class=task_class,
        began_s=began_s,
        num_retry=num_retry,
        tags=tags_of(scope, raw),
        arm=arm,
    )


TAGS_HEADER = b"x-headway-tags"
MAX_TAGS, MAX_TAG = 10, 64


def tags_of(scope: Scope, raw: dict[str, Any]) -> tuple[str, ...]:
    """Return the tags of a request, by its header or `metadata.tags`; a list there is taken out.

    Both are names with commas between them, or a list of names, which no other server knows.
    """
    metadata = raw.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    given = metadata.get("tags")
    if isinstance(given, list):
        raw["metadata"] = {name: value for name, value in metadata.items() if name != "tags"}
    given = header(scope, TAGS_HEADER) or given or ()
    names = given.split(",") if isinstance(given, str) else given
    good = isinstance(names, list | tuple) and all(isinstance(each, str) for each in names)
    tags = tuple(dict.fromkeys(each.strip() for each in names)) if good else ("",)
    check_tags(tags)
    return tags


def check_tags(tags: tuple[str, ...]) -> None:
    """Raise RequestError for too many tags, or one that is no name."""
    if len(tags) > MAX_TAGS or not all(0 < len(t) <= MAX_TAG and t.isprintable() for t in tags):
        raise RequestError(
            f"metadata.tags must be up to {MAX_TAGS} names of 1 to {MAX_TAG} characters.",
            param="metadata.tags",
            code="invalid_value",
        )


def typed_body(dialect: Dialect, raw: dict[str, Any]) -> Body:
    """Return the fields that the gateway uses; RequestError names one of a wrong type."""
    body = bodies.typed(raw, Body)
    if body.stream and isinstance(dialect, Embeddings):
        raise RequestError(
            "Embeddings are not streamed; leave out stream.",
            param="stream",
            code="unsupported_parameter",
        )
    return body


def hold_of(state: GatewayState, incoming: GatewayRequest) -> Hold | None:
    """Return the hold-back of this request's answer; None if its route has none."""
    counts = state.holds.get(incoming.route.name)
    if counts is None or isinstance(incoming.dialect, Embeddings):
        return None
    return Hold(counts, state.scorers, incoming.dialect, incoming.raw, incoming.task_class)


def upstream_of_previous(state: GatewayState, raw: dict[str, Any], owner: str) -> str:
    """Return the name of the upstream that stores the previous response; "" for any upstream."""
    previous = raw.get("previous_response_id")
    if not isinstance(previous, str):
        return ""
    keeper = state.keeper_of(previous, owner)
    if keeper is None:
        raise RequestError(
            f"The response {previous[:80]!r} is not stored here.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return keeper.name


def task_of(
    state: GatewayState, scope: Scope, raw: dict[str, Any], owner: str, prompt: bytes
) -> tuple[str, str, int]:
    """Return (task, task class, retry number), as the client states them.

    Without a stated task the request is a task of its own; a repetition by a client library belongs
    to the task of the first try.
    """
    task, task_class, num_retry = task_name(scope, raw.get("metadata"))
    if task_class == DEFAULT_CLASS and state.config.tasks:
        task_class = task_class_of(state.config.tasks, last_text(raw)) or task_class
    if num_retry:
        state.metrics.add("client_retries")
    if task is None:
        fresh = scope["request_id"]
        task = state.retries.task_of(owner, hash((scope["path"], prompt)), num_retry > 0, fresh)
    return task, task_class, num_retry
