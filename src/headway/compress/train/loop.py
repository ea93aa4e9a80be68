"""The training loop: loss, clipped gradient and rate of every step; log, checkpoints, resume.

A step depends only on its number, so an interrupted run gives the result of an uninterrupted one:
the last checkpoint is loaded and the steps after it are repeated.

    RUN/checkpoint.safetensors    weights, moments, finished steps
    RUN/loss.csv                  a line every few steps
    RUN/training.json             the settings, and the minutes
"""

import csv
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.compress.train import checkpoint
from headway.core.errors import UsageError

OnLog = Callable[[int, dict[str, float]], None]
"""Called with (finished steps, losses by name) after each logged step."""
CHECKPOINT, LOG, RECORD = "checkpoint.safetensors", "loss.csv", "training.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineSchedule:
    """A linear warm-up to the peak, then half a cosine down to the final rate."""

    steps: int
    peak_lr: float
    final_lr: float
    warmup_steps: int

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        wave = 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_lr + (self.peak_lr - self.final_lr) * wave


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One run; `losses` returns (the loss to minimize, the losses to log) of a step.

    A parameter group may have a `factor` for its rate. `settle` is called after each step, for
    constraints on weights.
    """

    module: nn.Module
    optimizers: list[Optimizer]
    steps: int
    lr: Callable[[int], float]
    losses: Callable[[int], tuple[Tensor, dict[str, Tensor]]]
    names: tuple[str, ...]
    clip: float = 1.0
    log_every: int = 10
    save_every: int = 100
    settle: Callable[[], None] = lambda: None


def train(run: Training, folder: Path, settings: dict[str, Any], report: OnLog) -> None:
    """Run the remaining steps; `settings` is what the result depends on, and must not change.

    Raises UsageError if `folder` has a run with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / CHECKPOINT
    first = 0
    if saved.exists():
        check_same_settings(folder, settings)
        first = checkpoint.load(saved, run.module, run.optimizers)
    else:
        (folder / RECORD).write_text(json.dumps({"asked": settings}, indent=2) + "\n")
    begin_log(folder / LOG, run.names, first)
    began = time.perf_counter()
    with (folder / LOG).open("a", newline="") as file:
        for step in range(first, run.steps):
            shown = advance(run, step)
            done = step + 1
            if done % run.log_every == 0 or done == run.steps:
                values = {name: value.item() for name, value in shown.items()}
                row = [f"{values[name]:.5f}" for name in run.names]
                seconds = f"{time.perf_counter() - began:.1f}"
                csv.writer(file).writerow((done, *row, f"{run.lr(step):.7f}", seconds))
                file.flush()
                report(done, values)
            if done % run.save_every == 0 or done == run.steps:
                checkpoint.save(saved, run.module, run.optimizers, done)
    finish(folder)


def advance(run: Training, step: int) -> dict[str, Tensor]:
    """Run one step; return the losses to log."""
    loss, shown = run.losses(step)
    loss.backward()
    if run.clip:
        torch.nn.utils.clip_grad_norm_(run.module.parameters(), run.clip)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = run.lr(step) * group.get("factor", 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        run.settle()
    return {name: value.detach() for name, value in shown.items()}


def check_same_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raise UsageError that names the first setting in which the existing run differs."""
    before = json.loads((folder / RECORD).read_text())["asked"]
    now = json.loads(json.dumps(settings))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"{folder} holds a run with {name} {before.get(name)!r}, not {now.get(name)!r}.",
                "Ask for the same to continue it, or remove that folder to begin anew.",
            )


def begin_log(path: Path, names: tuple[str, ...], first: int) -> None:
    """Write the log's header and its lines up to the first step; later steps are repeated."""
    rows = list(csv.reader(path.read_text().splitlines()))[1:] if first else []
    with path.open("w", newline="") as file:
        finished = [row for row in rows if int(row[0]) <= first]
        csv.writer(file).writerows([["step", *names, "lr", "seconds"], *finished])


def minutes(log: Path) -> tuple[float, float]:
    """Return minutes (by the median pace, of wall time) over all sessions.

    The clock restarts with each session. Seconds [50, 90, 130, 900, 20, 60]: paces 50, 40, 40, 770,
    20, 40, so 6 rows of 40; 960 in all.
    """
    paces, last = [], 0.0
    with log.open(newline="") as file:
        for row in csv.DictReader(file):
            seconds = float(row["seconds"])
            paces.append(seconds - last if seconds > last else seconds)
            last = seconds
    return (len(paces) * statistics.median(paces) / 60, sum(paces) / 60) if paces else (0.0, 0.0)


def finish(folder: Path) -> None:
    """Add the minutes of training to the record."""
    content = json.loads((folder / RECORD).read_text())
    content["minutes"] = minutes(folder / LOG)
    (folder / RECORD).write_text(json.dumps(content, indent=2) + "\n")
