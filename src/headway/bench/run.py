"""A load test from end to end: options in, a raw run out.

The order is: draw the traffic, probe the server, run the load while the server's metrics are
sampled, and return everything raw. `bench.report` derives the figures.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.bench.classes import TrafficClass, build_all, read_classes
from headway.bench.load import LoadGenerator, LoopMonitor, quiet_gc
from headway.bench.probe import ProbeSpec, find_dialect
from headway.bench.prompts import TextPiece
from headway.bench.scrape import Scraper
from headway.bench.talk import PATHS, BenchDialect
from headway.bench.workload import Traffic
from headway.config.options import BenchOptions
from headway.core.clock import SystemClock
from headway.core.errors import UsageError
from headway.measure import record
from headway.measure.client import Client, model_name, open_session

EDGE_SHARE, EDGE_MOST_S = 0.1, 30.0
"""Warm-up and cool-down where none is given: a tenth of the time, at most 30 s."""
MIN_CUT_SPAN_S = 10.0
"""Shorter runs are not cut."""

Watch = Callable[[LoadGenerator, Client, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The load test before its first request."""

    url: str
    options: BenchOptions
    classes: list[TrafficClass]
    traffic: Traffic

    @property
    def needs_text(self) -> bool:
        """Return whether some prompt exists as text alone."""
        return any(
            isinstance(piece, TextPiece)
            for talk in self.traffic.conversations
            for turn in talk.turns
            for piece in turn.prompt
        )


def prepare(url: str, options: BenchOptions, faster: float = 1.0) -> Bench:
    """Check the options and draw the traffic, at `faster` times its rate; raise UsageError."""
    check_options(url, options)
    classes = [
        replace(each, options=sped_up(each.options, faster)) for each in read_classes(options)
    ]
    bench = Bench(
        url=url.rstrip("/").removesuffix("/v1"),
        options=options,
        classes=classes,
        traffic=build_all(classes),
    )
    if options.concurrency is None:
        window_edges(options, bench.traffic.span_s)
    return bench


def sped_up(options: BenchOptions, faster: float) -> BenchOptions:
    """Return the options with `faster` times the rate."""
    return replace(
        options,
        rate=None if options.rate is None else options.rate * faster,
        ramp_from=options.ramp_from * faster,
        speed=options.speed * faster,
    )


def check_options(url: str, options: BenchOptions) -> None:
    """Raise UsageError for combinations that the options table does not exclude."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not a URL.", "Write http://127.0.0.1:8000.")
    if options.rate is not None and options.speed != 1:
        raise UsageError("--rate and --speed both set the speed of a trace.", "Give one of them.")
    if options.find_goodput and not (options.slo or options.classes):
        raise UsageError("--find-goodput needs objectives.", "Add --slo ttft=500ms,tpot=50ms.")
    if options.find_goodput and options.concurrency is not None:
        raise UsageError(
            "--find-goodput searches a rate; a closed loop has none.", "Leave --concurrency out."
        )
    if options.find_goodput and options.calibrate:
        raise UsageError(
            "--calibrate measures one load; --find-goodput runs many.",
            "Give one of them.",
        )
    if options.concurrency is not None and options.arrivals not in ("auto",):
        raise UsageError(
            f"--arrivals {options.arrivals} is an open loop, --concurrency a closed one.",
            "Give one of them.",
        )


def window_edges(options: BenchOptions, span_s: float) -> tuple[float, float]:
    """Return the seconds cut at both ends: 60 s → 6 s each; below 10 s none unless it is asked
    for."""
    derived = min(EDGE_SHARE * span_s, EDGE_MOST_S) if span_s >= MIN_CUT_SPAN_S else 0.0
    warmup = derived if options.warmup is None else options.warmup
    cooldown = derived if options.cooldown is None else options.cooldown
    if warmup + cooldown >= span_s > 0:
        raise UsageError(
            f"Warm-up ({warmup:g} s) and cool-down ({cooldown:g} s) leave nothing of {span_s:g} s.",
            "Lower them or raise --duration.",
        )
    return warmup, cooldown


async def measure(
    bench: Bench, watch: Watch | None = None, drain_s: float | None = None
) -> tuple[record.RecordedRun, BenchDialect]:
    """Run the load once; `watch` receives the load so that progress can be shown."""
    options = bench.options
    clock = SystemClock()
    started_s = clock.now_s()

    def now_s() -> float:
        return clock.now_s() - started_s

    async with open_session(options.api_key) as session:
        client = Client(session, bench.url + PATHS[options.endpoint], now_s, options.timeout)
        model = options.model or await model_name(session, bench.url)
        dialect = await find_dialect(client, probe_spec(bench, model))
        server = record.ServerRecord(
            url=bench.url,
            model=model,
            endpoint=options.endpoint,
            features=sorted(dialect.features),
        )
        load = LoadGenerator(client, dialect)
        client.tokens = 0
        if options.concurrency is None:
            load.write_ahead(bench.traffic.conversations)
        with quiet_gc():
            async with Scraper(session, server, now_s), LoopMonitor(clock) as pulse:
                started_s = clock.now_s()
                started_at = time.time()
                if watch is not None:
                    watch(load, client, bench.traffic.span_s)
                span_s = await run_load(load, client, bench, drain_s)
                cost = pulse.cost()
    description = load_record(bench, span_s, max(last_end_s(load), span_s))
    run = record.RecordedRun(
        started_at=started_at,
        started_s=started_s,
        load=description,
        server=server,
        client=cost,
        exchanges=load.exchanges,
    )
    return run, dialect


async def run_load(
    load: LoadGenerator, client: Client, bench: Bench, drain_s: float | None
) -> float:
    """Run the loop that the options ask for; return how long requests were sent."""
    options, traffic = bench.options, bench.traffic
    if options.concurrency is None:
        await load.open_loop(traffic.conversations, drain_s)
        return traffic.span_s
    until_s = None if options.num_requests is not None else traffic.span_s
    talks = traffic.conversations
    await load.closed_loop(talks, options.concurrency, until_s)
    sent = [x.sent_s for x in load.exchanges if x.sent_s is not None]
    return until_s or max(sent, default=0.0)


def last_end_s(load: LoadGenerator) -> float:
    """Return when the last exchange ended."""
    return max((x.ended_s for x in load.exchanges if x.ended_s is not None), default=0.0)


def probe_spec(bench: Bench, model: str) -> ProbeSpec:
    """Return what the probe is to find out."""
    options = bench.options
    named_classes = bench.classes if len(bench.classes) > 1 else []
    return ProbeSpec(
        endpoint=options.endpoint,
        model=model,
        prompt_format=options.prompt_format,
        needs_text=bench.needs_text,
        seed=options.seed,
        vocabulary=options.vocab_size,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        service_classes=tuple(each.name for each in named_classes),
    )


def load_record(bench: Bench, span_s: float, end_s: float) -> record.LoadRecord:
    """Return the load as the report names it. With no cool-down the window is open to the last
    answer."""
    options = bench.options
    warmup_s, cooldown_s = window_edges(options, span_s)
    closed = options.concurrency is not None
    kinds = {each.options.arrivals for each in bench.classes}
    workloads = list(dict.fromkeys(each.options.workload for each in bench.classes))
    arrivals = ", ".join(sorted(kinds)).replace("auto", default_arrivals(workloads))
    return record.LoadRecord(
        loop="closed" if closed else "open",
        arrivals="after each answer" if closed else arrivals,
        workload=", ".join(workloads),
        seed=options.seed,
        span_s=float(span_s),
        from_s=float(warmup_s),
        to_s=float(span_s - cooldown_s if cooldown_s else end_s),
        rate=None if closed else len(bench.traffic.conversations) / span_s,
        concurrency=options.concurrency,
        speed=options.speed,
        scale=bench.traffic.scale,
        slos={each.name: str(each.slo) for each in bench.classes if each.slo is not None},
        attainment=options.attainment,
        price_per_hour=options.price_per_hour,
    )


def default_arrivals(workloads: list[str]) -> str:
    """Return the arrivals that `auto` stands for."""
    return (
        "trace" if all(":" in w and not w.startswith("prompts") for w in workloads) else "poisson"
    )
