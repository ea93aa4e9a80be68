"""How much one server keeps, how many the peak takes, and what gives way first: all by simulation.

The rate that keeps the attainment is searched on the demand's own traffic, sent faster or slower as
a whole, three times: as the machine is, and at both ends of what is believed of it. Of requests at
once it is their number: each client asks the next when it has its answer. The number of
servers is then simulated behind their router, at the peak, in each of the drawn cases: it counts if
the worst of them keeps the attainment.
"""

from collections import Counter
from collections.abc import Callable
from math import ceil

import msgspec

from headway.advise.plan.demand import Demand
from headway.advise.plan.machines import Candidate
from headway.advise.plan.trial import Trial, Wanted, faster, most_at_once, most_rate
from headway.advise.simulate.loop import World
from headway.advise.simulate.machine import Machinery
from headway.advise.simulate.run import busy_share
from headway.advise.simulate.truth import ROOFLINE
from headway.bench.latency import latency
from headway.bench.report import Report, misses
from headway.perf.model import Work

SEARCH_REQUESTS = 400
MOST_SERVERS = 64
OVER = 1.4
"""How much more traffic shows what gives way first."""
HOURS = 8766
MISSED = {
    "failed": "the queue: requests are refused (503)",
    "ttft": "time to first token: prompts wait",
    "tpot": "time per token: steps are too long for their rows",
    "itl_p99": "gaps between tokens: chunks of prompts are beside them",
    "e2e": "whole answers",
}
"""Objective → what gave way where it was missed."""


class Row(msgspec.Struct, kw_only=True):
    """One machine's answer. Ranges are (lowest, as simulated, highest) of the cases."""

    machine: str
    weights: str
    label: str
    tensor: int
    pipeline: int
    kv_tokens: int
    rows: int
    prompt_s: float
    tpot_s: float
    rate: tuple[float, float, float]
    at_once: tuple[int, int, int] | None = None
    servers: int | None
    servers_range: tuple[int, int]
    attainment: tuple[float, float] | None = None
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    usd_per_good_request: float | None = None
    watts: float | None = None
    joules_per_token: float | None = None
    kwh_per_year: float | None = None
    cache_hit_rate: float | None = None
    curves: list[list[tuple[float, float]]] = []
    """(requests/s of one server, or at once; share in SLO) that were tried, by case."""
    breaks_first: str = ""
    hopeless: str = ""
    notes: list[str] = []


def alone_s(seconds: Callable[[Work], float], tokens: int, chunk: int, groups: int) -> float:
    """A prompt beside nothing, in chunks."""
    total_s, start = 0.0, 0
    while start < tokens:
        count = min(chunk, tokens - start)
        attended = count * start + count * (count + 1) // 2
        last = start + count == tokens
        total_s += seconds(Work(count, int(last), attended, (start + count) * groups))
        start += count
    return total_s


def mean_seconds(found: Machinery, scale: float) -> Callable[[Work], float]:
    """What a step takes in the mean, without good and bad times."""
    if found.fit is None:
        return found.truth(0, scale).seconds
    mean = found.fit.mean
    return lambda work: scale * mean.seconds(work)


def size(candidate: Candidate, demand: Demand, wanted: Wanted) -> Row:
    """The answer for one machine."""
    found = candidate.machinery
    settings, cases = found.settings, found.cases(2, wanted.bench.options.seed)
    groups = len(settings.cache.windows)
    step = mean_seconds(found, cases[0][1])
    prompt_s = alone_s(step, demand.prompt_p95, settings.max_num_batched_tokens, groups)
    context = demand.prompt_p95 + demand.answer_p50
    tpot_s = step(Work(1, 1, context, context * groups))
    row = Row(
        machine=candidate.name,
        weights=candidate.weights,
        label=found.label,
        tensor=candidate.tensor,
        pipeline=candidate.pipeline,
        kv_tokens=(min(settings.cache.token_blocks) - 1) * settings.cache.block_size,
        rows=settings.max_num_seqs,
        prompt_s=prompt_s,
        tpot_s=tpot_s,
        rate=(0.0, 0.0, 0.0),
        servers=None,
        servers_range=(0, 0),
        watts=candidate.watts,
        notes=list(found.notes),
    )
    row.hopeless = hopeless(row, wanted, demand, candidate)
    if row.hopeless:
        return row
    trial = Trial(candidate, wanted)
    ends = [cases[0], *cases[-2:]]
    if demand.at_once is not None:
        talks = demand.conversations
        kept = []
        for end in ends:
            kept.append(most_at_once(trial, talks, *end, demand.at_once))
            row.curves.append(trial.curve())
        row.at_once = min(kept), kept[0], max(kept)
        if not kept[0]:
            row.hopeless = "one server does not keep the objectives of one request at a time"
            return row
        count(row, trial, demand, cases, [demand.at_once / each for each in row.at_once if each])
        return row
    part = demand.conversations[:SEARCH_REQUESTS]
    rates, shape = [], len(part) / max(part[-1].at_s, 1e-9)
    for end in ends:
        rates.append(most_rate(trial, part, *end))
        row.curves.append(trial.curve(shape))
    row.rate = (min(rates) * shape, rates[0] * shape, max(rates) * shape)
    if not row.rate[1]:
        row.hopeless = "one server keeps the objectives at no part of this traffic that was tried"
        return row
    asked = len(demand.conversations) / max(demand.conversations[-1].at_s, 1e-9)
    count(row, trial, demand, cases, [asked / each for each in row.rate if each])
    return row


def hopeless(row: Row, wanted: Wanted, demand: Demand, candidate: Candidate) -> str:
    """Why no number of these servers keeps the objectives; "" where some may.

    On a roofline that holds only if its best end is too slow as well.
    """
    slo = wanted.strictest
    if slo is None:
        return ""
    found = candidate.machinery
    settings, best = found.settings, mean_seconds(found, 0.0 if found.ends else 1.0)
    groups = len(settings.cache.windows)
    prompt_s = alone_s(best, demand.prompt_p95, settings.max_num_batched_tokens, groups)
    context = demand.prompt_p95
    tpot_s = best(Work(1, 1, context, context * groups))
    if slo.ttft_s is not None and prompt_s > slo.ttft_s:
        fits = most_tokens(best, settings.max_num_batched_tokens, groups, slo.ttft_s)
        return (
            f"prefill alone takes {prompt_s:.2f} s at p95, the objective is {slo.ttft_s:g} s: no "
            f"number of servers helps; {prompt_s / slo.ttft_s:.1f} times the FLOP/s do, or prompts "
            f"of at most {fits:,} tokens"
        )
    if slo.tpot_s is not None and tpot_s > slo.tpot_s:
        return (
            f"a token alone takes {1e3 * tpot_s:.1f} ms, the objective is {1e3 * slo.tpot_s:g} ms: "
            f"no number of servers helps; {tpot_s / slo.tpot_s:.1f} times the bandwidth do, or "
            "fewer bytes a weight"
        )
    return ""


def most_tokens(step: Callable[[Work], float], chunk: int, groups: int, within_s: float) -> int:
    """The longest prompt whose prefill alone fits."""
    low, high = 0, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        if alone_s(step, middle, chunk, groups) <= within_s:
            low = middle
        else:
            high = middle
    return low


def count(
    row: Row, trial: Trial, demand: Demand, cases: list[tuple[int, float]], times: list[float]
) -> None:
    """The smallest number of servers whose worst case keeps the attainment, simulated. One server
    would have to be so many `times` itself, at the worst, as it is and at the best."""
    part = demand.conversations
    least, middle, most = ceil(times[-1]), ceil(times[-2]), ceil(times[0])
    if len(times) < 3:  # at the worst, no number of them would do
        most = MOST_SERVERS
    row.servers_range = (max(least, 1), max(most, 1))
    firm = cases if row.label != ROOFLINE else cases[:1]
    servers = min(max(middle, 1), MOST_SERVERS)
    kept: tuple[int, list[tuple[Report, World]]] | None = None
    tried: set[int] = set()
    while servers not in tried and 1 <= servers <= MOST_SERVERS:
        tried.add(servers)
        runs = [trial.run(part, servers, *case, demand.at_once) for case in firm]
        shares = [report.rates.attainment or 0.0 for report, _ in runs]
        if min(shares) >= trial.wanted.attainment:
            kept = servers, runs
            row.attainment = min(shares), max(shares)
            servers -= 1
        elif kept is not None:
            break
        else:
            servers += 1
        if len(tried) >= 6:
            break
    if kept is None:
        row.notes.append(f"none of {sorted(tried)} servers keeps the attainment in the worst case")
        return
    row.servers = kept[0] + trial.wanted.survive
    priced(row, trial.candidate, kept[1][0], row.servers)
    row.breaks_first = first_to_break(trial, demand, kept[0])


def priced(row: Row, candidate: Candidate, run: tuple[Report, World], servers: int) -> None:
    """Cost and energy of what was simulated; columns without a price or watts stay empty."""
    report, world = run
    rates = report.rates
    tokens_per_s = rates.input_tokens_per_s + rates.output_tokens_per_s
    busy = busy_share(world)
    row.cache_hit_rate = rates.cache_hit_rate
    if candidate.usd_per_hour is not None:
        row.usd_per_hour = candidate.usd_per_hour * servers
        row.usd_per_million_tokens = row.usd_per_hour / 3600 / max(tokens_per_s, 1e-9) * 1e6
        row.usd_per_good_request = row.usd_per_hour / 3600 / max(rates.goodput_per_s or 0, 1e-9)
    if candidate.watts is not None:
        watts = candidate.watts * servers * min(busy, 1.0)
        row.joules_per_token = watts / max(tokens_per_s, 1e-9)
        row.kwh_per_year = watts * HOURS / 1000


def first_to_break(trial: Trial, demand: Demand, servers: int) -> str:
    """What is missed when more comes than was planned for."""
    talks, at_once = faster(demand.conversations, OVER), demand.at_once
    more = None if at_once is None else ceil(OVER * at_once)
    report, world = trial.run(talks, servers, 0, cases_scale(trial), more)
    missed: Counter[str] = Counter()
    slos = {each.name: each.slo for each in trial.wanted.bench.classes}
    for x in report.run.exchanges:
        slo = slos.get(x.service_class)
        if slo is not None:
            missed.update(misses(slo, x, latency(x)))
    preempted = sum(r.engine.scheduler.num_preemptions for r in world.replicas)
    if not missed:
        return f"nothing at {OVER:g} times the traffic"
    name, number = missed.most_common(1)[0]
    memory = f", and KV memory: {preempted} preemptions" if preempted else ""
    share = number / max(len(report.run.exchanges), 1)
    return f"at {OVER:g} times the traffic {MISSED[name]} ({share:.0%}){memory}"


def cases_scale(trial: Trial) -> float:
    """The scale of the machine as it is."""
    return trial.candidate.machinery.cases(1, 0)[0][1]
