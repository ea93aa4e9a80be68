"""Task of a request, as its client states it: in a header, or in the body's metadata."""

from typing import Any, NamedTuple

from starlette.types import Scope

from headway.core.errors import RequestError
from headway.edge.auth import header

MAX_NAME = 200
TASK_HEADER, CLASS_HEADER = b"x-headway-task-id", b"x-headway-task"
RETRY_HEADER = b"x-stainless-retry-count"
DEFAULT_CLASS = "default"


class TaskName(NamedTuple):
    """Task, or None without a name; its class; the retry number of a client library."""

    task: str | None
    task_class: str
    num_retry: int


def task_name(scope: Scope, metadata: Any) -> TaskName:
    """Return the task that a request names; raises RequestError."""
    fields = metadata if isinstance(metadata, dict) else {}
    task = header(scope, TASK_HEADER) or fields.get("task_id")
    task_class = header(scope, CLASS_HEADER) or fields.get("task") or DEFAULT_CLASS
    for name, value in (("task_id", task), ("task", task_class)):
        if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_NAME):
            raise RequestError(
                f"metadata.{name} must be a text of 1 to {MAX_NAME} characters.",
                param=f"metadata.{name}",
                code="invalid_value",
            )
    text = header(scope, RETRY_HEADER) or "0"
    return TaskName(task, task_class, int(text) if text.isdecimal() and len(text) < 4 else 0)
