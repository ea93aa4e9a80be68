"""What a server does with five times its load: `python benchmarks/overload.py [FOLDER]`.

First the rate is raised step by step until goodput falls: its peak. Then one open loop sends at 70%
of the peak a second, at five times the peak for 60 s, and at 70% again. Told are goodput in the
overload beside the peak, how soon refusals came (both cores are busy), and when the first run of
requests in a row was within its objectives again.

    python benchmarks/overload.py FOLDER --flags "--quantization int8" \\
        --json overload.json

By default it takes the embedded model; each policy has a server of its own, the ramp included.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from common import markdown
from judged import (
    Data,
    Row,
    client_line,
    common_options,
    interval,
    keep,
    resampled,
    row_of,
    run_script,
    say,
    share_text,
    yes,
)
from served import (
    CHAT,
    MIX,
    Kind,
    Server,
    Stream,
    contender_options,
    contenders,
    conversations,
    drive,
    patience_s,
    poisson_times,
    warm_up,
)

MIXES = {"chat": (CHAT,), "mix": MIX}
FALLING = 0.9
"""The ramp ends after two steps below this share of the best goodput so far."""
ASKED_SHARE, ASKED_REFUSAL_S, ASKED_NORMAL_S = 0.9, 0.05, 5.0
REFUSED = (429, 503)


def measure(given: argparse.Namespace, data: Data) -> None:
    """The ramp and the overload, server by server."""
    mix = [k.scaled(given.length_scale, given.slo_scale) for k in MIXES[given.mix]]
    data["phases"], data["ramp"] = {}, []
    with class_flags(given, mix) as told:
        for server in contenders(given, mix, told):
            with server.running() as url:
                warm_up(url, mix, given.warmup, seed=given.seed + 1)
                peak = ramp(given, data, server, url, mix)
                overload(given, data, server, url, mix, peak)
            keep(given, data)


@contextmanager
def class_flags(given: argparse.Namespace, mix: Sequence[Kind]) -> Iterator[str]:
    """The flag of a class file with objectives and `--limits`; "" without limits."""
    if not given.limits:
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = {k.name: {"slo": str(k.slo), "limits": json.loads(given.limits)} for k in mix}
        file = Path(folder, "classes.yaml")
        file.write_text(json.dumps(rows))  # JSON is YAML too
        yield f"--classes {file}"


def ramp(
    given: argparse.Namespace, data: Data, server: Server, url: str, mix: Sequence[Kind]
) -> float:
    """The highest goodput a second; steps are noted in `data["ramp"]`."""
    slos = {kind.name: kind.slo for kind in mix}
    rate, best, below, step = given.from_rate, 0.0, 0, 0
    while below < 2 and step < given.most_steps:
        seed = 1000 * (given.seed + 1) + step
        times = arrivals(rate, given.ramp_seconds, seed)
        talks = conversations(mix, times, seed)
        found = drive(url, [Stream(conversations=talks)], seed=seed, drain_s=patience_s(mix))
        met = [not_missed(x, slos) for x in found.exchanges[0]]
        goodput = rate * sum(met) / len(met)
        data["ramp"].append(
            {"contender": server.name, "rate": rate, "goodput": goodput, "met": met}
        )
        data["clients"].append(found.client)
        say(f"{server.name}: {goodput:.2f} good of {rate:.2f}/s")
        below = below + 1 if goodput < FALLING * best else 0
        best = max(best, goodput)
        rate, step = rate * given.factor, step + 1
    return best or given.from_rate


def not_missed(x, slos) -> bool:  # type: ignore[no-untyped-def]
    return bool(row_of(x, slos[x.service_class])["met"])


def arrivals(rate: float, seconds: float, seed: int, from_s: float = 0.0) -> list[float]:
    """Poisson arrivals within so many seconds; at least one."""
    times = poisson_times(rate, int(rate * seconds * 2) + 20, seed)
    return [from_s + t for t in times if t < seconds] or [from_s]


def overload(
    given: argparse.Namespace,
    data: Data,
    server: Server,
    url: str,
    mix: Sequence[Kind],
    peak: float,
) -> None:
    """Normal, overload, normal, in one open loop."""
    normal = given.normal * peak
    plan = [
        ("before", normal, given.before),
        ("overload", given.times * peak, given.seconds),
        ("after", normal, given.after),
    ]
    times, begin_s, phases = [], 0.0, {}
    for number, (name, rate, seconds) in enumerate(plan):
        times += arrivals(rate, seconds, given.seed + 70 + number, begin_s)
        phases[name] = {"from_s": begin_s, "to_s": begin_s + seconds, "rate": rate}
        begin_s += seconds
    seed = given.seed + 77
    talks = conversations(mix, times, seed)
    found = drive(url, [Stream(conversations=talks)], seed=seed, drain_s=patience_s(mix))
    slos = {kind.name: kind.slo for kind in mix}
    label: Row = {"contender": server.name}
    data["rows"] += [label | row_of(x, slos[x.service_class]) for x in found.exchanges[0]]
    data["clients"].append(found.client)
    data["phases"][server.name] = phases


# ── what it means ───────────────────────────────────────────────────────────────────────────


def rows_in(data: Data, name: str, phase: str) -> list[Row]:
    """The requests that were due in a phase, by their times."""
    bounds = data["phases"][name][phase]
    found = [
        row
        for row in data["rows"]
        if row["contender"] == name and bounds["from_s"] <= row["scheduled_s"] < bounds["to_s"]
    ]
    return sorted(found, key=lambda row: row["scheduled_s"])


def seconds_of(data: Data, name: str, phase: str) -> float:
    bounds = data["phases"][name][phase]
    return float(bounds["to_s"] - bounds["from_s"])


def peak_of(data: Data, name: str) -> Row:
    steps = [step for step in data["ramp"] if step["contender"] == name]
    return max(steps, key=lambda step: step["goodput"])  # type: ignore[no-any-return]


def normal_again_s(data: Data, name: str, run: int) -> float | None:
    """Seconds from the overload's end to the first of `run` requests in a row that were good."""
    after = rows_in(data, name, "after")
    start_s = data["phases"][name]["after"]["from_s"]
    for i in range(len(after) - run + 1):
        if all(row["met"] for row in after[i : i + run]):
            return float(after[i]["scheduled_s"] - start_s)
    return None


def tables(data: Data) -> str:
    """Peak, overload, refusals and the time until all is normal, a line each server."""
    run = int(data["given"]["run"])
    rows = [table_row(data, name, run) for name in data["phases"]]
    columns = ["", "peak, good/s (offered)", "overload, good/s (offered)", "of the peak", "≥ 90%"]
    columns += ["refused", "refusal p50 / p95, ms", "≤ 50 ms", f"{run} good in a row after"]
    columns += ["≤ 5 s", "in SLO before / after"]
    return f"{markdown(columns, rows)}\n\n{client_line(data['clients'])}"


def table_row(data: Data, name: str, run: int) -> list[str]:
    peak, phases = peak_of(data, name), data["phases"][name]
    busy = rows_in(data, name, "overload")
    met = [float(row["met"]) for row in busy]
    goodput = sum(met) / seconds_of(data, name, "overload")
    of_peak = goodput / peak["goodput"] if peak["goodput"] else float("nan")
    low, high = interval(share_draws(data, name, met))
    refused = [r["answered_s"] for r in busy if r["status"] in REFUSED]
    p50, p95 = np.percentile(refused, [50, 95]) if refused else (np.nan, np.nan)
    again_s = normal_again_s(data, name, run)
    return [
        name,
        f"{peak['goodput']:.2f} ({peak['rate']:.2f})",
        f"{goodput:.2f} ({phases['overload']['rate']:.2f})",
        f"{of_peak:.0%} ({100 * low:.0f} to {100 * high:.0f})",
        yes(of_peak >= ASKED_SHARE),
        f"{len(refused) / max(1, len(busy)):.0%}",
        f"{p50 * 1e3:.1f} / {p95 * 1e3:.1f}" if refused else "–",
        yes(p95 <= ASKED_REFUSAL_S) if refused else "none",
        "never" if again_s is None else f"{again_s:.1f} s",
        yes(again_s is not None and again_s <= ASKED_NORMAL_S),
        " / ".join(
            share_text([row["met"] for row in rows_in(data, name, phase)])
            for phase in ("before", "after")
        ),
    ]


def share_draws(data: Data, name: str, met: Sequence[float]) -> np.ndarray:
    """Bootstrapped goodput of the overload over that of the peak."""
    peak = peak_of(data, name)
    if not met or not sum(peak["met"]):
        return np.array([np.nan])
    top = resampled(met).mean(axis=1) * len(met) / seconds_of(data, name, "overload")
    draw = resampled([float(m) for m in peak["met"]]).mean(axis=1) * peak["rate"]
    return np.where(draw > 0, top / np.maximum(draw, 1e-12), np.nan)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_options(parser, folder="headway-tiny")
    parser.add_argument("--mix", choices=MIXES, default="chat", help="chats alone, or the mix")
    parser.add_argument("--from-rate", type=float, default=1.0, help="where the ramp begins")
    parser.add_argument("--factor", type=float, default=1.3, help="from one step to the next")
    parser.add_argument("--ramp-seconds", type=float, default=30.0, help="of each step")
    parser.add_argument("--most-steps", type=int, default=20)
    parser.add_argument("--times", type=float, default=5.0, help="of the highest goodput")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload")
    parser.add_argument("--normal", type=float, default=0.7, help="of the highest goodput")
    parser.add_argument("--before", type=float, default=20.0, help="seconds at the normal rate")
    parser.add_argument("--after", type=float, default=60.0, help="seconds at the normal rate")
    parser.add_argument("--limits", help='of each class, as JSON: {"queue_seconds": 1.5}')
    parser.add_argument("--run", type=int, default=10, help="good requests in a row are normal")
    contender_options(parser)
    parser.set_defaults(policies=["fcfs", "slo", "slo+shed"])
    run_script(parser.parse_args(), measure, tables)


if __name__ == "__main__":
    main()
