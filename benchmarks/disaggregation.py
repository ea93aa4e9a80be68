"""Prefill and decode in engines of their own beside chunked prefill, really, on this machine.

    python benchmarks/disaggregation.py [FOLDER] [--loads long chat short] [--seconds 7]

Three ways to use the same cores: one engine with all of them, two engines that do both, and one
that prefills beside one that decodes. Objectives are so many times what a request alone takes in
the one engine, rates are shares of what it bears with 8 requests always open; each way has the
same requests at the same times (Poisson). What is told: the share in both objectives by rate, the
highest rate up to which 90% were, and the longest pauses between two tokens.
"""

import argparse
from collections.abc import Sequence
from statistics import median

import numpy as np

from common import markdown
from headway.bench.latency import latency
from headway.core.slo import Slo
from headway.measure.record import Exchange
from judged import Data, Row, client_line, common_options, row_of, run_script, say, share_text
from served import (
    Kind,
    Server,
    Stream,
    conversations,
    drive,
    headway,
    objectives,
    patience_s,
    poisson_times,
    warm_up,
)

WAYS = {
    "one engine": "",
    "two engines": "--replicas 2",
    "apart": "--prefill-replicas 1 --decode-replicas 1",
}
LOADS = {
    "long": ("uniform:768-1280", "uniform:24-40", (8.0, 6.0)),
    "chat": ("uniform:192-320", "uniform:48-80", (14.0, 3.5)),
    "short": ("uniform:48-80", "uniform:96-160", (40.0, 2.0)),
}
"""Prompt, answer, and how many times TTFT and TPOT of a request alone are promised."""
KEPT = 0.9
ALWAYS_OPEN = 8


def kind_of(name: str, slo: Slo, scale: float) -> Kind:
    """A load with its objectives."""
    prompt, output, _ = LOADS[name]
    return Kind(name=name, share=1.0, prompt=prompt, output=output, slo=slo).scaled(scale, 1.0)


def measured_alone(server: Server, name: str, given: argparse.Namespace) -> tuple[Slo, float]:
    """(the objectives, requests a second with `ALWAYS_OPEN` open) of the one engine."""
    ttft_x, tpot_x = (given.slo_scale * times for times in LOADS[name][2])
    kind = kind_of(name, Slo(ttft_s=60.0, tpot_s=60.0), given.length_scale)
    talks = conversations([kind], [0.0] * 1000, given.seed + 7)
    with server.running() as url:
        warm_up(url, [kind], given.warmup, seed=given.seed + 8)
        alone = whole_of(url, talks[:500], 1, given)
        together = whole_of(url, talks[500:], ALWAYS_OPEN, given)
    timed = [told for x in alone if (told := latency(x)) is not None]
    ttft_s, tpot_s = median(t.ttft_s for t in timed), median(t.tpot_s or 0.0 for t in timed)
    slo = Slo(ttft_s=ttft_x * ttft_s, tpot_s=tpot_x * tpot_s)
    say(f"{name}: alone {ttft_s * 1e3:.1f} ms and {tpot_s * 1e3:.2f} ms a token; {slo}")
    return slo, max(len(together), 1) / given.seconds


def whole_of(url: str, talks: list, concurrency: int, given: argparse.Namespace) -> list[Exchange]:
    """The exchanges that came to an end within `--seconds`, so many open at once."""
    stream = Stream(conversations=talks, concurrency=concurrency)
    found = drive(url, [stream], seed=given.seed + concurrency, seconds=given.seconds)
    return [x for x in found.exchanges[0] if x.ok]


def measure(given: argparse.Namespace, data: Data) -> None:
    """Every way at every rate, load by load."""
    for turn, name in enumerate(given.loads):
        slo, bears = measured_alone(headway("", given.folder, given.flags), name, given)
        kind = kind_of(name, slo, given.length_scale)
        order = list(WAYS)[turn % len(WAYS) :] + list(WAYS)[: turn % len(WAYS)]
        for way in order:
            flags = f"{given.flags} {WAYS[way]} {objectives([kind])}"
            with headway(way, given.folder, flags).running() as url:
                warm_up(url, [kind], given.warmup, seed=given.seed + 9)
                for share in given.shares:
                    data["rows"] += one_rate(url, given, data, kind, way, share * bears)


def one_rate(
    url: str, given: argparse.Namespace, data: Data, kind: Kind, way: str, rate: float
) -> list[Row]:
    """The rows of one way at one rate."""
    seed = given.seed + 100 + round(1000 * rate)
    times = poisson_times(rate, max(1, round(rate * given.seconds)), seed)
    talks = conversations([kind], times, seed)
    found = drive(url, [Stream(conversations=talks)], seed=seed, drain_s=patience_s([kind]))
    data["clients"].append(found.client)
    told = {"way": way, "load": kind.name, "rate": rate, "slo": str(kind.slo)}
    rows = [
        told | row_of(x, kind.slo) | {"pause_s": float(np.diff(x.chunk_s).max(initial=0.0))}
        for x in found.exchanges[0]
    ]
    met = sum(row["met"] for row in rows)
    say(f"{kind.name}, {way}, {rate:.2f}/s: {met} of {len(rows)} in both objectives")
    return rows


# ── what it means ───────────────────────────────────────────────────────────────────────────


def values(rows: Sequence[Row], field: str) -> list[float]:
    return [float(row[field]) for row in rows if row[field] is not None]


def tail(rows: Sequence[Row], field: str, digits: int) -> str:
    """The median and the 90th percentile in milliseconds."""
    found = values(rows, field)
    if not found:
        return "–"
    middle, late = 1e3 * np.percentile(found, [50, 90])
    return f"{middle:.{digits}f} / {late:.{digits}f}"


def tables(data: Data) -> str:
    """By load: each way at each rate, and its highest rate."""
    parts = []
    for load in dict.fromkeys(row["load"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["load"] == load]
        lines, best = [], {}
        for way in WAYS:
            own = [row for row in rows if row["way"] == way]
            rates = sorted({row["rate"] for row in own})
            shares = []
            for rate in rates:
                at = [row for row in own if row["rate"] == rate]
                shares.append(float(np.mean(values(at, "met"))))
                pauses = tail(at, "pause_s", 1)
                cells = share_text(values(at, "met")), tail(at, "ttft_s", 0), tail(at, "tpot_s", 2)
                lines.append([way, f"{rate:.2f}", *cells, pauses])
            best[way] = highest(rates, shares)
        most = max(best.values()) or 1.0
        kept = [[way, f"{rate:.2f}", f"{rate / most:.2f}"] for way, rate in best.items()]
        parts += [
            f"{load}: {LOADS[load][0]} in, {LOADS[load][1]} out, {rows[0]['slo']}",
            markdown(["way", "requests/s", "in both", "TTFT, ms", "TPOT, ms", "pause, ms"], lines),
            markdown(["way", "requests/s of which 90% are in both", "of the best"], kept),
        ]
    return "\n\n".join([*parts, client_line(data["clients"])])


def highest(rates: Sequence[float], shares: Sequence[float]) -> float:
    """The rate at which the share falls below `KEPT`, between two that were tried.

    >>> highest([1.0, 2.0], [1.0, 0.8])
    1.5
    """
    if not shares or shares[0] < KEPT:
        return 0.0
    for at in range(1, len(rates)):
        if shares[at] < KEPT:
            part = (shares[at - 1] - KEPT) / (shares[at - 1] - shares[at])
            return rates[at - 1] + part * (rates[at] - rates[at - 1])
    return rates[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    common_options(parser, folder="")
    parser.set_defaults(warmup=2.0)
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--seconds", type=float, default=7.0, help="of traffic at each rate")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.4, 0.7, 1.0, 1.3])
    run_script(parser.parse_args(), measure, tables)


if __name__ == "__main__":
    main()
