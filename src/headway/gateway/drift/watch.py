"""Drift check of a running gateway: one round per `every`, and at once after a fingerprint changed.

Each upstream of a model is compared with its own last good answers (the baseline), and with the
first other upstream. Findings are in `/stats` and `/metrics`; an alarm invalidates the evidence of
cascades that use the upstream.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headway.core.clock import Clock
from headway.core.supervision import supervise
from headway.gateway import probe
from headway.gateway.cascade.cascade import Cascade
from headway.gateway.config import Config, GatewayModelRow
from headway.gateway.drift.ask import collect_answers
from headway.gateway.drift.compare import DriftFinding, DriftProbe, ProbeAnswers, compare
from headway.gateway.upstream import Upstream

log = logging.getLogger(__name__)

POLL_S = 1.0
BASELINE = "baseline"


class Watched(Protocol):
    """Part of the gateway's state that the drift check reads."""

    config: Config
    clock: Clock
    upstreams: dict[str, Upstream]
    routes: dict[str, GatewayModelRow]
    cascades: dict[str, Cascade]


class DriftWatch:
    """Drift check of one gateway; `folder` keeps the baselines over a restart."""

    def __init__(self, state: Watched, folder: Path | None) -> None:
        self._state = state
        self._folder = folder
        self._task: asyncio.Task[None] | None = None
        self._due_s = 0.0
        self._known: dict[str, str] = {}
        """Upstream → fingerprint in the last round."""
        self.findings: dict[tuple[str, str, str], DriftFinding] = {}
        """(model, first, second) → the last comparison."""
        self.num_rounds = 0

    def start(self) -> None:
        """Start the rounds, the first one at once."""
        self._task = supervise("drift watch", self._run)

    async def stop(self) -> None:
        """Stop the rounds; safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            row, clock = self._state.config.drift, self._state.clock
            if row is not None and (clock.now_s() >= self._due_s or self._is_changed()):
                self._due_s = clock.now_s() + row.every_s
                await self.round()
            await asyncio.sleep(POLL_S)

    def _is_changed(self) -> bool:
        """Return whether an upstream has another fingerprint than in the last round."""
        return any(
            each.fingerprint and self._known.get(name, each.fingerprint) != each.fingerprint
            for name, each in self._state.upstreams.items()
        )

    async def round(self) -> None:
        """Ask all upstreams of each model that has several, or a cascade, and compare."""
        for row in self._state.config.models:
            names = list(row.upstreams)
            if len(names) > 1 or row.cascade is not None:
                await self._model(row.name, names)
        for name, each in self._state.upstreams.items():
            self._known[name] = each.fingerprint
        self.num_rounds += 1

    async def _model(self, model: str, names: Sequence[str]) -> None:
        probes = self._state.config.probes
        sheets = []
        for name in names:
            upstream = self._state.upstreams.get(name)
            if upstream is None or upstream.is_down:
                continue
            sheet = await self._sheet(upstream, model, probes)
            if sheet is not None:
                sheets.append(sheet)
        for sheet in sheets:
            before = await asyncio.to_thread(self._read, model, sheet.upstream)
            alarm = False
            if before is not None:
                renamed = msgspec.structs.replace(before, upstream=BASELINE)
                alarm = self._note(model, compare(renamed, sheet)).alarm
            if sheet is not sheets[0]:
                alarm = self._note(model, compare(sheets[0], sheet)).alarm or alarm
            if not alarm or before is None:
                await asyncio.to_thread(self._write, model, sheet)

    async def _sheet(
        self, upstream: Upstream, model: str, probes: Sequence[DriftProbe]
    ) -> ProbeAnswers | None:
        """Return the upstream's answers; None if it fails, which is a matter for breakers."""
        try:
            return await collect_answers(upstream, model, probes, self._state.clock.wall_s())
        except probe.PROBE_FAILURES as error:
            log.warning("drift: upstream %s does not answer probes: %s", upstream.name, error)
            return None

    def _note(self, model: str, finding: DriftFinding) -> DriftFinding:
        """Keep a finding; an alarm is logged, and invalidates evidence."""
        self.findings[model, finding.first, finding.second] = finding
        if not finding.alarm:
            return finding
        log.warning("drift: %s against %s: %s", finding.second, finding.first, finding.suspect)
        for name, cascade in self._state.cascades.items():
            routes = (self._state.routes[name], self._state.routes[cascade.row.cheap])
            if any(finding.second in row.upstreams for row in routes):
                cascade.invalidate(f"{finding.second} drifts: {finding.suspect}")
        return finding

    # ── baselines ───────────────────────────────────────────────────────────────────────────

    def _path(self, model: str, upstream: str) -> Path | None:
        if self._folder is None:
            return None
        what = msgspec.json.encode((model, upstream, self._state.config.probes))
        return self._folder / f"{hashlib.sha256(what).hexdigest()[:32]}.json"

    def _read(self, model: str, upstream: str) -> ProbeAnswers | None:
        """Return the baseline of an upstream for these probes."""
        path = self._path(model, upstream)
        try:
            return (
                msgspec.json.decode(path.read_bytes(), type=ProbeAnswers)
                if path is not None
                else None
            )
        except (OSError, msgspec.MsgspecError):
            return None

    def _write(self, model: str, sheet: ProbeAnswers) -> None:
        path = self._path(model, sheet.upstream)
        if path is None:
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(sheet))
            os.replace(new, path)
        except OSError as error:
            log.warning("drift: the baseline of %s cannot be kept: %s", sheet.upstream, error)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the part of `/stats`: the last comparison of each pair."""
        return [
            {"model": model, **msgspec.to_builtins(finding)}
            for (model, _, _), finding in self.findings.items()
        ]
