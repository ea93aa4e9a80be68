"""What tasks have cost this server, and whether they succeeded: POST /v1/outcomes.

A request's dollars are its share of the machine's time, at `--price-per-hour`: what its own tokens
took in the steps. Time in which nothing ran is in `cost_usd` alone.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headway.edge import body as bodies
from headway.edge.errors import json_response
from headway.edge.principal import owner_of, turn_of
from headway.edge.tasks import TaskName, task_name
from headway.server.generation import GenerationRequest, Progress
from headway.server.models import State
from headway.telemetry.tasks import Outcome, Tasks, no_such_task

MOST_SHOWN = 100
"""Groups of tasks in `/stats`."""


def named_task(
    state: State, scope: Scope, raw: dict[str, Any], owner: str, request: GenerationRequest
) -> TaskName:
    """The task of a request; one that its client's library sends again has that of its first try.

    Raises RequestError.
    """
    named = task_name(scope, raw.get("metadata"))
    if named.task is not None:
        return named
    asked = hash((scope["path"], *map(tuple, request.prompts)))
    again = named.num_retry > 0
    task = state.retries.task_of(owner, asked, again, scope["request_id"])
    return TaskName(task, named.task_class, named.num_retry)


def spend(state: State, owner: str, name: TaskName, progress: Progress) -> None:
    """A request is over: what it took is its task's."""
    request = progress.request
    computed = max(0, request.num_prompt_tokens - progress.num_cached)
    seconds = request.model.machine_time.seconds(computed, progress.num_generated)
    price = request.model.telemetry.price_per_hour or 0.0
    state.tasks.spend(
        owner, name.task or "", name.task_class, request.model_name, price * seconds / 3600
    )


async def outcome(state: State, request: Request) -> Response:
    """POST /v1/outcomes: whether a task of this key has succeeded; the last word holds."""
    raw, _ = await bodies.read_object(
        request.receive,
        state.options.max_body,
        Outcome,
        pool=state.pool,
        user=turn_of(request.scope),
    )
    told = bodies.typed(raw, Outcome)
    if not state.tasks.judge(owner_of(request.scope), told.task_id, told.success):
        raise no_such_task(told.task_id)
    return json_response(msgspec.to_builtins(told))


def show(state: State) -> None:
    """Set the metrics of tasks, which are of all models together."""
    registry = state.rows[0].telemetry.registry
    tasks: Tasks = state.tasks
    for dimension, name, totals in tasks.rows():
        registry.set("task_cost_usd", totals.dollars, dimension, name)
        registry.set("tasks_judged", totals.succeeded, dimension, name, "success")
        registry.set("tasks_judged", totals.failed, dimension, name, "failure")
        registry.set("cost_per_success_usd", totals.cost_per_success, dimension, name)
