"""Calibration of a server after a load: the server's own steps, and the client's measurements.

The file is `telemetry.calibration`'s; `headway simulate`, `plan` and `tune` read it.
"""

import math
import urllib.parse
from bisect import bisect_right
from pathlib import Path
from statistics import median

import aiohttp
import msgspec
import numpy as np

from headway.bench.latency import latency
from headway.config.options import BenchOptions
from headway.core.errors import UsageError
from headway.core.records import ModelSnapshot
from headway.core.regular_file import read_bytes
from headway.measure.client import open_session
from headway.measure.record import Exchange, RecordedRun
from headway.measure.saved import write
from headway.perf.filter import NUM_PARTS
from headway.perf.frontend import cpu_costs_of
from headway.telemetry.calibration import FORMAT, VERSION, WHOLE_LOAD, MachineCalibration

MAX_SECONDS = 300
TIMEOUT_S = 30.0
SAME_WAKE_S = 2e-4
"""Tokens that are read within this time came in one wake-up of the client's loop."""
MAX_TRANSIT_S = 0.05
MIN_QUIET_REQUESTS = 5
"""Least number of requests to an idle server that give the network's time; each arrived within
`MAX_TRANSIT_S`."""
MAX_PART_S = 3600.0
"""Most seconds of a part of a step model: no step takes longer."""
MIN_STEPS = 50
"""With fewer steps a machine's pace is too uncertain to simulate."""


async def read_calibration(
    url: str, api_key: str, model: str, seconds: float
) -> MachineCalibration:
    """Return the server's calibration of its last seconds; UsageError where it has none."""
    base = url.rstrip("/").removesuffix("/v1")
    query = {"seconds": f"{min(max(seconds, 0.1), MAX_SECONDS):.3f}"}
    query |= {"model": model} if model else {}
    try:
        async with open_session(api_key) as session:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            address = f"{base}/calibration?{urllib.parse.urlencode(query)}"
            async with session.get(address, timeout=timeout) as answer:
                status, data = answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UsageError(f"{base} cannot be reached: {error}.", "Is the URL right?") from error
    if status in (401, 403):
        raise UsageError(
            f"{base}/calibration needs an operator's key.",
            "Give --api-key; `headway key NAME --admin` makes one.",
        )
    if status != 200:
        raise UsageError(
            f"{base} has no /calibration (status {status}).", "Only a ready Headway server has it."
        )
    return parse_calibration(data, base)


def parse_calibration(data: bytes, source: str) -> MachineCalibration:
    """Return the calibration in these bytes; UsageError names what is wrong with them."""
    try:
        parsed = msgspec.json.decode(data, type=MachineCalibration)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{source} is no calibration: {error}.",
            "Write one with headway bench URL --calibrate FILE.",
        ) from error
    if parsed.format != FORMAT or parsed.version not in (WHOLE_LOAD, VERSION):
        raise UsageError(
            f"{source} is {parsed.format} of version {parsed.version}; {FORMAT} of versions "
            f"{WHOLE_LOAD} to {VERSION} is read here.",
            "Calibrate again: headway bench URL --calibrate FILE.",
        )
    steps = parsed.steps
    lists = (steps.seconds, steps.tokens, steps.sampled, steps.attended, steps.read)
    lengths = {len(values) for values in lists} | {len(steps.engine) or len(steps)}
    if lengths != {len(steps.started_s)}:
        raise UsageError(f"{source}: its columns of steps differ in length.", "Calibrate again.")
    if any(not (value > 0 and math.isfinite(value)) for value in steps.seconds):
        raise UsageError(f"{source}: a step takes no time, or less.", "Calibrate again.")
    if any(value < 0 for values in lists[1:] for value in values):
        raise UsageError(f"{source}: a step has a negative count.", "Calibrate again.")
    if parsed.step_model is not None:
        check_step_model(parsed.step_model, source)
    return parsed


def check_step_model(model: ModelSnapshot, source: str) -> None:
    """Raise UsageError for a snapshot that no engine of this version can have learned."""
    if len(model.parts) != NUM_PARTS:
        raise UsageError(
            f"{source}: its step_model has {len(model.parts)} parts, not {NUM_PARTS}.",
            "Calibrate again, or remove step_model: the steps are learned from then.",
        )
    if not all(0 < part <= MAX_PART_S for part in model.parts):
        raise UsageError(
            f"{source}: a part of its step_model takes no time, or more than an hour.",
            "Calibrate again, or remove step_model: the steps are learned from then.",
        )


def open_calibration(path: str) -> MachineCalibration:
    """Return the calibration in a file; UsageError."""
    try:
        data = read_bytes(Path(path), 2**31)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Check the path.") from error
    return parse_calibration(data, path)


async def write_calibration(url: str, options: BenchOptions, run: RecordedRun) -> None:
    """Write the server's calibration of the run to the file that `--calibrate` names."""
    ended_s = max((x.ended_s for x in run.exchanges if x.ended_s is not None), default=0.0)
    seconds = max(ended_s, run.load.span_s, run.client.wall_s) + 0.5
    calibration = await read_calibration(url, options.api_key, options.model, seconds)
    if len(calibration.steps) < MIN_STEPS:
        raise UsageError(
            f"Only {len(calibration.steps)} steps ran; {MIN_STEPS} are needed to calibrate by.",
            "Raise --duration or --rate.",
        )
    host, local = calibration.host, is_local(url)
    host.door_s = quiet_door_seconds(run, host.quiet) if local else None
    if host.door_s is None:
        host.door_s = door_seconds(run)
    if local:
        host.client_request_cpu_s, host.client_step_cpu_s, host.client_cpu_s = client_costs(run)
    write(options.calibrate, msgspec.json.encode(calibration))


def is_local(url: str) -> bool:
    """Return whether the server is on this machine and shares its cores and clock."""
    host = urllib.parse.urlsplit(url if "://" in url else f"http://{url}").hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def client_costs(run: RecordedRun) -> tuple[float, float, float]:
    """Return the client's CPU seconds for (a request, a wake-up with tokens, a token).

    They are the least-squares fit of the run's seconds, as for the server's own (`perf.frontend`);
    in a run of a few seconds all CPU time is counted by token.
    """
    sent = [x.sent_s for x in run.exchanges if x.sent_s is not None]
    chunks = [(at_s, n) for x in run.exchanges for at_s, n in zip(x.chunk_s, tokens_of(x))]
    if not chunks:
        return 0.0, 0.0, 0.0
    at_s = np.array([each for each, _ in chunks])
    order = np.argsort(at_s)
    at_s, tokens = at_s[order], np.array([n for _, n in chunks])[order]
    woke_s = at_s[np.diff(at_s, prepend=-1.0) > SAME_WAKE_S]
    spent = [(0.0, 0.0), *run.client.spent_s]
    edges = [at for at, _ in spent]
    sent_by = np.histogram(sent, edges)[0].tolist()
    woke_by = np.histogram(woke_s, edges)[0].tolist()
    tokens_by = np.histogram(at_s, edges, weights=tokens)[0].tolist()
    spent_by = np.diff([cpu_s for _, cpu_s in spent]).tolist()
    costs = cpu_costs_of(list(zip(sent_by, woke_by, tokens_by, spent_by, strict=True)))
    return costs if any(costs) else (0.0, 0.0, round(run.client.cpu_s / float(tokens.sum()), 8))


def tokens_of(x: Exchange) -> list[int]:
    """Return the tokens of each chunk; equal parts where the server does not say."""
    if x.chunk_tokens is not None:
        return x.chunk_tokens
    return [max(round(x.num_output / max(len(x.chunk_s), 1)), 1)] * len(x.chunk_s)


def quiet_door_seconds(run: RecordedRun, quiet: list[tuple[float, float]]) -> float | None:
    """Return the median time by which the client sees a first token later than an idle server.

    None of too few requests. Sent at 0.000 and read at 0.013 here; arrived at 0.001 there, with a
    TTFT of 0.010: 3 ms.
    """
    ttft_by_send = [
        (run.started_s + x.sent_s, times.ttft_s - (x.sent_s - x.scheduled_s))
        for x in run.exchanges
        if (times := latency(x)) is not None and x.sent_s is not None
    ]
    ttft_by_send.sort()
    sent = [at_s for at_s, _ in ttft_by_send]
    doors = []
    for arrived_s, ttft_s in quiet:
        at = bisect_right(sent, arrived_s) - 1
        if at >= 0 and arrived_s - sent[at] < MAX_TRANSIT_S and ttft_by_send[at][1] > ttft_s:
            doors.append(ttft_by_send[at][1] - ttft_s)
    return round(median(doors), 7) if len(doors) >= MIN_QUIET_REQUESTS else None


def door_seconds(run: RecordedRun) -> float | None:
    """Return the client's mean TTFT, counted from the sending, less the server's own mean.

    The server's counters are of the same requests; None where it has none.
    """
    counters = run.server.counters
    count = counters.get("time_to_first_token_seconds_count", 0.0)
    ttft = [
        times.ttft_s - (x.sent_s - x.scheduled_s)
        for x in run.exchanges
        if (times := latency(x)) is not None and x.sent_s is not None
    ]
    if not count or not ttft:
        return None
    mean_s = counters.get("time_to_first_token_seconds_sum", 0.0) / count
    return round(max(sum(ttft) / len(ttft) - mean_s, 0.0), 7)
