"""Copies of requests to a canary before it answers anybody: after the answer, in idle room.

A copy is asked whole, is kept by nobody and has no deadline of a client; at most a few run at
once, and what finds no room is left out. What it cost is in the ledger as attempt 0.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from headway.edge.http_client import read_bounded
from headway.gateway import ledger
from headway.gateway.arm import Arm, is_invalid, whole_text
from headway.gateway.ask import WHOLE, Attempt
from headway.gateway.attempts import AttemptError
from headway.gateway.dialects import BAD_USAGE, Usage
from headway.gateway.incoming import Incoming
from headway.gateway.money import dollars_of
from headway.gateway.rollout import Sample
from headway.gateway.upstream import FAILURES, Upstream

if TYPE_CHECKING:
    from headway.gateway.state import State

MAX_AT_ONCE = 4
MAX_BYTES = 2**24
NOT_COPIED = ("stream", "stream_options", "background", "n", "best_of")


def copy(state: "State", incoming: Incoming) -> None:
    """Send a copy to the canary of the request's rollout, if that is on trial by copies."""
    arm = incoming.arm
    if arm is None or not arm[0].copies(incoming.request_id) or len(state.copies) >= MAX_AT_ONCE:
        return
    pool = state.pools[incoming.route.name]
    others = {each for each in pool.upstreams if each.name not in arm[0].row.canary}
    upstream = pool.choose(incoming.query, others)
    if upstream is None or len(upstream.speed.flights) >= MAX_AT_ONCE:
        return
    task = asyncio.create_task(_ask(state, incoming, arm, upstream))
    state.copies.add(task)
    task.add_done_callback(state.copies.discard)


async def _ask(state: "State", incoming: Incoming, arm: Arm, upstream: Upstream) -> None:
    """The copy, and what it says of the canary."""
    raw: dict[str, Any] = {k: v for k, v in incoming.raw.items() if k not in NOT_COPIED}
    if incoming.dialect.path == "/v1/responses":
        raw["store"] = False
    attempt = Attempt(state, incoming, upstream, raw)
    usage, prompt, output = Usage(), 0, 0
    sample = Sample(error=True)
    try:
        async with asyncio.timeout(incoming.route.deadline_s):
            async with attempt.answer(WHOLE) as answer:
                data = await read_bounded(answer, MAX_BYTES)
        usage = incoming.dialect.read_whole(data) or usage
        if usage == BAD_USAGE:
            raise ValueError("its usage is no count of tokens")
        prompt, output = usage.prompt, usage.output
        upstream.breaker.succeeded()
        priced = upstream.row.price is not None and output > 0
        sample = Sample(
            error=False,
            invalid=is_invalid(incoming.raw, whole_text(data)),
            dollars=dollars_of(upstream.price, usage, upstream.speed) if priced else None,
        )
    except (AttemptError, *FAILURES):
        upstream.breaker.failed()
    except asyncio.CancelledError:
        upstream.breaker.given_up()
        raise
    finally:
        attempt.end(prompt, output)
    dollars = dollars_of(upstream.price, usage, upstream.speed)
    outcome = "shadow failed" if sample.error else "shadow"
    state.metrics.add("attempts", upstream=upstream.name, outcome=outcome)
    state.metrics.add("dollars", dollars, upstream=upstream.name)
    state.ledger.write(
        ledger.ATTEMPT,
        *(incoming.request_id, 0, upstream.name, outcome),
        *(usage.prompt, usage.cached, usage.output, 0, dollars, None),
    )
    arm[0].add(True, sample)
