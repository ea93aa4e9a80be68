"""Drift in a running gateway: a round each `every`, and at once when a fingerprint has changed.

Each upstream of a model is compared with itself as it was when it was last in order, and with the
first other one. What is found is in `/stats` and `/metrics`; an alarm voids the evidence of
cascades whose routes the upstream answers.
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
from headway.gateway.config import Config, ModelRow
from headway.gateway.drift.ask import sheet_of
from headway.gateway.drift.compare import Finding, Probe, Sheet, compare
from headway.gateway.upstream import Upstream

log = logging.getLogger(__name__)

LOOK_S = 1.0
BASELINE = "baseline"


class Watched(Protocol):
    """What a watch sees of the gateway, as it is now."""

    config: Config
    clock: Clock
    upstreams: dict[str, Upstream]
    routes: dict[str, ModelRow]
    cascades: dict[str, Cascade]


class DriftWatch:
    """The rounds of one gateway; `folder` keeps the baselines over a restart."""

    def __init__(self, state: Watched, folder: Path | None) -> None:
        self._state = state
        self._folder = folder
        self._task: asyncio.Task[None] | None = None
        self._due_s = 0.0
        self._known: dict[str, str] = {}
        """Fingerprints of the last round."""
        self.findings: dict[tuple[str, str, str], Finding] = {}
        """(model, first, second) → the last comparison."""
        self.num_rounds = 0

    def start(self) -> None:
        """Begin with the rounds, the first one at once."""
        self._task = supervise("drift watch", self._run)

    async def stop(self) -> None:
        """End them; safe to call twice."""
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
            await asyncio.sleep(LOOK_S)

    def _is_changed(self) -> bool:
        """Whether an upstream has another fingerprint than in the last round."""
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

    async def _sheet(self, upstream: Upstream, model: str, probes: Sequence[Probe]) -> Sheet | None:
        """Its answers, None where it fails: that is for breakers to tell."""
        try:
            return await sheet_of(upstream, model, probes, self._state.clock.wall_s())
        except probe.FAILED as error:
            log.warning("drift: upstream %s does not answer probes: %s", upstream.name, error)
            return None

    def _note(self, model: str, finding: Finding) -> Finding:
        """Keep what was found; an alarm is told, and voids evidence."""
        self.findings[model, finding.first, finding.second] = finding
        if not finding.alarm:
            return finding
        log.warning("drift: %s beside %s: %s", finding.second, finding.first, finding.suspect)
        for name, cascade in self._state.cascades.items():
            routes = (self._state.routes[name], self._state.routes[cascade.row.cheap])
            if any(finding.second in row.upstreams for row in routes):
                cascade.set_void(f"{finding.second} drifts: {finding.suspect}")
        return finding

    # ── baselines ───────────────────────────────────────────────────────────────────────────

    def _path(self, model: str, upstream: str) -> Path | None:
        if self._folder is None:
            return None
        what = msgspec.json.encode((model, upstream, self._state.config.probes))
        return self._folder / f"{hashlib.sha256(what).hexdigest()[:32]}.json"

    def _read(self, model: str, upstream: str) -> Sheet | None:
        """Its answers to these probes when it was last in order."""
        path = self._path(model, upstream)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Sheet) if path is not None else None
        except (OSError, msgspec.MsgspecError):
            return None

    def _write(self, model: str, sheet: Sheet) -> None:
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
        """What `/stats` shows: each pair as it was last compared."""
        return [
            {"model": model, **msgspec.to_builtins(finding)}
            for (model, _, _), finding in self.findings.items()
        ]
