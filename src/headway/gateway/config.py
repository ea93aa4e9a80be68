"""The gateway's file: upstreams, models, budgets. It is accepted as a whole or not at all.

    upstreams:
      - name: a
        url: http://10.0.0.1:8000/v1
        key_env: UPSTREAM_KEY               # or key_file, a file that only its owner may read
        price: {input: 0.1, cached: 0.01, output: 0.4}     # dollars a million tokens
      - {name: b, url: http://10.0.0.2:8000/v1, kind: vllm, price: {hour: 2.5}}
    models:
      - {name: chat, upstreams: [a, b], policy: time, deadline: 120s, first_token: 20s}
    budgets:
      alice: {dollars: 5, per: day}

Every error names the file, the row, the field and the fix.
"""

import difflib
import os
import stat
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec

from headway.core.errors import UsageError
from headway.core.regular_file import read_text
from headway.core.slo import parse_duration, parse_slo
from headway.core.yaml_file import read_yaml
from headway.gateway.cascade.evidence import EvidenceFile, read_evidence
from headway.gateway.cascade.rows import (
    CascadeRow,
    HoldRow,
    TaskRule,
    check_duration,
    evidence_path,
)
from headway.gateway.drift.compare import DriftProbe
from headway.gateway.overlay import with_overlay
from headway.gateway.providers import PROVIDERS, check_provider

FIX_HINT = "docs/gateway.md has an example of each row."
ANY = "*"
"""Name of a model row that accepts any name that its upstreams serve."""
Kind = Literal["auto", "headway", "vllm", "llama", "openai", "anthropic", "azure", "bedrock"]
Policy = Literal["time", "least", "round_robin", "weighted", "pinned"]
Feature = Literal["tools", "schemas", "images", "embeddings", "completions", "responses"]
DNS_SCHEME = "dns+http"
"""Scheme of a URL whose host has an address for each server (discovery.py)."""
PERIODS_S = {"hour": 3600, "day": 86_400, "month": 30 * 86_400}
Row = TypeVar("Row", bound=msgspec.Struct)


class UpstreamPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dollars per million tokens, or `per` another number of them, or per hour of the machine."""

    input: float = 0.0
    cached: float | None = None
    output: float = 0.0
    hour: float | None = None
    per: Literal["1M", "1k", "token"] = "1M"

    @property
    def num_tokens(self) -> float:
        """Return the number of tokens that the prices are of."""
        return {"1M": 1e6, "1k": 1e3, "token": 1.0}[self.per]

    def __post_init__(self) -> None:
        for name in ("input", "cached", "output", "hour"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1e6:
                raise ValueError(f"price.{name} must be between 0 and 1e6 dollars")
        if self.hour is not None and (self.input or self.output or self.cached):
            raise ValueError("price has an hour and tokens; keep one of the two")


class UpstreamRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Server behind the gateway. `can` overrides the features that its kind implies.

    `url` may be left out where the kind has one. `api_version` is Azure's.
    """

    url: str = ""
    name: str = ""
    kind: Kind = "auto"
    api_version: str = ""
    model: str = ""
    key_env: str = ""
    key_file: str = ""
    price: UpstreamPrice | None = None
    context: int = 0
    can: tuple[Feature, ...] | None = None
    weight: float = 1.0
    max_at_once: int = 0
    cache: int = 64 * 2**20
    """Bytes of prompts that its prefix cache is assumed to hold, if it does not report it."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.address)
        plain = parts.username is None and not parts.query and not parts.fragment
        if parts.scheme == f"{DNS_SCHEME}s":
            raise ValueError("url: dns+https cannot be, for certificates are of names; use https")
        schemes = ("http", "https", DNS_SCHEME)
        if parts.scheme not in schemes or not parts.hostname or not plain:
            raise ValueError(f"url {self.url[:80]!r} is no address; write http://host:8000/v1")
        for name, low, high in (
            *(("context", 0, 1e9), ("weight", 0.001, 1e6), ("max_at_once", 0, 1e6)),
            ("cache", 0, 2**40),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be between {low} and {high:g}")
        if self.key_env and self.key_file:
            raise ValueError("key_env and key_file are both there; keep one")
        check_provider(self.kind, self.url, self.model, self.api_version)

    @property
    def address(self) -> str:
        """Return the base URL: as stated, else that of its kind."""
        provider = PROVIDERS.get(self.kind)
        return self.url or (provider.base if provider is not None else "")


class GatewayModelRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model name that clients request, and the upstreams that serve it."""

    name: str
    upstreams: tuple[str, ...] = ()
    policy: Policy = "time"
    fallbacks: tuple[str, ...] = ()
    deadline: str = "600s"
    first_token: str = "60s"
    resume: Literal["exact", "text", "none"] = "exact"
    aliases: tuple[str, ...] = ()
    """Other names that clients may use; accounts have the row's own."""
    retries: int | None = None
    """Attempts beyond the first, resumptions among them; None for no other bound than the budget
    of all requests."""
    cache: str = ""
    """How long a whole answer is kept for the same request of the same key; "" is not at all."""
    cascade: CascadeRow | None = None
    hold: HoldRow | None = None

    @property
    def deadline_s(self) -> float:
        return parse_duration(self.deadline, "deadline")

    @property
    def first_token_s(self) -> float:
        return parse_duration(self.first_token, "first_token")

    @property
    def cache_s(self) -> float | None:
        """Return the seconds that an answer is kept; None for not at all."""
        return parse_duration(self.cache, "cache") if self.cache else None

    def __post_init__(self) -> None:
        if self.retries is not None and not 0 <= self.retries <= 100:
            raise ValueError("retries must be between 0 and 100")
        for name in ("deadline", "first_token", *(["cache"] if self.cache else [])):
            try:
                parse_duration(getattr(self, name), name)
            except UsageError as error:
                raise ValueError(f"{error.cause} {error.fix}") from None


class BudgetRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budget of a key: dollars per hour, day or month (30 days), as a sliding window."""

    dollars: float
    per: Literal["hour", "day", "month"] = "day"

    def __post_init__(self) -> None:
        if not 0 <= self.dollars <= 1e9:
            raise ValueError("dollars must be between 0 and 1e9")


class TeamRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Team: keys that share one budget, beside what each of them has. Without `dollars`, none."""

    keys: tuple[str, ...] = ()
    dollars: float | None = None
    per: Literal["hour", "day", "month"] = "day"

    @property
    def budget(self) -> BudgetRow | None:
        """Return the budget that its keys share, if there is one."""
        return None if self.dollars is None else BudgetRow(dollars=self.dollars, per=self.per)

    def __post_init__(self) -> None:
        if self.dollars is not None and not 0 <= self.dollars <= 1e9:
            raise ValueError("dollars must be between 0 and 1e9")


MAX_STEPS = 100

Guard = Literal["errors", "goodput", "validity", "quality", "cost"]


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New version of a model: some upstreams of its row are the canary, the others the control.

    `steps` are percents of traffic. `requests` is the number of judged canary requests per step,
    for each guard in `needs`. `shadow` is the percent of requests whose copies the canary gets
    before the first step. `alpha` is the probability of rolling back a version that is no worse.
    `target` is the share of requests, of both arms, that has to meet `slo`: no step ends while its
    error budget burns; 0 is no budget.
    """

    name: str
    model: str
    canary: tuple[str, ...]
    version: str = "1"
    steps: tuple[float, ...] = (1, 5, 25, 50)
    requests: int = 60
    alpha: float = 0.01
    shadow: float = 0
    slo: str = ""
    target: float = 0
    needs: tuple[Guard, ...] = ("errors", "goodput")
    force: bool = False

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in pairwise(self.steps))
        if not self.steps or not rising or not 0 < self.steps[0] <= self.steps[-1] < 100:
            raise ValueError("steps must be percents that rise, above 0 and below 100")
        if len(self.steps) > MAX_STEPS:
            raise ValueError(f"steps are {len(self.steps):,}; a rollout has at most {MAX_STEPS}")
        if not 1 <= self.requests <= 1_000_000 or not 1e-6 <= self.alpha <= 0.2:
            raise ValueError("requests must be 1 to 1000000, alpha 1e-6 to 0.2")
        if not 0 <= self.shadow <= 100:
            raise ValueError("shadow must be a percent between 0 and 100")
        if not self.canary or not self.needs:
            raise ValueError("canary and needs must name at least one each")
        if self.target and not (self.slo and 0.5 <= self.target < 1):
            raise ValueError("target must be 0.5 to below 1, of requests that meet a slo")
        if self.slo:
            try:
                parse_slo(self.slo)
            except UsageError as error:
                raise ValueError(f"{error.cause} {error.fix}") from None


class DriftRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Schedule and probes of the drift check.

    `probes` is a file of JSON lines with `messages`; without it, the skills' questions.
    """

    every: str = "60m"
    probes: str = ""
    number: int = 200

    @property
    def every_s(self) -> float:
        return parse_duration(self.every, "every")

    def __post_init__(self) -> None:
        check_duration("drift.every", self.every)
        if not 20 <= self.number <= 10_000:
            raise ValueError("drift.number must be between 20 and 10000")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the gateway; `warnings` are printed at its start."""

    upstreams: tuple[UpstreamRow, ...]
    models: tuple[GatewayModelRow, ...]
    budgets: dict[str, BudgetRow] = {}
    teams: dict[str, TeamRow] = {}
    rollouts: tuple[RolloutRow, ...] = ()
    tasks: tuple[TaskRule, ...] = ()
    evidence: dict[str, EvidenceFile] = {}
    """Evidence by the model row of its cascade."""
    drift: DriftRow | None = None
    probes: tuple[DriftProbe, ...] = ()
    """Probes of the drift check; the command fills them in."""
    forward_headers: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def routes(self) -> list[str]:
        """Return the lines of `--dry-run`: each model, its policy and its upstreams in order."""
        return [
            f"{row.name:<22} {row.policy:<12} {', '.join(row.upstreams)}"
            + (f"; then {', '.join(row.fallbacks)}" if row.fallbacks else "")
            for row in self.models
        ]


TOP_LEVEL_KEYS = (
    *("upstreams", "models", "budgets", "teams", "rollouts", "tasks", "drift"),
    "forward_headers",
)


def read_config(file: Path) -> Config:
    """Read the configuration from a file; UsageError names the row and the field."""
    content = read_yaml(file, "gateway", FIX_HINT)
    where = str(file)
    if not isinstance(content, dict) or "upstreams" not in content:
        raise UsageError(f"{where}: it has no `upstreams:`.", FIX_HINT)
    for name in content:
        if name not in TOP_LEVEL_KEYS:
            raise UsageError(
                f"{where}: there is no {str(name)[:64]!r}.",
                format_suggestion(str(name), TOP_LEVEL_KEYS),
            )
    content = with_overlay(file, content)
    upstreams = with_names(rows(where, "upstreams", content["upstreams"], UpstreamRow))
    models = rows(where, "models", content.get("models") or [], GatewayModelRow)
    budget_rows = rows_by_name(where, "budgets", content.get("budgets") or {}, BudgetRow)
    teams = rows_by_name(where, "teams", content.get("teams") or {}, TeamRow)
    check_teams(where, teams)
    headers = content.get("forward_headers") or []
    if not isinstance(headers, list) or not all(isinstance(name, str) for name in headers):
        raise UsageError(f"{where}: forward_headers must be a list of names.", FIX_HINT)
    config = join_rows(
        where, upstreams, models, budget_rows, tuple(name.lower() for name in headers)
    )
    rollouts = rows(where, "rollouts", content.get("rollouts") or [], RolloutRow)
    tasks = rows(where, "tasks", content.get("tasks") or [], TaskRule)
    drift = content.get("drift")
    row = convert_row(f"{where}: drift", drift, DriftRow) if drift is not None else None
    config = msgspec.structs.replace(config, tasks=tuple(tasks), drift=row, teams=teams)
    return with_cascades(file, with_rollouts(where, config, rollouts))


def config_of_urls(urls: Sequence[str]) -> Config:
    """Return the configuration of `--upstream URL …`: replicas that answer all names they serve."""
    upstreams = with_names([convert_row("--upstream", {"url": url}, UpstreamRow) for url in urls])
    return join_rows("--upstream", upstreams, [], {}, ())


def join_rows(
    where: str,
    upstreams: list[UpstreamRow],
    models: list[GatewayModelRow],
    budgets: dict[str, BudgetRow],
    headers: tuple[str, ...],
) -> Config:
    """Join the rows; raises UsageError for errors that concern several rows."""
    if not upstreams:
        raise UsageError(f"{where}: upstreams is empty.", FIX_HINT)
    names = [row.name for row in upstreams]
    check_distinct(where, "upstreams", names)
    check_distinct(where, "models", [row.name for row in models])
    models = [
        msgspec.structs.replace(row, upstreams=row.upstreams or tuple(names)) for row in models
    ] or [GatewayModelRow(name=ANY, upstreams=tuple(names))]
    routes = [row.name for row in models]
    for row in models:
        for field, given, there in (
            ("upstreams", row.upstreams, names),
            ("fallbacks", row.fallbacks, routes),
        ):
            for name in given:
                if name not in there:
                    raise UsageError(
                        f"{where}: models: {row.name}: {field} names {name!r}, which is not there.",
                        format_suggestion(name, there),
                    )
    check_aliases(where, models)
    check_loops(where, models)
    for name in headers:
        if name in HOP_HEADERS:
            raise UsageError(
                f"{where}: forward_headers: {name} is never passed on.", "Leave it out."
            )
    warnings = [
        f"{where}: budgets are set, and the upstream {row.name} has no price: it counts as free."
        for row in upstreams
        if budgets and row.price is None
    ]
    return Config(
        upstreams=tuple(upstreams),
        models=tuple(models),
        budgets=budgets,
        forward_headers=headers,
        warnings=tuple(warnings),
    )


def with_rollouts(where: str, config: Config, rollouts: list[RolloutRow]) -> Config:
    """Add rollouts to the configuration; raises UsageError if one does not fit it."""
    check_distinct(where, "rollouts", [row.name for row in rollouts])
    check_distinct(where, "rollouts: model", [row.model for row in rollouts])
    models = {row.name: row for row in config.models}
    for row in rollouts:
        at = f"{where}: rollouts: {row.name}"
        if row.model not in models:
            raise UsageError(
                f"{at}: model names {row.model!r}, which is not there.",
                format_suggestion(row.model, models),
            )
        there = models[row.model].upstreams
        for name in row.canary:
            if name not in there:
                raise UsageError(
                    f"{at}: canary names {name!r}, which is no upstream of {row.model}.",
                    format_suggestion(name, there),
                )
        if set(row.canary) >= set(there):
            raise UsageError(
                f"{at}: all upstreams of {row.model} are the canary.",
                "Leave those out that serve the version of today.",
            )
    return msgspec.structs.replace(config, rollouts=tuple(rollouts))


def with_cascades(file: Path, config: Config) -> Config:
    """Add the evidence of cascades to the configuration; UsageError if one does not fit it."""
    rows, by_model, warnings = {row.name: row for row in config.models}, {}, list(config.warnings)
    prices = {row.name: row.price for row in config.upstreams}
    for row in config.models:
        if row.cascade is None:
            continue
        at, cascade = f"{file}: models: {row.name}: cascade", row.cascade
        for field, name in (("cheap", cascade.cheap), ("judge", cascade.judge)):
            if name and (name not in rows or name == row.name):
                raise UsageError(f"{at}: {field} names {name!r}.", format_suggestion(name, rows))
        cheap = rows[cascade.cheap].upstreams
        if cascade.judge and set(cheap) & set(rows[cascade.judge].upstreams):
            raise UsageError(
                f"{at}: judge is a model that writes the answers.", "Name a row of other upstreams."
            )
        for name in (*cheap, *row.upstreams):
            if prices[name] is None:
                raise UsageError(
                    f"{at}: the upstream {name} has no price.", "Say price: {hour: 1} or by tokens."
                )
        evidence = read_evidence(evidence_path(cascade, file))
        if evidence is None:
            warnings.append(f"{at}: there is no {cascade.evidence}; the dear route answers all.")
        else:
            by_model[row.name] = evidence
    return msgspec.structs.replace(config, evidence=by_model, warnings=tuple(warnings))


HOP_HEADERS = {
    *("authorization", "x-api-key", "api-key", "cookie", "host", "connection", "content-length"),
    *("transfer-encoding", "content-type", "accept-encoding", "x-headway-user", "te", "upgrade"),
}
"""Headers of a client that concern its own connection or identity; they are never forwarded."""


def check_aliases(where: str, models: list[GatewayModelRow]) -> None:
    """Raise UsageError for an alias that is another name too, or of a row of any name."""
    check_distinct(
        where, "models: names and aliases", [n for row in models for n in (row.name, *row.aliases)]
    )
    for row in models:
        if row.aliases and row.name == ANY:
            raise UsageError(
                f"{where}: models: {ANY}: it has aliases, and answers any name.",
                "Give the model a row of its own.",
            )


def check_loops(where: str, models: list[GatewayModelRow]) -> None:
    """Raise UsageError if the fallbacks of a model form a loop."""
    after = {row.name: row.fallbacks for row in models}

    def visit(name: str, way: list[str]) -> None:
        if name in way:
            loop = " → ".join([*way[way.index(name) :], name])
            raise UsageError(
                f"{where}: models: {way[0]}: its fallbacks go round: {loop}.",
                "Take one of them out.",
            )
        for other in after[name]:
            visit(other, [*way, name])

    for name in after:
        visit(name, [])


def check_distinct(where: str, what: str, names: Iterable[str]) -> None:
    known: set[str] = set()
    for name in names:
        if name in known:
            raise UsageError(f"{where}: {what}: {name!r} is there twice.", "Rename one of them.")
        known.add(name)


def with_names(upstreams: list[UpstreamRow]) -> list[UpstreamRow]:
    """Give upstreams without a name the name of their host and port."""
    return [
        row if row.name else msgspec.structs.replace(row, name=urlsplit(row.address).netloc)
        for row in upstreams
    ]


def rows(where: str, what: str, content: Any, kind: type[Row]) -> list[Row]:
    """Convert the rows of one list of the file."""
    if not isinstance(content, list):
        raise UsageError(f"{where}: {what} must be a list of rows.", FIX_HINT)
    return [
        convert_row(f"{where}: {what}: {row_label(row, number)}", row, kind)
        for number, row in enumerate(content, 1)
    ]


def rows_by_name(where: str, what: str, content: Any, kind: type[Row]) -> dict[str, Row]:
    """Convert the rows of a part of the file that has a name for each."""
    if not isinstance(content, dict):
        raise UsageError(f"{where}: {what} must be names with rows.", FIX_HINT)
    return {
        str(name): convert_row(f"{where}: {what}: {name}", row, kind)
        for name, row in content.items()
    }


def check_teams(where: str, teams: dict[str, TeamRow]) -> None:
    """Raise UsageError for a name that is none, or a key in two teams."""
    team_of: dict[str, str] = {}
    for name, row in teams.items():
        if not (name.isprintable() and 0 < len(name) <= 64) or name == "*":
            raise UsageError(f"{where}: teams: {name[:64]!r} cannot be a name.", "Rename it.")
        for key in row.keys:
            if team_of.setdefault(key, name) != name:
                raise UsageError(
                    f"{where}: teams: the key {key!r} is in {team_of[key]} and in {name}.",
                    "A key has one team: take it out of one of them.",
                )


def row_label(row: Any, number: int) -> str:
    """Return the name of a row for an error message, else its number."""
    name = row.get("name") if isinstance(row, dict) else None
    return str(name)[:64] if name else f"row {number}"


def convert_row(where: str, content: Any, kind: type[Row]) -> Row:
    """Convert one row; UsageError with the field, and the nearest name of an unknown one."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        text = str(error)[:300]
        fix = FIX_HINT
        if "Invalid enum value" in text:
            fix = format_suggestion(text.split("'")[1], choices_at(kind, text))
        if "unknown field" in text:
            there = UpstreamPrice if "$.price" in text else kind
            fix = format_suggestion(
                text.partition("`")[2].partition("`")[0], there.__struct_fields__
            )
        raise UsageError(f"{where}: {text}.", fix) from error


def choices_at(kind: type[msgspec.Struct], error: str) -> list[str]:
    """Return the values of the field that an error of msgspec names: … - at `$.kind`."""
    field = error.partition("`$.")[2].partition("`")[0].partition("[")[0]
    hint = get_type_hints(kind).get(field)
    inner = [get_args(each) or (each,) for each in get_args(hint)]
    return [value for values in inner for value in values if isinstance(value, str)]


def format_suggestion(given: str, there: Iterable[str]) -> str:
    """Return the fix for an unknown name: the nearest one, and the list of all."""
    names = list(there)
    near = difflib.get_close_matches(given, names, n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    return f"{meant}There are {', '.join(names)}."


def key_of(row: UpstreamRow) -> str:
    """Read the key of an upstream from the environment or a file of mode 0600."""
    where = f"upstreams: {row.name}"
    if row.key_env:
        key = os.environ.get(row.key_env, "")
        if not key:
            raise UsageError(
                f"{where}: key_env names {row.key_env}, which is not set.", f"Set {row.key_env}."
            )
        return key
    if not row.key_file:
        return ""
    path = Path(row.key_file).expanduser()
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(
                f"{where}: key_file {path} can be read by others.", f"chmod 600 {path}"
            )
        return read_text(path).strip()
    except OSError as error:
        raise UsageError(
            f"{where}: key_file {path}: {error.strerror}.", "Check the path."
        ) from error
