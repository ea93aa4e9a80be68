"""Runs made up by hand, whose every figure is known."""

from collections.abc import Callable, Sequence

from headway.measure.record import ClientCost, Exchange, LoadRecord, RecordedRun, ServerRecord


def exchange(
    number: int,
    scheduled_s: float,
    chunk_s: Sequence[float],
    tokens: Sequence[int] | None = None,
    **changes: object,
) -> Exchange:
    """An answered request; each chunk one token unless `tokens` says otherwise."""
    counts = list(tokens) if tokens is not None else [1] * len(chunk_s)
    values: dict = {
        "id": number,
        "scheduled_s": scheduled_s,
        "asked_prompt_tokens": 10,
        "asked_output_tokens": sum(counts),
        "sent_s": scheduled_s,
        "headers_s": scheduled_s,
        "ended_s": chunk_s[-1] if chunk_s else scheduled_s + 1.0,
        "published_s": chunk_s[0] if chunk_s else None,
        "chunk_s": list(chunk_s),
        "chunk_tokens": counts,
        "prompt_tokens": 10,
        "output_tokens": sum(counts),
        "status": 200,
    }
    return Exchange(**(values | changes))


def steady(
    count: int,
    every_s: float,
    ttft_s: Callable[[int], float] = lambda i: 0.1,
    tpot_s: float = 0.01,
    tokens: int = 11,
    **changes: object,
) -> list[Exchange]:
    """Requests at even times, each with its TTFT and even gaps."""
    return [
        exchange(
            i,
            i * every_s,
            [i * every_s + ttft_s(i) + k * tpot_s for k in range(tokens)],
            **changes,
        )
        for i in range(count)
    ]


def run_of(exchanges: list[Exchange], span_s: float, **changes: object) -> RecordedRun:
    """The run they make, with nothing cut."""
    end_s = max([span_s, *(x.ended_s or 0.0 for x in exchanges)])
    values: dict = {
        "loop": "open",
        "arrivals": "constant",
        "workload": "synthetic",
        "seed": 0,
        "span_s": span_s,
        "from_s": 0.0,
        "to_s": end_s,
        "rate": len(exchanges) / span_s,
    }
    return RecordedRun(
        started_at=0.0,
        started_s=0.0,
        load=LoadRecord(**(values | changes)),
        server=ServerRecord(url="http://x", model="m", endpoint="completions"),
        client=ClientCost(cpu_s=0.1, wall_s=end_s, late_s=[0.001] * 10),
        exchanges=exchanges,
    )
