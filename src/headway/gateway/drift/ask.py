"""The probes, asked of an upstream twice: once one after the other, once several at a time."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from headway.gateway import probe
from headway.gateway.drift.compare import Probe, ProbeAnswer, Sheet
from headway.gateway.upstream import Upstream

TOP = 20
LIMIT_S = 120.0
AT_ONCE = 4
"""The second time, so that another batch is among what equals differ by."""
IDLE_S, POLL_S = 5.0, 0.05
"""So long a probe waits for an upstream that has requests."""
BUSY_S, MOST_BUSY = 1.0, 20
"""A probe that an upstream was too busy for is asked again after so long, so often."""


async def sheet_of(
    upstream: Upstream,
    model: str,
    probes: Sequence[Probe],
    at: float,
    advance: Callable[[], None] = lambda: None,
) -> Sheet:
    """All answers of one upstream; raises one of probe.FAILED."""
    rounds = []
    for at_once in (1, AT_ONCE):
        places = asyncio.Semaphore(at_once)

        async def one(each: Probe, places: asyncio.Semaphore = places) -> ProbeAnswer:
            async with places:
                await idle(upstream)
                answer = await ask_probe(upstream, model, each)
            advance()
            return answer

        tasks = [asyncio.create_task(one(each)) for each in probes]
        try:
            rounds.append(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
    first, again = rounds
    fingerprint = upstream.fingerprint
    return Sheet(upstream=upstream.name, at=at, fingerprint=fingerprint, first=first, again=again)


async def idle(upstream: Upstream) -> None:
    """Wait until clients have no request there, or for IDLE_S."""
    for _ in range(round(IDLE_S / POLL_S)):
        if not upstream.speed.flights:
            return
        await asyncio.sleep(POLL_S)


async def patiently(upstream: Upstream, model: str, raw: dict[str, Any]) -> probe.Reply:
    """The reply of an upstream that may be busy for a while; raises one of probe.FAILED."""
    for _ in range(MOST_BUSY):
        with contextlib.suppress(probe.BusyError):
            return await probe.ask(upstream, model, raw, LIMIT_S)
        await asyncio.sleep(BUSY_S)
    return await probe.ask(upstream, model, raw, LIMIT_S)


async def ask_probe(upstream: Upstream, model: str, each: Probe) -> ProbeAnswer:
    """One answer at temperature 0, with log-probabilities unless the upstream refuses them."""
    raw = {"messages": each.messages, "max_tokens": each.max_tokens, "temperature": 0}
    if upstream.tells_logprobs is not False:
        try:
            wants = {"logprobs": True, "top_logprobs": TOP}
            reply = await patiently(upstream, model, {**raw, **wants})
        except probe.BusyError:
            raise
        except ValueError:
            if upstream.tells_logprobs:
                raise
            upstream.tells_logprobs = False
            reply = await patiently(upstream, model, raw)
        else:
            upstream.tells_logprobs = upstream.tells_logprobs or bool(reply.content.top)
    else:
        reply = await patiently(upstream, model, raw)
    content = reply.content
    if content.fingerprint:
        upstream.fingerprint = content.fingerprint
    return ProbeAnswer(
        text=content.text,
        prompt_tokens=reply.usage.prompt,
        output_tokens=reply.usage.output,
        ended=content.ended,
        tokens=content.tokens,
        top=content.top,
    )
