"""A server's calibration after a load: its own steps, and what only a client sees.

The file is `telemetry.calibration`'s; `headway simulate`, `plan` and `tune` read it.
"""

import math
import urllib.parse
from pathlib import Path

import aiohttp
import msgspec

from headway.bench.latency import latency
from headway.core.errors import UsageError
from headway.core.options import BenchOptions
from headway.measure.client import open_session
from headway.measure.record import Run
from headway.measure.saved import write
from headway.telemetry.calibration import FORMAT, VERSION, Calibration

MOST_SECONDS = 300
TIMEOUT_S = 30.0
LEAST_STEPS = 50
"""Fewer steps than these tell a machine's pace too roughly to simulate by."""


async def read_calibration(url: str, api_key: str, model: str, seconds: float) -> Calibration:
    """What the server tells of its last seconds; UsageError where it cannot."""
    base = url.rstrip("/").removesuffix("/v1")
    query = {"seconds": f"{min(max(seconds, 0.1), MOST_SECONDS):.3f}"}
    query |= {"model": model} if model else {}
    try:
        async with open_session(api_key) as session:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            asked = f"{base}/calibration?{urllib.parse.urlencode(query)}"
            async with session.get(asked, timeout=timeout) as answer:
                status, data = answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UsageError(f"{base} cannot be asked: {error}.", "Is the URL right?") from error
    if status in (401, 403):
        raise UsageError(f"{base}/calibration needs an operator's key.", "Give --api-key.")
    if status != 200:
        raise UsageError(
            f"{base} has no /calibration (status {status}).", "It takes a ready Headway server."
        )
    return parse_calibration(data, base)


def parse_calibration(data: bytes, source: str) -> Calibration:
    """The calibration in these bytes; UsageError names what is wrong with them."""
    try:
        found = msgspec.json.decode(data, type=Calibration)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{source} is no calibration: {error}.",
            "Write one with headway bench URL --calibrate FILE.",
        ) from error
    if (found.format, found.version) != (FORMAT, VERSION):
        raise UsageError(
            f"{source} is {found.format} of version {found.version}; {FORMAT} of version {VERSION} "
            "is read here.",
            "Calibrate again: headway bench URL --calibrate FILE.",
        )
    steps = found.steps
    lists = (steps.seconds, steps.tokens, steps.sampled, steps.attended, steps.read)
    if any(len(values) != len(steps.started_s) for values in lists):
        raise UsageError(f"{source}: its columns of steps differ in length.", "Calibrate again.")
    if any(not (value > 0 and math.isfinite(value)) for value in steps.seconds):
        raise UsageError(f"{source}: a step takes no time, or less.", "Calibrate again.")
    if any(value < 0 for values in lists[1:] for value in values):
        raise UsageError(f"{source}: a step has a negative count.", "Calibrate again.")
    return found


def open_calibration(path: str) -> Calibration:
    """The calibration in a file; UsageError."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Check the path.") from error
    return parse_calibration(data, path)


async def write_calibration(url: str, options: BenchOptions, run: Run) -> None:
    """Write what the server tells of the run's time to the file that `--calibrate` names."""
    ended_s = max((x.ended_s for x in run.exchanges if x.ended_s is not None), default=0.0)
    seconds = max(ended_s, run.load.span_s, run.client.wall_s) + 0.5
    found = await read_calibration(url, options.api_key, options.model, seconds)
    if len(found.steps) < LEAST_STEPS:
        raise UsageError(
            f"Only {len(found.steps)} steps ran; {LEAST_STEPS} are needed to calibrate by.",
            "Raise --duration or --rate.",
        )
    found.host.door_s = door_seconds(run)
    found.host.client_cpu_s = client_seconds(url, run)
    write(options.calibrate, msgspec.json.encode(found))


def client_seconds(url: str, run: Run) -> float:
    """CPU seconds that we took for a token, where we share the server's machine; 0 elsewhere."""
    host = urllib.parse.urlsplit(url if "://" in url else f"http://{url}").hostname or ""
    num_tokens = sum(x.num_output for x in run.exchanges)
    if not (host == "localhost" or host == "::1" or host.startswith("127.")) or not num_tokens:
        return 0.0
    return round(run.client.cpu_s / num_tokens, 8)


def door_seconds(run: Run) -> float | None:
    """By how much the mean TTFT from when a request left is above the server's own mean.

    The server's counters say what it saw of the same requests; None where it does not tell.
    """
    counters = run.server.counters
    count = counters.get("time_to_first_token_seconds_count", 0.0)
    seen = [
        found.ttft_s - (x.sent_s - x.scheduled_s)
        for x in run.exchanges
        if (found := latency(x)) is not None and x.sent_s is not None
    ]
    if not count or not seen:
        return None
    mean_s = counters.get("time_to_first_token_seconds_sum", 0.0) / count
    return round(max(sum(seen) / len(seen) - mean_s, 0.0), 7)
