"""Goodput under a mixed load, by policy and beside peers: `python benchmarks/goodput.py FOLDER`.

80% chats of about 150 tokens in and 80 out, 15% the same behind one system prompt of 1,500 tokens,
5% prompts of 4,000 tokens, arriving at random (Poisson) at each rate. A request is good when its
first token came within 1.5 s (10 s for the 4,000 tokens) and the others within 120 ms in the mean.
Prompts are token ids that are others at each rate, so nothing is cached by accident; each contender
gets the same requests at the same times, from a fresh server, in turns whose order goes round.

    python benchmarks/goodput.py FOLDER --flags "--quantization int8" --rates 0.3,0.6,0.9,1.2 \\
        --search 128,256,512,1024,2048 --json goodput.json

`--search` first finds the best fixed step budget of the first policy and gives it to the policies
of `--fixed`. A peer is a URL or a command: `--peer "llama.cpp=llama-server -m q8_0.gguf --port
{port} -np 16 -c 98304"`, `--peer "vLLM=PYTHON -m vllm.entrypoints.openai.api_server --model FOLDER
--port {port}"`. On a machine slower than the one the objectives are for, `--slo-scale` stretches
them, and the table says so.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common import markdown
from judged import (
    Data,
    Row,
    client_line,
    common_options,
    interval,
    keep,
    ratio_of,
    resampled,
    row_of,
    run_script,
    say,
    share_text,
)
from served import (
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


def measure(given: argparse.Namespace, data: Data) -> None:
    """Every contender at every rate, block by block."""
    mix = [kind.scaled(given.length_scale, given.slo_scale) for kind in MIX]
    servers = contenders(given, mix)
    if given.search:
        servers = with_budget(given, data, mix, servers)
    for block in range(given.blocks):
        for number, rate in enumerate(given.rates):
            count = requests_a_turn(given, rate)
            for server in turned(servers, block + number):
                one_turn(given, data, server, mix, rate, block, count)
                keep(given, data)


def turned(servers: Sequence[Server], turn: int) -> list[Server]:
    """The order of a turn: a b c, b c a, c a b, …"""
    first = turn % len(servers)
    return [*servers[first:], *servers[:first]]


def requests_a_turn(given: argparse.Namespace, rate: float) -> int:
    """A block's part of the requests at a rate, bounded by `--seconds-a-rate`."""
    count = given.requests
    if given.seconds_a_rate:
        count = min(count, round(given.seconds_a_rate * rate))
    return max(1, round(count / given.blocks))


def one_turn(
    given: argparse.Namespace,
    data: Data,
    server: Server,
    mix: Sequence[Kind],
    rate: float,
    block: int,
    count: int,
) -> float:
    """One contender at one rate, for one block; returns its goodput."""
    seed = 1000 * given.seed + 100 * block + given.all_rates.index(rate) + 1
    slos = {kind.name: kind.slo for kind in mix}
    talks = conversations(mix, poisson_times(rate, count, seed), seed)
    with server.running() as url:
        warm_up(url, mix, given.warmup, seed=seed + 50)
        found = drive(url, [Stream(conversations=talks)], seed=seed, drain_s=patience_s(mix))
    turn = {"contender": server.name, "rate": rate, "block": block}
    rows = [turn | row_of(x, slos[x.service_class]) for x in found.exchanges[0]]
    data["rows"] += rows
    data["clients"].append(turn | found.client)
    met = sum(row["met"] for row in rows)
    say(f"{server.name} at {rate:g}/s, block {block}: {met} of {len(rows)} good, {found.client}")
    return met / len(rows) * rate


def with_budget(
    given: argparse.Namespace, data: Data, mix: Sequence[Kind], servers: Sequence[Server]
) -> list[Server]:
    """The servers, those of `--fixed` with the budget that served the first of them best."""
    aside: Data = {"rows": [], "clients": []}
    rate = given.search_rate
    tried = {}
    for budget in given.search:
        trial = budgeted(servers[0], budget)
        tried[budget] = one_turn(given, aside, trial, mix, rate, 99, given.search_requests)
    best = max(tried, key=lambda budget: tried[budget])
    data["search"] = {"contender": servers[0].name, "rate": rate, "goodput": tried, "best": best}
    say(f"fixed budgets of {servers[0].name} at {rate:g}/s: {tried}; {best} is taken")
    return [budgeted(s, best) if s.name in given.fixed else s for s in servers]


def budgeted(server: Server, budget: int) -> Server:
    return replace(server, command=f"{server.command} --max-num-batched-tokens {budget}")


# ── what it means ───────────────────────────────────────────────────────────────────────────


def good(data: Data, contender: str, rate: float, kind: str = "") -> list[float]:
    """1 for each good request and 0 for each other, by the time they were due."""
    return [
        float(row["met"])
        for row in data["rows"]
        if row["contender"] == contender and row["rate"] == rate and kind in ("", row["kind"])
    ]


def names_of(data: Data, field: str) -> list:
    return list(dict.fromkeys(row[field] for row in data["rows"]))


def best_draws(data: Data, contender: str) -> np.ndarray:
    """Bootstrapped goodput at the best rate of each draw."""
    rates = sorted(names_of(data, "rate"))
    lists = [good(data, contender, rate) for rate in rates]
    return np.max([rate * resampled(v).mean(axis=1) for rate, v in zip(rates, lists) if v], axis=0)


def tables(data: Data) -> str:
    """Share in SLO by rate and kind, goodput, and ratios to the first contender."""
    contenders, rates = names_of(data, "contender"), sorted(names_of(data, "rate"))
    kinds = ["", *names_of(data, "kind")]
    shares = [
        [
            name,
            f"{rate:g}",
            *(share_text(good(data, name, rate, kind)) for kind in kinds),
            f"{rate * np.mean(good(data, name, rate)):.2f}",
            late_text(data, name, rate),
        ]
        for rate in rates
        for name in contenders
        if good(data, name, rate)
    ]
    columns = ["", "requests/s", "in SLO", *kinds[1:], "goodput/s", "chat TTFT p50 / p99, s"]
    parts = [markdown(columns, shares), markdown(*ratio_table(data, contenders, rates))]
    if "search" in data:
        found = data["search"]
        tried = ", ".join(f"{budget}: {value:.2f}" for budget, value in found["goodput"].items())
        parts.append(
            f"Goodput of {found['contender']} at {found['rate']:g}/s by budget: {tried}; "
            f"{found['best']} was taken."
        )
    scale = float(data["given"]["slo_scale"])
    parts.append(f"Objectives times {scale:g}. {client_line(clients(data))}")
    return "\n\n".join(parts)


def clients(data: Data) -> list[Row]:
    names = ("cpu_share", "lag_p99_s", "loop_late_p99_s")
    return [{name: each[name] for name in names} for each in data["clients"]]


def late_text(data: Data, contender: str, rate: float) -> str:
    found = [
        row["ttft_s"]
        for row in data["rows"]
        if (row["contender"], row["rate"], row["kind"]) == (contender, rate, "chat")
        and row["ttft_s"] is not None
    ]
    if not found:
        return "–"
    middle, late = np.percentile(found, [50, 99])
    return f"{middle:.2f} / {late:.2f}"


def ratio_table(
    data: Data, contenders: Sequence[str], rates: Sequence[float]
) -> tuple[list[str], list[list[str]]]:
    """Goodput beside each other contender's, at each rate and at each one's best rate."""
    last = contenders_last(contenders)
    rows = []
    for other in contenders:
        if other == last:
            continue
        cells = []
        for rate in rates:
            a, b = good(data, last, rate), good(data, other, rate)
            cells.append(ratio_text(a, b) if len(a) == len(b) and a else "–")
        low, high = interval(ratio_of(best_draws(data, last), best_draws(data, other)))
        best = [
            max(rate * np.mean(good(data, n, rate) or [0]) for rate in rates) for n in (last, other)
        ]
        whole = best[0] / best[1] if best[1] else float("inf")
        rows.append([f"{last} / {other}", *cells, f"{whole:.2f} ({low:.2f} to {high:.2f})"])
    return ["goodput", *(f"{rate:g}/s" for rate in rates), "each at its best"], rows


def contenders_last(contenders: Sequence[str]) -> str:
    """Whose goodput is set beside the others': slo where it ran, else the first."""
    return "slo" if "slo" in contenders else contenders[0]


def ratio_text(a: Sequence[float], b: Sequence[float]) -> str:
    """1.62 (1.31 to 2.05), drawn in pairs: both had the same requests at the same times."""
    if not sum(b):
        return "–" if not sum(a) else "∞"
    low, high = interval(ratio_of(resampled(a).mean(axis=1), resampled(b).mean(axis=1)))
    return f"{sum(a) / sum(b):.2f} ({low:.2f} to {high:.2f})"


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_options(parser)
    parser.add_argument("--rates", type=numbers, default=[0.2, 0.4, 0.6, 0.8, 1.0])
    parser.add_argument("--requests", type=int, default=300, help="at each rate, of each")
    parser.add_argument("--seconds-a-rate", type=float, help="at most, of each; fewer requests")
    parser.add_argument("--blocks", type=int, default=2, help="turns of each at each rate")
    contender_options(parser)
    parser.add_argument("--search", type=lambda t: [int(p) for p in t.split(",")], default=[])
    parser.add_argument("--search-rate", type=float, help="default: the middle of --rates")
    parser.add_argument("--search-requests", type=int, default=100)
    parser.add_argument("--fixed", type=lambda t: t.split(","), default=["fcfs", "fair"])
    given = parser.parse_args()
    given.search_rate = given.search_rate or sorted(given.rates)[len(given.rates) // 2]
    given.all_rates = list(dict.fromkeys([*given.rates, given.search_rate]))
    run_script(given, measure, tables)


if __name__ == "__main__":
    main()
