"""The cost of tasks on this server, and whether they succeeded: POST /v1/outcomes.

The dollars of a request are its share of the machine's time, at `--price-per-hour`: the time that
its tokens took in the steps. Idle time is in `cost_usd` alone.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from headway.edge import body as bodies
from headway.edge.errors import json_response
from headway.edge.principal import owner_of
from headway.edge.tasks import TaskName, task_name
from headway.server.generation import GenerationRequest, Progress
from headway.server.models import ServerState
from headway.server.turn import read_body
from headway.telemetry.tasks import Outcome, Tasks, no_such_task

MAX_TASK_GROUPS = 100
"""Most groups of tasks in `/stats`."""


def request_task(
    state: ServerState, scope: Scope, raw: dict[str, Any], owner: str, request: GenerationRequest
) -> TaskName:
    """Return the task of a request; a retry by the client's library has that of the first try.

    Raises RequestError.
    """
    named = task_name(scope, raw.get("metadata"))
    if named.task is not None:
        return named
    prompt_hash = hash((scope["path"], *map(tuple, request.prompts)))
    again = named.num_retry > 0
    task = state.retries.task_of(owner, prompt_hash, again, scope["request_id"])
    return TaskName(task, named.task_class, named.num_retry)


def charge_task(state: ServerState, owner: str, name: TaskName, progress: Progress) -> None:
    """Charge a request that has ended to its task."""
    request = progress.request
    computed = max(0, request.num_prompt_tokens - progress.num_cached)
    seconds = request.model.machine_time.seconds(computed, progress.num_generated)
    price = request.model.telemetry.price_per_hour or 0.0
    state.tasks.spend(
        owner, name.task or "", name.task_class, request.model_name, price * seconds / 3600
    )


async def outcome(state: ServerState, request: Request) -> Response:
    """POST /v1/outcomes: note whether a task of this key has succeeded; the last call holds."""
    raw, _ = await read_body(state, request, Outcome)
    body = bodies.typed(raw, Outcome)
    if not state.tasks.judge(owner_of(request.scope), body.task_id, body.success):
        raise no_such_task(body.task_id)
    return json_response(msgspec.to_builtins(body))


def export_task_metrics(state: ServerState) -> None:
    """Set the metrics of tasks, which count all models together."""
    registry = state.rows[0].telemetry.registry
    tasks: Tasks = state.tasks
    for dimension, name, totals in tasks.rows():
        registry.set("task_cost_usd", totals.dollars, dimension, name)
        registry.set("tasks_judged", totals.succeeded, dimension, name, "success")
        registry.set("tasks_judged", totals.failed, dimension, name, "failure")
        registry.set("cost_per_success_usd", totals.cost_per_success, dimension, name)
