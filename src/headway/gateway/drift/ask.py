"""Ask an upstream all probes twice: first one by one, then several at a time."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from headway.gateway import probe
from headway.gateway.drift.compare import DriftProbe, ProbeAnswer, ProbeAnswers
from headway.gateway.upstream import Upstream

NUM_TOP_LOGPROBS = 20
TIMEOUT_S = 120.0
CONCURRENCY = 4
"""Concurrency of the second round, so that the control includes the effect of batching."""
IDLE_S, POLL_S = 5.0, 0.05
"""Maximum wait of a probe for an idle upstream, and the polling interval, in seconds."""
BUSY_S, MAX_BUSY_RETRIES = 1.0, 20
"""Delay before a probe of a busy upstream is repeated, and the maximum number of repeats."""


async def collect_answers(
    upstream: Upstream,
    model: str,
    probes: Sequence[DriftProbe],
    at: float,
    advance: Callable[[], None] = lambda: None,
) -> ProbeAnswers:
    """Return all answers of one upstream; raises one of PROBE_FAILURES."""
    rounds = []
    for at_once in (1, CONCURRENCY):
        places = asyncio.Semaphore(at_once)

        async def one(each: DriftProbe, places: asyncio.Semaphore = places) -> ProbeAnswer:
            async with places:
                await wait_until_idle(upstream)
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
    return ProbeAnswers(
        upstream=upstream.name, at=at, fingerprint=fingerprint, first=first, again=again
    )


async def wait_until_idle(upstream: Upstream) -> None:
    """Wait until the upstream has no client request in flight, or for IDLE_S."""
    for _ in range(round(IDLE_S / POLL_S)):
        if not upstream.speed.flights:
            return
        await asyncio.sleep(POLL_S)


async def ask_until_free(upstream: Upstream, model: str, raw: dict[str, Any]) -> probe.Reply:
    """Ask an upstream that may be busy for a while; raises one of PROBE_FAILURES."""
    for _ in range(MAX_BUSY_RETRIES):
        with contextlib.suppress(probe.BusyError):
            return await probe.ask(upstream, model, raw, TIMEOUT_S)
        await asyncio.sleep(BUSY_S)
    return await probe.ask(upstream, model, raw, TIMEOUT_S)


async def ask_probe(upstream: Upstream, model: str, each: DriftProbe) -> ProbeAnswer:
    """Ask one probe at temperature 0, with log-probabilities unless the upstream refuses them."""
    raw = {"messages": each.messages, "max_tokens": each.max_tokens, "temperature": 0}
    if upstream.has_logprobs is not False:
        try:
            wants = {"logprobs": True, "top_logprobs": NUM_TOP_LOGPROBS}
            reply = await ask_until_free(upstream, model, {**raw, **wants})
        except probe.BusyError:
            raise
        except ValueError:
            if upstream.has_logprobs:
                raise
            upstream.has_logprobs = False
            reply = await ask_until_free(upstream, model, raw)
        else:
            upstream.has_logprobs = upstream.has_logprobs or bool(reply.content.top)
    else:
        reply = await ask_until_free(upstream, model, raw)
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
