"""What every handler of the gateway is given: its configuration, its upstreams, its books."""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headway.config.options import GatewayOptions
from headway.core import supervision
from headway.core.clock import Clock, SystemClock
from headway.core.errors import RequestError, ShutdownError
from headway.core.slo import parse_slo
from headway.edge.database import default_folder
from headway.edge.keys import Keyring
from headway.edge.lanes import BodyPool
from headway.gateway import ledger
from headway.gateway.breaker import RetryBudget
from headway.gateway.cascade.cascade import Cascade
from headway.gateway.choose import Pool
from headway.gateway.config import ANY, PERIODS_S, Config, ModelRow, RolloutRow
from headway.gateway.drift.watch import DriftWatch
from headway.gateway.hold import HoldCounts
from headway.gateway.ledger import Ledger
from headway.gateway.metrics import Labels, Metrics
from headway.gateway.money import Purses
from headway.gateway.probe import ScorerClient
from headway.gateway.rollout import Change, Rollout
from headway.gateway.upstream import Upstream, is_name
from headway.telemetry.request_log import RequestLog
from headway.telemetry.tasks import Retries, Tasks

log = logging.getLogger(__name__)

FIRST_LOOK_S, RETIRES_S = 1.0, 0.05
MAX_RESPONSES, MAX_RESPONSE_ID = 100_000, 200
DEFAULT_AT_ONCE = 16


@dataclass(slots=True, kw_only=True)
class State:
    """The gateway. `upstreams` by name; `pools` by the name of a model row."""

    options: GatewayOptions
    config: Config
    clock: Clock = field(default_factory=SystemClock)
    keyring: Keyring = field(default_factory=Keyring)
    ledger: Ledger = field(default_factory=lambda: Ledger(None))
    pool: BodyPool = field(default_factory=BodyPool)
    metrics: Metrics = field(default_factory=Metrics)
    request_log: RequestLog | None = None
    """Writes a line for each request, where one is set."""
    tasks: Tasks = field(default_factory=Tasks)
    retries: Retries = field(default_factory=Retries)
    upstreams: dict[str, Upstream] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)
    routes: dict[str, ModelRow] = field(default_factory=dict)
    read_again: Callable[[], Config] | None = None
    """Reads the configuration's file, for who asks to go by it now."""
    cascades: dict[str, Cascade] = field(default_factory=dict)
    """By the name of their model row."""
    scorers: ScorerClient = field(default_factory=ScorerClient)
    holds: dict[str, HoldCounts] = field(default_factory=dict)
    """By the name of their model row."""
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    """By the name of their model row."""
    copies: set["asyncio.Task[None]"] = field(default_factory=set)
    """Copies on their way to canaries that answer nobody yet."""
    retiring: dict[Upstream, "asyncio.Task[None]"] = field(default_factory=dict)
    """Upstreams that are no more, while requests are in flight there."""
    responses: OrderedDict[tuple[str, str], str] = field(default_factory=OrderedDict)
    """Owner and id of a stored response → the upstream that keeps it."""
    is_draining: bool = False
    """Whether the process is to end when its requests have."""
    _reading_files: asyncio.Lock = field(default_factory=asyncio.Lock)
    limits: set[asyncio.Timeout] = field(default_factory=set)
    """Of the requests that run: what ends them when the drain is over."""
    drift: DriftWatch = field(init=False)
    budget: RetryBudget = field(init=False)
    purses: Purses = field(init=False)

    def __post_init__(self) -> None:
        self.budget = RetryBudget(self.clock)
        self.purses = Purses(self.clock)
        folder = self.ledger.folder
        self.drift = DriftWatch(self, folder / "drift" if folder is not None else None)
        self._take(self.config)

    def _take(self, config: Config) -> list[Upstream]:
        """Go by this configuration; returns the upstreams that are no more. An upstream whose row
        is the same keeps all that is known of it."""
        unchanged = {
            name: each for name, each in self.upstreams.items() if each.row in config.upstreams
        }
        gone = [each for name, each in self.upstreams.items() if name not in unchanged]
        new = {
            row.name: unchanged.get(row.name) or Upstream(row, self.clock)
            for row in config.upstreams
        }
        self.upstreams, self.config = new, config
        self.routes = {row.name: row for row in config.models}
        self.pools = {
            row.name: Pool(
                [new[name] for name in row.upstreams], row.policy, any_name=row.name == ANY
            )
            for row in config.models
        }
        self.purses.load(config.budgets)
        self.cascades = {
            row.name: Cascade(row.cascade, config.evidence.get(row.name), self.clock)
            for row in config.models
            if row.cascade is not None
        }
        self.holds = {
            row.name: self.holds[row.name]
            if row.name in self.holds and self.holds[row.name].row == row.hold
            else HoldCounts(row.hold)
            for row in config.models
            if row.hold is not None
        }
        self.rollouts = {
            row.model: self.rollouts[row.model]
            if row.model in self.rollouts and self.rollouts[row.model].row == row
            else make_rollout(self, row)
            for row in config.rollouts
        }
        return gone

    # ── life ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Open the books and look at the upstreams; some of them may be down."""
        await self.ledger.open(self.clock.wall_s())
        longest_s = max(
            [PERIODS_S[row.per] for row in self.config.budgets.values()], default=86_400
        )
        since_s = self.clock.wall_s() - longest_s
        for row in await self.ledger.spent(since_s):
            self.tasks.spend(row.key, row.task, row.task_class, row.route, row.dollars)
            purse = self.purses.of(row.key)
            if purse is not None:
                purse.add(row.dollars, row.began_at)
        for key, task, success in await self.ledger.outcomes(since_s):
            self.tasks.judge(key, task, success)
        await self._restore(self.rollouts.values())
        looks = [asyncio.ensure_future(each.look()) for each in self.upstreams.values()]
        await asyncio.wait(looks, timeout=FIRST_LOOK_S)
        for each in self.upstreams.values():
            each.start()
        self.drift.start()

    async def read_files(self) -> None:
        """Read the configuration and the keys again, and go by both or, where one cannot be used,
        by neither; raises HeadwayError.

        They are read in a thread: a file of 16 MiB takes seconds.
        """
        assert self.read_again is not None
        async with self._reading_files:
            config = await asyncio.to_thread(self.read_again)
            keys = await asyncio.to_thread(self.keyring.read)
            self.keyring.use(keys)
            await self.reload(config)

    async def reload(self, config: Config) -> None:
        """Go by another configuration from the next request on."""
        before, running = set(self.upstreams.values()), set(self.rollouts.values())
        gone = self._take(config)
        await self._restore(set(self.rollouts.values()) - running)
        for each in self.upstreams.values():
            if each not in before:
                each.start()
        for each in gone:
            self.retiring[each] = asyncio.create_task(self._retire(each))

    async def _retire(self, upstream: Upstream) -> None:
        """Close its connections when nothing is in flight there, at the latest after a drain."""
        until_s = self.clock.now_s() + self.options.drain_timeout
        while upstream.speed.flights and self.clock.now_s() < until_s:
            await asyncio.sleep(RETIRES_S)
        await upstream.close()
        del self.retiring[upstream]

    async def _restore(self, rollouts: Iterable[Rollout]) -> None:
        """Go on where the ledger says these were; what was rolled back stays so without `force`."""
        for each in rollouts:
            name, version = each.row.name, each.row.version
            position = await self.ledger.rollout(name, version)
            evidence = await self.ledger.evidence(name, version)
            if position is None and evidence is not None:
                position = each.state, each.step, ""
            if position is not None and not (position[0] == "rolled back" and each.row.force):
                each.restore(*position, evidence)

    @contextlib.asynccontextmanager
    async def until_shutdown(self) -> AsyncIterator[None]:
        """Run a request; raises RequestError `shutting_down` when it outlasts the drain."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self.limits.add(limit)
                try:
                    yield
                finally:
                    self.limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ShutdownError() from None

    def end_requests(self) -> None:
        """The drain is over: each request that runs ends with an error."""
        now_s = asyncio.get_running_loop().time()
        for limit in list(self.limits):
            limit.reschedule(now_s)

    async def stop(self) -> None:
        """Close connections and books; safe to call twice."""
        await self.drift.stop()
        for copy in list(self.copies):
            copy.cancel()
        for task in self.retiring.values():
            task.cancel()
        for each in [*self.upstreams.values(), *self.retiring]:
            await each.close()
        await self.scorers.close()
        await self.ledger.close()

    # ── models ──────────────────────────────────────────────────────────────────────────────

    @property
    def model_names(self) -> tuple[str, ...]:
        """All that a request may ask for."""
        names = [name for name in self.routes if name != ANY]
        if ANY in self.pools:
            names += [name for each in self.pools[ANY].upstreams for name in each.served]
        return tuple(dict.fromkeys(names))

    @property
    def unnamed(self) -> str | None:
        """Whom a request without a model asks: the only one there is."""
        names = self.model_names
        return names[0] if len(names) == 1 else None

    def route(self, name: str | None) -> tuple[str, ModelRow]:
        """(the model's name, its row); raises RequestError where there is none."""
        known = ", ".join(self.model_names) or "none yet"
        name = self.unnamed if name is None else name
        if name is None:
            raise RequestError(
                f"The field model is required; there is {known}.",
                param="model",
                code="missing_required_parameter",
            )
        row = self.routes.get(name)
        if row is None and ANY in self.routes:
            pool = self.pools[ANY]
            unknown = is_name(name) and any(not each.looked for each in pool.upstreams)
            if unknown or any(each.serves(name) for each in pool.upstreams):
                row = self.routes[ANY]
        if row is None:
            raise RequestError(
                f"The model {name[:200]!r} does not exist; there is {known}.",
                param="model",
                code="model_not_found",
                status=404,
            )
        return name, row

    def with_fallbacks(self, route: ModelRow) -> list[ModelRow]:
        """A model row, then its fallbacks, theirs behind them."""
        rows = {route.name: route}
        waiting = [route]
        while waiting:
            row = waiting.pop(0)
            more = [self.routes[name] for name in row.fallbacks if name not in rows]
            rows |= {each.name: each for each in more}
            waiting += more
        return list(rows.values())

    # ── batches ─────────────────────────────────────────────────────────────────────────────

    @property
    def batch_price(self) -> float:
        """A line of a batch costs here what its upstream takes."""
        return 1.0

    def takes_lines(self, model: str) -> bool:
        """Whether an upstream of this model may be asked now."""
        _, row = self.route(model)
        return any(
            each.breaker.allows and not (each.is_down or each.is_away)
            for each in self.pools[row.name].upstreams
        )

    def num_at_once(self, model: str) -> int:
        """What the upstreams of this model run at once, as far as they say."""
        _, row = self.route(model)
        return sum(each.max_rows or DEFAULT_AT_ONCE for each in self.pools[row.name].upstreams)

    # ── stored responses ────────────────────────────────────────────────────────────────────

    def keep_response(self, response_id: str, owner: str, upstream: str) -> None:
        """An upstream keeps this response for its owner."""
        if len(response_id) <= MAX_RESPONSE_ID:
            self.responses[owner, response_id] = upstream
        while len(self.responses) > MAX_RESPONSES:
            self.responses.popitem(last=False)

    def keeper_of(self, response_id: str, owner: str) -> Upstream | None:
        """The upstream that keeps a response of this owner."""
        return self.upstreams.get(self.responses.get((owner, response_id), ""))

    # ── what is told ────────────────────────────────────────────────────────────────────────

    def gauges(self) -> Iterator[tuple[str, Labels, float]]:
        """What `/metrics` tells beside the counters."""
        for each in self.upstreams.values():
            label = (("upstream", each.name),)
            up = each.breaker.allows and not (each.is_down or each.is_away)
            yield "upstream_up", label, float(up)
            yield "upstream_in_flight", label, len(each.speed.flights)
            yield "upstream_queue_seconds", label, each.speed.queue_s
        for dimension, name, totals in self.tasks.rows():
            group = (("dimension", dimension), ("name", name))
            yield "task_dollars", group, totals.dollars
            for outcome, count in (("success", totals.succeeded), ("failure", totals.failed)):
                yield "tasks", (*group, ("outcome", outcome)), count
            if totals.cost_per_success is not None:
                yield "cost_per_success", group, totals.cost_per_success
        for each_rollout in self.rollouts.values():
            rollout = (("rollout", each_rollout.row.name),)
            yield "rollout_share", rollout, each_rollout.share
            for guard, evidence in each_rollout.evidence.items():
                yield "rollout_evidence", (*rollout, ("guard", guard)), evidence.value
        for (model, first, second), finding in self.drift.findings.items():
            pair = (("model", model), ("first", first), ("second", second))
            yield "drift_alarm", pair, float(finding.alarm)
            if finding.kl is not None:
                yield "drift_nats", pair, finding.kl
        for route, counts in self.holds.items():
            for outcome in ("answers", "pieces", "stopped", "late"):
                held = (("route", route), ("outcome", outcome))
                yield "held", held, getattr(counts, outcome)
            yield "time_to_publish_seconds", (("route", route),), counts.seconds
        for route, cascade in self.cascades.items():
            for (task, outcome), number in cascade.counts.items():
                labels = (("route", route), ("task", task), ("outcome", outcome))
                yield "cascade", labels, number
        for task, count in supervision.failures.items():
            yield "task_failures", (("task", task),), count
        yield "ledger_lost_rows", (), self.ledger.num_lost


def make_rollout(state: State, row: RolloutRow) -> Rollout:
    """A rollout whose changes are logged and kept in the ledger."""
    rollout: Rollout

    def changed(change: Change) -> None:
        level = logging.WARNING if change.state == "rolled back" else logging.INFO
        log.log(level, "rollout %s: %s, %s", row.name, change.state, change.reason)
        values = {name: round(each.value, 4) for name, each in rollout.evidence.items()}
        state.ledger.write(
            ledger.CHANGE,
            *(row.name, row.version, change.state, change.step, change.reason),
            *(msgspec.json.encode(values).decode(), state.clock.wall_s()),
        )

    def keep(evidence: bytes) -> None:
        state.ledger.write(ledger.KEEP, row.name, row.version, evidence)

    slo = parse_slo(row.slo) if row.slo else None
    rollout = Rollout(row, slo, changed, keep, state.clock)
    return rollout


def ledger_folder(options: GatewayOptions) -> Path:
    """Where the ledger lies."""
    given = Path(options.data_dir).expanduser() if options.data_dir else default_folder()
    return given / "gateway"
