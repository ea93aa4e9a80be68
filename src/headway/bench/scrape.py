"""The server's own metrics during a run: gauges sampled once a second, growth of counters.

Reads Prometheus' text with vLLM's names under any prefix (`headway:`, `vllm:`). A server without
`/metrics` is no fault: the report then has no figures of it.
"""

import asyncio
import re
from collections.abc import Callable

import aiohttp

from headway.measure.record import ServerRecord

GAUGES = frozenset(
    "num_requests_running num_requests_waiting kv_cache_usage_perc mfu_ratio mbu_ratio".split()
)
COUNTERS = frozenset(
    "prefix_cache_queries_total prefix_cache_hits_total prompt_tokens_total "
    "generation_tokens_total num_preemptions_total spec_decode_num_drafts_total "
    "spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total "
    "request_queue_time_seconds_sum request_queue_time_seconds_count "
    "request_prefill_time_seconds_sum request_prefill_time_seconds_count "
    "request_decode_time_seconds_sum request_decode_time_seconds_count "
    "time_to_first_token_seconds_sum time_to_first_token_seconds_count "
    "request_time_per_output_token_seconds_sum request_time_per_output_token_seconds_count "
    "e2e_request_latency_seconds_sum e2e_request_latency_seconds_count".split()
)
INTERVAL_S = 1.0
STEPS = re.compile(r'(?:^|,)steps="(\w+)"')
SAMPLE = re.compile(
    rf"^(?:\w+:)?({'|'.join(sorted(GAUGES | COUNTERS))})(?:{{(.*)}})? ([-+.\dEe]+|NaN)",
    re.MULTILINE,
)


def parse(text: str) -> dict[str, float]:
    """Return name without its prefix → the sum (of a share or ratio: the largest) over labels.

    `headway:num_requests_running{engine="0"} 3.0` → {"num_requests_running": 3.0}, and
    `headway:mbu_ratio{steps="decode"} 0.4` → {"mbu_ratio_decode": 0.4}. A regular expression, since
    the official parser would delay the load by milliseconds a second.
    """
    values: dict[str, float] = {}
    for name, labels, value in SAMPLE.findall(text):
        together = max if name.endswith(("_ratio", "_perc")) else float.__add__
        if steps := STEPS.search(labels):
            name = f"{name}_{steps[1]}"
        before = values.get(name, 0.0)
        values[name] = together(before, float(value))
    return values


class Scraper:
    """Samples `/metrics` inside its context; at its end `server` has gauges and counters."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: ServerRecord,
        now_s: Callable[[], float],
    ) -> None:
        self._session = session
        self._server = server
        self._now_s = now_s
        self._task: asyncio.Task[None] | None = None
        self._first: dict[str, float] | None = None

    async def __aenter__(self) -> "Scraper":
        self._first = await self._read()
        if self._first:
            self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is None or self._first is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        last = await self._read()
        if last:
            self._server.counters = {
                name: last[name] - self._first.get(name, 0.0) for name in COUNTERS & last.keys()
            }

    async def _sample(self) -> None:
        while True:
            values = await self._read()
            if values:
                self._server.sampled_s.append(round(self._now_s(), 3))
                for name in sorted(values.keys() - COUNTERS):
                    self._server.gauges.setdefault(name, []).append(values[name])
            await asyncio.sleep(INTERVAL_S)

    async def _read(self) -> dict[str, float] | None:
        try:
            timeout = aiohttp.ClientTimeout(total=5)
            url = f"{self._server.url}/metrics"
            async with self._session.get(url, timeout=timeout) as response:
                if response.status != 200:
                    return None
                return parse(await response.text())
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
