"""A long-lived task that raises is counted and started again."""

import asyncio

import pytest

from headway.core import supervision
from headway.core.supervision import supervise


async def test_a_task_that_fails_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.001)
    before, num_runs = supervision.failures["test"], 0

    async def work() -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs < 4:
            raise RecursionError("too deep")

    await supervise("test", work)
    assert num_runs == 4 and supervision.failures["test"] == before + 3
    assert caplog.text.count("the task 'test' failed and is started again") == 3
    assert "RecursionError: too deep" in caplog.text


async def test_a_task_that_is_cancelled_ends() -> None:
    task = supervise("sleeper", asyncio.Event().wait)  # type: ignore[arg-type]
    assert dict(supervision.failures)["sleeper"] == 0, "counted from its start"
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
