"""Supervision of long-lived tasks: one that raises is logged, counted and restarted."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 30.0
failures: Counter[str] = Counter()
"""Task name → number of exceptions in this process; `/metrics` shows it."""


async def run_supervised(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` until it returns; restart it after an exception, with growing pauses."""
    loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
    while True:
        began_s = loop.time()
        try:
            await work()
            return
        except Exception:
            log.exception("the task %r failed and is started again", name)
            failures[name] += 1
        if loop.time() - began_s > MAX_PAUSE_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def supervise(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> "asyncio.Task[None]":
    """Return the task that runs `work` for as long as the process lives."""
    failures[name] += 0  # a rate over a series that begins with its first failure has no failure
    return asyncio.create_task(run_supervised(name, work), name=name)
