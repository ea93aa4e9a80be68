"""Shadow copies of requests to a canary that answers no client yet.

A copy is sent after the answer, without streaming and without a client's deadline, and its answer
is not stored. At most `MAX_AT_ONCE` copies run; further ones are skipped. Its cost is in the ledger
as attempt 0.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from headway.edge.http_client import read_bounded
from headway.gateway import ledger
from headway.gateway.arm import Arm, is_invalid, whole_text
from headway.gateway.ask import WHOLE, Attempt
from headway.gateway.attempts import AttemptError
from headway.gateway.dialects import BAD_USAGE, UpstreamUsage
from headway.gateway.incoming import GatewayRequest
from headway.gateway.money import dollars_of
from headway.gateway.rollout import ArmSample
from headway.gateway.upstream import FAILURES, Upstream

if TYPE_CHECKING:
    from headway.gateway.state import GatewayState

MAX_AT_ONCE = 4
MAX_BYTES = 2**24
DROPPED_FIELDS = ("stream", "stream_options", "background", "n", "best_of")


def send_copy(state: "GatewayState", incoming: GatewayRequest) -> None:
    """Send a copy to the canary of the request's rollout, if the rollout is in shadow."""
    arm = incoming.arm
    if arm is None or not arm[0].is_copied(incoming.request_id) or len(state.copies) >= MAX_AT_ONCE:
        return
    pool = state.pools[incoming.route.name]
    others = {each for each in pool.upstreams if each.name not in arm[0].row.canary}
    upstream = pool.choose(incoming.query, others)
    if upstream is None or len(upstream.speed.flights) >= MAX_AT_ONCE:
        return
    task = asyncio.create_task(_ask(state, incoming, arm, upstream))
    state.copies.add(task)
    task.add_done_callback(state.copies.discard)


async def _ask(
    state: "GatewayState", incoming: GatewayRequest, arm: Arm, upstream: Upstream
) -> None:
    """Send the copy and add its result to the canary's arm."""
    raw: dict[str, Any] = {k: v for k, v in incoming.raw.items() if k not in DROPPED_FIELDS}
    if incoming.dialect.path == "/v1/responses":
        raw["store"] = False
    attempt = Attempt(state, incoming, upstream, raw)
    usage, prompt, output = UpstreamUsage(), 0, 0
    sample = ArmSample(error=True)
    try:
        async with asyncio.timeout(incoming.route.deadline_s):
            async with attempt.answer(WHOLE) as answer:
                data = attempt.whole(await read_bounded(answer, MAX_BYTES))
        usage = incoming.dialect.read_whole(data) or usage
        if usage == BAD_USAGE:
            raise ValueError("its usage is no count of tokens")
        prompt, output = usage.prompt, usage.output
        upstream.breaker.succeeded()
        priced = upstream.row.price is not None and output > 0
        sample = ArmSample(
            error=False,
            invalid=is_invalid(incoming.raw, whole_text(data)),
            dollars=dollars_of(upstream.price, usage, upstream.speed) if priced else None,
        )
    except (AttemptError, *FAILURES):
        upstream.breaker.failed()
    except asyncio.CancelledError:
        upstream.breaker.record_abort()
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
