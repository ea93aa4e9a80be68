"""The last five minutes as lines of a chart, for a page that was opened just now.

A point a second, from the slots that windows are summed from, also where nothing happened.
Latencies are of the requests that ended in the 10 seconds before, as the page shows them live.
"""

import numpy as np

from headway.telemetry.snapshot import WINDOWS_S, HistoryPoint
from headway.telemetry.windows import Slot, Slots

PERCENTILES = 0.5, 0.99


def history(slots: Slots, now_s: float) -> list[HistoryPoint]:
    """Whole seconds, oldest first; the second that runs now is not among them."""
    found, _ = slots.last(max(WINDOWS_S), now_s)
    kept = {slot.second: slot for slot in found if slot.second < int(now_s)}
    if not kept:
        return []
    return [
        point(second, kept.get(second), recent(kept, second))
        for second in range(min(kept), int(now_s))
    ]


def recent(kept: dict[int, Slot], second: int) -> list[Slot]:
    """The slots of the 10 seconds up to `second`."""
    span = range(second - WINDOWS_S[0] + 1, second + 1)
    return [kept[each] for each in span if each in kept]


def point(second: int, slot: Slot | None, near: list[Slot]) -> HistoryPoint:
    """One second: its own counts, and the latencies of the slots `near`."""
    ended = [request for each in near for request in each.ended]
    ttft = percentiles([one.ttft_s for one in ended if one.ttft_s is not None])
    tpot = percentiles([one.tpot_s for one in ended if one.tpot_s is not None])
    at_s = float(second + 1)
    if slot is None:
        return HistoryPoint(at_s, 0, 0, 0.0, 0.0, 0.0, *ttft, *tpot)
    output = slot.first_tokens + sum(gaps.count for gaps in slot.gap_counts().values())
    steps = [part for part in (slot.decode, slot.prefill) if part.count]
    count = sum(part.count for part in steps) or 1
    running = sum(part.num_running for part in steps) / count
    waiting = sum(part.num_waiting for part in steps) / count
    usage = sum(part.kv_usage for part in steps) / count
    return HistoryPoint(at_s, output, slot.prompt_tokens, running, waiting, usage, *ttft, *tpot)


def percentiles(values: list[float]) -> tuple[float | None, float | None]:
    """(p50, p99) of these; None of nothing."""
    if not values:
        return None, None
    middle, tail = np.quantile(values, PERCENTILES).tolist()
    return middle, tail
