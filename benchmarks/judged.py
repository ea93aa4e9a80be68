"""What is made of exchanges with a server: rows, intervals, tables, and one way to run a script.

One row a request is kept as JSON. Figures come with 95%: Wilson's interval for shares, a bootstrap
over runs of neighbours (they wait in one queue) for everything else. `run_script` gives a script
`--json`, and `--from`, which makes the tables again from the JSON of an earlier run.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common import write_json
from headway.bench.comparison import bootstrap_samples
from headway.bench.latency import latency
from headway.bench.report import misses
from headway.core.slo import Slo
from headway.measure.record import Exchange

Z = 1.959964
LOW, HIGH = 2.5, 97.5
Row = dict[str, Any]
Data = dict[str, Any]


def row_of(x: Exchange, slo: Slo) -> Row:
    """What is kept of a request; times in seconds from when it was due, None what never came."""
    timed = latency(x)
    return {
        "kind": x.service_class,
        "scheduled_s": round(x.scheduled_s, 4),
        "lag_s": None if x.sent_s is None else round(x.sent_s - x.scheduled_s, 5),
        "ttft_s": None if timed is None else round(timed.ttft_s, 5),
        "tpot_s": None if timed is None or timed.tpot_s is None else round(timed.tpot_s, 6),
        "e2e_s": None if timed is None else round(timed.e2e_s, 5),
        "answered_s": None
        if x.headers_s is None or x.sent_s is None
        else round(x.headers_s - x.sent_s, 5),
        "prompt_tokens": x.num_prompt,
        "output_tokens": x.num_output,
        "cached_tokens": x.cached_tokens,
        "status": x.status,
        "error": x.error,
        "met": not misses(slo, x, timed),
    }


# ── intervals ───────────────────────────────────────────────────────────────────────────────


def wilson(met: int, count: int) -> tuple[float, float]:
    """95% of a share: 45 of 50 → 0.786 to 0.957."""
    if not count:
        return 0.0, 1.0
    share, spread = met / count, Z * Z / count
    middle = share + spread / 2
    half = Z * math.sqrt(share * (1 - share) / count + spread / count / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def resampled(values: Sequence[float]) -> np.ndarray:
    """Samples of runs of neighbours, a row each; lists of one length are drawn alike (paired)."""
    return bootstrap_samples(np.asarray(values, dtype=float), np.random.default_rng(0))


def interval(samples: np.ndarray) -> tuple[float, float]:
    """95% of the samples that are numbers."""
    usable = samples[np.isfinite(samples)]
    if not len(usable):
        return math.nan, math.nan
    low, high = np.percentile(usable, [LOW, HIGH])
    return float(low), float(high)


def ratio_of(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """Elementwise; nan where nothing is divided by nothing, inf never."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bottom > 0, top / bottom, np.nan)


# ── a script ────────────────────────────────────────────────────────────────────────────────


def share_text(values: Sequence[float]) -> str:
    """62% (51 to 72), of ones and zeros."""
    if not values:
        return "–"
    low, high = wilson(int(sum(values)), len(values))
    return f"{np.mean(values):.0%} ({100 * low:.0f} to {100 * high:.0f})"


def yes(kept: bool) -> str:
    return "yes" if kept else "no"


def client_line(clients: Sequence[Mapping[str, float]]) -> str:
    """Whether the load generator could have been the bottleneck."""
    most = {name: max(c[name] for c in clients) for name in clients[0]}
    return (
        f"The load generator: at most {most['cpu_share']:.0%} of a core, requests left "
        f"{most['lag_p99_s'] * 1e3:.1f} ms late (p99), its loop woke "
        f"{most['loop_late_p99_s'] * 1e3:.1f} ms late (p99)."
    )


def common_options(parser: argparse.ArgumentParser, folder: str | None = None) -> None:
    """What all scripts take."""
    nargs = {} if folder is None else {"nargs": "?", "default": folder}
    parser.add_argument("folder", **nargs)  # type: ignore[arg-type]
    parser.add_argument("--flags", default="", help="more flags of every server of ours")
    parser.add_argument("--slo-scale", type=float, default=1.0, help="stretches all objectives")
    parser.add_argument("--length-scale", type=float, default=1.0, help="multiplies all lengths")
    parser.add_argument("--warmup", type=float, default=15.0, help="seconds after each start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep every request here")
    parser.add_argument(
        "--from", type=Path, dest="stored", help="measure nothing; take an earlier --json"
    )


def run_script(
    given: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Data], None],
    tables: Callable[[Data], str],
) -> None:
    """Measure, or read what was measured; then print the tables.

    `measure` fills the data it is handed and calls `keep` after each turn, so that a run that is
    cut short leaves what it has.
    """
    if given.stored:
        data: Data = json.loads(given.stored.read_text())
    else:
        options = {name: str(value) for name, value in vars(given).items()}
        data = {"given": options, "num_cpus": os.cpu_count(), "rows": [], "clients": []}
        measure(given, data)
        keep(given, data)
    print(tables(data))


def keep(given: argparse.Namespace, data: Data) -> None:
    """Write what there is so far, when a file was named."""
    write_json(given.json, data)


def say(*words: object) -> None:
    """Progress, beside the tables."""
    print(*words, file=sys.stderr, flush=True)
