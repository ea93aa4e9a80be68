"""What the engine tells of each step: counts and durations, never a token.

One record a step goes to the server with the step's updates; everything that is plotted or judged
later derives from these raw values.
"""

import msgspec


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """One step. Durations in seconds, `started_s` on the engine's monotonic clock.

    `num_preemptions` counts since the engine started; the rest is of this step.
    """

    step: int
    started_s: float
    num_running: int
    num_waiting: int
    num_tokens: int
    num_sampled: int
    kv_blocks_used: int
    kv_usage: float
    num_preemptions: int
    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0
