"""State of the gateway, shared by all handlers: configuration, upstreams, ledger."""

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
from headway.core.supervision import supervise
from headway.edge.database import default_folder
from headway.edge.keys import Keyring
from headway.edge.lanes import BodyPool
from headway.gateway import ledger
from headway.gateway.breaker import RetryBudget
from headway.gateway.cascade.cascade import Cascade
from headway.gateway.choose import Pool
from headway.gateway.config import ANY, Config, GatewayModelRow, RolloutRow
from headway.gateway.drift.watch import DriftWatch
from headway.gateway.hold import HoldCounts
from headway.gateway.ledger import Ledger
from headway.gateway.made_keys import MadeKey, MadeKeys
from headway.gateway.metrics import Labels, Metrics, Refusals
from headway.gateway.money import KeyBudget, KeyBudgets
from headway.gateway.probe import ScorerClient
from headway.gateway.response_cache import ResponseCache
from headway.gateway.rollout import Rollout, RolloutChange
from headway.gateway.upstream import LOOK_UP_S, Discovery, Upstream, is_name
from headway.telemetry.request_log import RequestLog
from headway.telemetry.tasks import Retries, Tasks

log = logging.getLogger(__name__)

FIRST_CHECK_S, RETIRE_POLL_S = 1.0, 0.05
MAX_RESPONSES, MAX_RESPONSE_ID = 100_000, 200
DEFAULT_AT_ONCE = 16


@dataclass(slots=True, kw_only=True)
class GatewayState:
    """State of the gateway. `upstreams` by name; `pools` by the name of a model row."""

    options: GatewayOptions
    config: Config
    """The configuration in force, with a row for each address of a name."""
    clock: Clock = field(default_factory=SystemClock)
    keyring: Keyring = field(default_factory=Keyring)
    ledger: Ledger = field(default_factory=lambda: Ledger(None))
    pool: BodyPool = field(default_factory=BodyPool)
    metrics: Metrics = field(default_factory=Metrics)
    request_log: RequestLog | None = None
    """Request log, or None."""
    tasks: Tasks = field(default_factory=Tasks)
    retries: Retries = field(default_factory=Retries)
    upstreams: dict[str, Upstream] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)
    routes: dict[str, GatewayModelRow] = field(default_factory=dict)
    reload_config: Callable[[], Config] | None = None
    """Reads the configuration's file again, for a reload."""
    cascades: dict[str, Cascade] = field(default_factory=dict)
    """By the name of the model row."""
    scorers: ScorerClient = field(default_factory=ScorerClient)
    holds: dict[str, HoldCounts] = field(default_factory=dict)
    """By the name of the model row."""
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    """By the name of the model row."""
    copies: set["asyncio.Task[None]"] = field(default_factory=set)
    """Shadow copies in flight."""
    retiring: dict[Upstream, "asyncio.Task[None]"] = field(default_factory=dict)
    """Removed upstreams that still have requests in flight."""
    responses: OrderedDict[tuple[str, str], str] = field(default_factory=OrderedDict)
    """Owner and id of a stored response → name of the upstream that stores it."""
    is_draining: bool = False
    """Whether the process ends after its running requests."""
    _reading_files: asyncio.Lock = field(default_factory=asyncio.Lock)
    limits: set[asyncio.Timeout] = field(default_factory=set)
    """Timeouts of running requests; they expire at the end of the drain."""
    file_config: Config = field(init=False)
    """The configuration as the file states it, with names."""
    discovery: Discovery = field(default_factory=Discovery)
    _names_watcher: "asyncio.Task[None] | None" = None
    drift: DriftWatch = field(init=False)
    budget: RetryBudget = field(init=False)
    key_budgets: KeyBudgets = field(init=False)
    team_budgets: KeyBudgets = field(init=False)
    made_keys: MadeKeys = field(default_factory=MadeKeys)
    cache: ResponseCache = field(init=False)
    aliases: dict[str, str] = field(default_factory=dict)
    """Alias → name of its model row."""
    teams: dict[str, str] = field(default_factory=dict)
    """Name of a key → its team."""
    refusals: Refusals = field(default_factory=Refusals)

    def __post_init__(self) -> None:
        self.budget = RetryBudget(self.clock)
        self.key_budgets = KeyBudgets(self.clock)
        self.cache = ResponseCache(self.clock)
        self.team_budgets = KeyBudgets(self.clock, "The team {}")
        folder = self.ledger.folder
        self.drift = DriftWatch(self, folder / "drift" if folder is not None else None)
        self._take(self.config)

    def _take(self, file_config: Config) -> list[Upstream]:
        """Use this configuration; returns the removed upstreams.

        An upstream whose row is unchanged keeps its state.
        """
        self.file_config, config = file_config, self.discovery.expand(file_config)
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
        self.aliases = {alias: row.name for row in config.models for alias in row.aliases}
        self.cache.clear()
        self.pools = {
            row.name: Pool(
                [new[name] for name in row.upstreams], row.policy, any_name=row.name == ANY
            )
            for row in config.models
        }
        self._take_budgets(config)
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

    def _take_budgets(self, config: Config) -> None:
        """Use the budgets and the teams of this configuration, which come before made keys'."""
        made = self.made_keys.rows.values()
        own = {row.name: row.budget for row in made if row.budget is not None}
        self.key_budgets.load({**own, **config.budgets})
        budgets = {name: row.budget for name, row in config.teams.items()}
        self.team_budgets.load({name: row for name, row in budgets.items() if row is not None})
        self.teams = {row.name: row.team for row in made if row.team}
        self.teams |= {key: name for name, row in config.teams.items() for key in row.keys}

    def use_made_keys(self, rows: Iterable[MadeKey]) -> None:
        """Use these keys, made by operators, from the next request on."""
        self.made_keys.rows = {row.name: row for row in rows}
        self.keyring.use_made(
            [(row.key_row, row.expires_at) for row in self.made_keys.rows.values()]
        )
        self._take_budgets(self.config)

    def check_use(self, owner: str, model: str, route: GatewayModelRow) -> None:
        """Raise RequestError 403 for a model that the key of this request may not use."""
        self.made_keys.check_use(owner, (model, route.name), self.config.teams)

    # ── life ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Open the ledger, restore budgets and rollouts, and probe the upstreams once."""
        await self.ledger.open(self.clock.wall_s())
        if await self.discovery.look_up(self.file_config):
            self._take(self.file_config)
        if self.options.key_api:
            made = await self.ledger.made_keys()
            self.use_made_keys(msgspec.json.decode(each, type=MadeKey) for each in made)
        periods = [*self.key_budgets.periods_s, *self.team_budgets.periods_s]
        since_s = self.clock.wall_s() - max(periods, default=86_400)
        for row in await self.ledger.spent(since_s):
            self.tasks.spend(row.key, row.task, row.task_class, row.route, row.dollars)
            for budget in self.budgets_of(row.key):
                budget.add(row.dollars, row.began_at)
        for key, task, success in await self.ledger.outcomes(since_s):
            self.tasks.judge(key, task, success)
        await self._restore(self.rollouts.values())
        await self._start_upstreams()
        self.drift.start()

    async def _start_upstreams(self) -> None:
        """Probe each upstream once, then watch them and the names of their servers."""
        looks = [asyncio.ensure_future(each.check_health()) for each in self.upstreams.values()]
        await asyncio.wait(looks, timeout=FIRST_CHECK_S)
        for each in self.upstreams.values():
            each.start()
        self._names_watcher = supervise("upstream names", self._watch_names)

    async def _watch_names(self) -> None:
        """Use the upstreams that names gain, and retire those that they lose."""
        while True:
            await asyncio.sleep(LOOK_UP_S)
            async with self._reading_files:
                if await self.discovery.look_up(self.file_config):
                    await self.reload(self.file_config)

    async def read_files(self) -> None:
        """Reload the configuration and the keys, both or neither; raises HeadwayError.

        They are read in a thread, because a file of 16 MiB takes seconds.
        """
        assert self.reload_config is not None
        async with self._reading_files:
            config = await asyncio.to_thread(self.reload_config)
            keys = await asyncio.to_thread(self.keyring.read)
            self.keyring.use(keys)
            await self.discovery.look_up(config)
            await self.reload(config)

    async def reload(self, config: Config) -> None:
        """Use another configuration from the next request on."""
        before, running = set(self.upstreams.values()), set(self.rollouts.values())
        gone = self._take(config)
        await self._restore(set(self.rollouts.values()) - running)
        for each in self.upstreams.values():
            if each not in before:
                each.start()
        for each in gone:
            self.retiring[each] = asyncio.create_task(self._retire(each))

    async def _retire(self, upstream: Upstream) -> None:
        """Close an upstream's connections when it is idle, or after the drain timeout."""
        until_s = self.clock.now_s() + self.options.drain_timeout
        while upstream.speed.flights and self.clock.now_s() < until_s:
            await asyncio.sleep(RETIRE_POLL_S)
        await upstream.close()
        del self.retiring[upstream]

    async def _restore(self, rollouts: Iterable[Rollout]) -> None:
        """Restore rollouts from the ledger; a rolled-back one stays so unless `force` is set."""
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
        """Run a request; raises RequestError `shutting_down` if it outlasts the drain."""
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
        """End each running request with an error, after the drain."""
        now_s = asyncio.get_running_loop().time()
        for limit in list(self.limits):
            limit.reschedule(now_s)

    async def stop(self) -> None:
        """Close connections and the ledger; safe to call twice."""
        if self._names_watcher is not None:
            self._names_watcher.cancel()
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
        """Return all names that a request may use."""
        names = [name for name in (*self.routes, *self.aliases) if name != ANY]
        if ANY in self.pools:
            names += [name for each in self.pools[ANY].upstreams for name in each.served]
        return tuple(dict.fromkeys(names))

    @property
    def unnamed(self) -> str | None:
        """Return the model of a request that names none: the only one, if there is one only."""
        names = [name for name in self.model_names if name not in self.aliases]
        return names[0] if len(names) == 1 else None

    def route(self, name: str | None) -> tuple[str, GatewayModelRow]:
        """Return (the name that was asked for, its row); RequestError if it does not exist."""
        known = ", ".join(self.model_names) or "none yet"
        name = self.unnamed if name is None else name
        if name is None:
            raise RequestError(
                f"The field model is required; there is {known}.",
                param="model",
                code="missing_required_parameter",
            )
        row = self.routes.get(self.aliases.get(name, name))
        if row is None and ANY in self.routes:
            pool = self.pools[ANY]
            unknown = is_name(name) and any(not each.was_reached for each in pool.upstreams)
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

    def with_fallbacks(self, route: GatewayModelRow) -> list[GatewayModelRow]:
        """Return a model row and its fallbacks, breadth first."""
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
        """Return the price factor of a batch line: none, it costs what its upstream charges."""
        return 1.0

    def takes_lines(self, model: str) -> bool:
        """Return whether an upstream of this model may get requests now."""
        _, row = self.route(model)
        return any(
            each.breaker.allows and not (each.is_down or each.is_unavailable)
            for each in self.pools[row.name].upstreams
        )

    def num_at_once(self, model: str) -> int:
        """Return the concurrent requests of this model's upstreams, with a default if unknown."""
        _, row = self.route(model)
        return sum(each.max_rows or DEFAULT_AT_ONCE for each in self.pools[row.name].upstreams)

    # ── spending ────────────────────────────────────────────────────────────────────────────

    def team_of(self, owner: str) -> str:
        """Return the team of a key, or "": alice/bob, a user of the key alice, is in hers."""
        name = owner
        while name not in self.teams and "/" in name:
            name = name.rpartition("/")[0]
        return self.teams.get(name, "")

    def budgets_of(self, owner: str) -> list[KeyBudget]:
        """Return the budgets that a request of this key takes from: its own and its team's."""
        budgets = (self.key_budgets.of(owner), self.team_budgets.of(self.team_of(owner)))
        return [each for each in budgets if each is not None]

    def budget_rows(self, owner: str | None) -> list[dict[str, object]]:
        """Return what budgets have left: of a key and its team, or all for None."""
        keys = self.key_budgets.names if owner is None else [owner]
        teams = self.team_budgets.names if owner is None else [self.team_of(owner)]
        return [
            {"kind": kind, **row}
            for kind, budgets, names in (
                ("key", self.key_budgets, keys),
                ("team", self.team_budgets, teams),
            )
            for row in budgets.snapshots(dict.fromkeys(names))
        ]

    # ── stored responses ────────────────────────────────────────────────────────────────────

    def keep_response(self, response_id: str, owner: str, upstream: str) -> None:
        """Remember the upstream that stores this response of an owner."""
        if len(response_id) <= MAX_RESPONSE_ID:
            self.responses[owner, response_id] = upstream
        while len(self.responses) > MAX_RESPONSES:
            self.responses.popitem(last=False)

    def keeper_of(self, response_id: str, owner: str) -> Upstream | None:
        """Return the upstream that stores a response of this owner."""
        return self.upstreams.get(self.responses.get((owner, response_id), ""))

    # ── reporting ───────────────────────────────────────────────────────────────────────────

    def gauges(self) -> Iterator[tuple[str, Labels, float]]:
        """Yield the gauges of `/metrics`."""
        for each in self.upstreams.values():
            label = (("upstream", each.name),)
            up = each.breaker.allows and not (each.is_down or each.is_unavailable)
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


def canonical_name(name: str, route: GatewayModelRow) -> str:
    """Return the model's name in accounts and at upstreams: an alias is its row."""
    return route.name if name in route.aliases else name


def make_rollout(state: GatewayState, row: RolloutRow) -> Rollout:
    """Return a rollout whose changes are logged and written to the ledger."""
    rollout: Rollout

    def changed(change: RolloutChange) -> None:
        level = logging.WARNING if change.state == "rolled back" else logging.INFO
        log.log(level, "rollout %s: %s, %s", row.name, change.state, change.reason)
        values = {name: round(each.value, 4) for name, each in rollout.evidence.items()}
        state.ledger.write(
            ledger.CHANGE_ROLLOUT,
            *(row.name, row.version, change.state, change.step, change.reason),
            *(msgspec.json.encode(values).decode(), state.clock.wall_s()),
        )

    def keep(evidence: bytes) -> None:
        state.ledger.write(ledger.SAVE_EVIDENCE, row.name, row.version, evidence)

    slo = parse_slo(row.slo) if row.slo else None
    rollout = Rollout(row, slo, changed, keep, state.clock)
    return rollout


def ledger_folder(data_dir: str) -> Path:
    """Return the folder of the ledger, of `--data-dir` or its default."""
    given = Path(data_dir).expanduser() if data_dir else default_folder()
    return given / "gateway"
