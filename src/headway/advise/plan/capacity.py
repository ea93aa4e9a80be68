"""How much load one server keeps, how many servers the peak needs, and what fails first.

The rate that keeps the attainment is searched on the demand's own traffic, sent faster or slower as
a whole, three times: for the machine as it is, and for both ends of its uncertainty. In a closed
loop the number of concurrent requests is searched instead. The number of servers is then simulated
behind their router, at the peak, in each of the drawn cases: it is enough if the worst of them
keeps the attainment.
"""

from collections import Counter
from collections.abc import Callable
from math import ceil

import msgspec

from headway.advise.plan.demand import PlannedDemand
from headway.advise.plan.machines import MachineCandidate
from headway.advise.plan.trial import (
    CapacityTrial,
    PlanTarget,
    max_concurrency,
    max_rate_factor,
    speed_up,
)
from headway.advise.simulate.loop import World
from headway.advise.simulate.machine import SimulatedMachine
from headway.advise.simulate.run import busy_share
from headway.advise.simulate.truth import ROOFLINE
from headway.bench.latency import latency
from headway.bench.report import BenchReport, misses
from headway.perf.model import Work

SEARCH_REQUESTS = 400
MAX_SERVERS = 64
OVERLOAD_FACTOR = 1.4
"""Factor of the traffic under which the first missed objective is looked for."""
HOURS_PER_YEAR = 8766
MISSED_OBJECTIVE_TEXTS = {
    "failed": "the queue: requests are refused (503)",
    "ttft": "time to first token: prompts wait",
    "tpot": "time per token: steps are too long for their rows",
    "itl_p99": "gaps between tokens: chunks of prompts are beside them",
    "e2e": "whole answers",
}
"""Missed objective → what fails first."""


class MachineRow(msgspec.Struct, kw_only=True):
    """The figures of one machine. Ranges are (lowest, as simulated, highest) of the cases."""

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
    """By case, the points that were tried: (requests/s or concurrency of one server; share in
    SLO)."""
    breaks_first: str = ""
    hopeless: str = ""
    notes: list[str] = []


def prefill_seconds(
    seconds: Callable[[Work], float], tokens: int, chunk: int, groups: int
) -> float:
    """Return the seconds of a prompt alone on the machine, in chunks."""
    total_s, start = 0.0, 0
    while start < tokens:
        count = min(chunk, tokens - start)
        attended = count * start + count * (count + 1) // 2
        last = start + count == tokens
        total_s += seconds(Work(count, int(last), attended, (start + count) * groups))
        start += count
    return total_s


def mean_step_seconds(machine: SimulatedMachine, scale: float) -> Callable[[Work], float]:
    """Return the mean seconds of a step by its work, without the variation over time."""
    if machine.fit is None:
        return machine.truth(0, scale).seconds
    mean = machine.fit.mean
    return lambda work: scale * mean.seconds(work)


def size_machine(
    candidate: MachineCandidate, demand: PlannedDemand, target: PlanTarget
) -> MachineRow:
    """Return the row of one machine."""
    machine = candidate.machinery
    settings, cases = machine.settings, machine.cases(2, target.bench.options.seed)
    groups = len(settings.cache.windows)
    step = mean_step_seconds(machine, cases[0][1])
    prompt_s = prefill_seconds(step, demand.prompt_p95, settings.max_num_batched_tokens, groups)
    context = demand.prompt_p95 + demand.answer_p50
    tpot_s = step(Work(1, 1, context, context * groups))
    row = MachineRow(
        machine=candidate.name,
        weights=candidate.weights,
        label=machine.label,
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
        notes=list(machine.notes),
    )
    row.hopeless = why_hopeless(row, target, demand, candidate)
    if row.hopeless:
        return row
    trial = CapacityTrial(candidate, target)
    ends = [cases[0], *cases[-2:]]
    if demand.at_once is not None:
        talks = demand.conversations
        at_once_by_case = []
        for end in ends:
            at_once_by_case.append(max_concurrency(trial, talks, *end, demand.at_once))
            row.curves.append(trial.curve())
        row.at_once = min(at_once_by_case), at_once_by_case[0], max(at_once_by_case)
        if not at_once_by_case[0]:
            row.hopeless = "one server does not keep the objectives of one request at a time"
            return row
        count_servers(
            row, trial, demand, cases, [demand.at_once / each for each in row.at_once if each]
        )
        return row
    part = demand.conversations[:SEARCH_REQUESTS]
    rates, shape = [], len(part) / max(part[-1].at_s, 1e-9)
    for end in ends:
        rates.append(max_rate_factor(trial, part, *end))
        row.curves.append(trial.curve(shape))
    row.rate = (min(rates) * shape, rates[0] * shape, max(rates) * shape)
    if not row.rate[1]:
        row.hopeless = "one server keeps the objectives at no part of this traffic that was tried"
        return row
    offered_rate = len(demand.conversations) / max(demand.conversations[-1].at_s, 1e-9)
    count_servers(row, trial, demand, cases, [offered_rate / each for each in row.rate if each])
    return row


def why_hopeless(
    row: MachineRow, target: PlanTarget, demand: PlannedDemand, candidate: MachineCandidate
) -> str:
    """Return why no number of these servers keeps the objectives; "" where some number may.

    On a roofline that is certain only if its best end is too slow as well.
    """
    slo = target.strictest
    if slo is None:
        return ""
    machine = candidate.machinery
    settings, best = machine.settings, mean_step_seconds(machine, 0.0 if machine.ends else 1.0)
    groups = len(settings.cache.windows)
    prompt_s = prefill_seconds(best, demand.prompt_p95, settings.max_num_batched_tokens, groups)
    context = demand.prompt_p95
    tpot_s = best(Work(1, 1, context, context * groups))
    if slo.ttft_s is not None and prompt_s > slo.ttft_s:
        fits = max_prompt_tokens(best, settings.max_num_batched_tokens, groups, slo.ttft_s)
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


def max_prompt_tokens(
    step: Callable[[Work], float], chunk: int, groups: int, within_s: float
) -> int:
    """Return the longest prompt whose prefill alone takes at most `within_s`."""
    low, high = 0, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        if prefill_seconds(step, middle, chunk, groups) <= within_s:
            low = middle
        else:
            high = middle
    return low


def count_servers(
    row: MachineRow,
    trial: CapacityTrial,
    demand: PlannedDemand,
    cases: list[tuple[int, float]],
    times: list[float],
) -> None:
    """Find the smallest number of servers whose worst simulated case keeps the attainment.

    `times` is the demand over the capacity of one server: at the worst, as it is and at the best.
    """
    part = demand.conversations
    least, middle, most = ceil(times[-1]), ceil(times[-2]), ceil(times[0])
    if len(times) < 3:  # at the worst, no number of them would do
        most = MAX_SERVERS
    row.servers_range = (max(least, 1), max(most, 1))
    firm = cases if row.label != ROOFLINE else cases[:1]
    servers = min(max(middle, 1), MAX_SERVERS)
    smallest: tuple[int, list[tuple[BenchReport, World]]] | None = None
    tried: set[int] = set()
    while servers not in tried and 1 <= servers <= MAX_SERVERS:
        tried.add(servers)
        runs = [trial.run(part, servers, *case, demand.at_once) for case in firm]
        shares = [report.rates.attainment or 0.0 for report, _ in runs]
        if min(shares) >= trial.target.attainment:
            smallest = servers, runs
            row.attainment = min(shares), max(shares)
            servers -= 1
        elif smallest is not None:
            break
        else:
            servers += 1
        if len(tried) >= 6:
            break
    if smallest is None:
        row.notes.append(f"none of {sorted(tried)} servers keeps the attainment in the worst case")
        return
    row.servers = smallest[0] + trial.target.survive
    fill_costs(row, trial.candidate, smallest[1][0], row.servers)
    row.breaks_first = first_to_break(trial, demand, smallest[0])


def fill_costs(
    row: MachineRow, candidate: MachineCandidate, run: tuple[BenchReport, World], servers: int
) -> None:
    """Fill in cost and energy of what was simulated; columns without a price or watts stay
    empty."""
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
        row.kwh_per_year = watts * HOURS_PER_YEAR / 1000


def first_to_break(trial: CapacityTrial, demand: PlannedDemand, servers: int) -> str:
    """Return the objective that most requests miss when more traffic comes than planned."""
    talks, at_once = speed_up(demand.conversations, OVERLOAD_FACTOR), demand.at_once
    more = None if at_once is None else ceil(OVERLOAD_FACTOR * at_once)
    report, world = trial.run(talks, servers, 0, nominal_scale(trial), more)
    missed: Counter[str] = Counter()
    slos = {each.name: each.slo for each in trial.target.bench.classes}
    for x in report.run.exchanges:
        slo = slos.get(x.service_class)
        if slo is not None:
            missed.update(misses(slo, x, latency(x)))
    preempted = sum(r.engine.scheduler.num_preemptions for r in world.replicas)
    if not missed:
        return f"nothing at {OVERLOAD_FACTOR:g} times the traffic"
    name, number = missed.most_common(1)[0]
    memory = f", and KV memory: {preempted} preemptions" if preempted else ""
    share = number / max(len(report.run.exchanges), 1)
    text = MISSED_OBJECTIVE_TEXTS[name]
    return f"at {OVERLOAD_FACTOR:g} times the traffic {text} ({share:.0%}){memory}"


def nominal_scale(trial: CapacityTrial) -> float:
    """Return the scale of the machine as it is."""
    return trial.candidate.machinery.cases(1, 0)[0][1]
