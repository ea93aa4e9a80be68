"""The training loop: every step a loss, a clipped gradient, a rate; logged, saved, resumed.

It is given what is trained, its optimizers and a function that makes the losses of a step. What a
step sees depends on its number alone, so that a run that was killed ends as it would have ended:
the last checkpoint is loaded and the steps behind it are done again.

    RUN/checkpoint.safetensors    weights, moments, steps done
    RUN/loss.csv                  a line every few steps
    RUN/training.json             what was asked, and how long it took
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

Report = Callable[[int, dict[str, float]], None]
"""Called with (steps done, losses by name) after each step that is logged."""
CHECKPOINT, LOG, RECORD = "checkpoint.safetensors", "loss.csv", "training.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """A straight rise to the peak, then half a cosine down to the end."""

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
    """One run; `losses` gives (what is descended, what is shown) of step number `step`.

    An optimizer's groups may have a `factor`, which their rate is multiplied with. `settle` is
    called after each step, to bring weights back to where they must be.
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


def train(run: Training, folder: Path, asked: dict[str, Any], report: Report) -> None:
    """Do the steps that are left; `asked` is what the result depends on, and must not change.

    Raises UsageError where `folder` holds a run that was asked otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / CHECKPOINT
    first = 0
    if saved.exists():
        refuse_other(folder, asked)
        first = checkpoint.load(saved, run.module, run.optimizers)
    else:
        (folder / RECORD).write_text(json.dumps({"asked": asked}, indent=2) + "\n")
    begin_log(folder / LOG, run.names, first)
    began = time.perf_counter()
    with (folder / LOG).open("a", newline="") as file:
        for step in range(first, run.steps):
            shown = advance(run, step)
            done = step + 1
            if done % run.log_every == 0 or done == run.steps:
                told = {name: value.item() for name, value in shown.items()}
                row = [f"{told[name]:.5f}" for name in run.names]
                seconds = f"{time.perf_counter() - began:.1f}"
                csv.writer(file).writerow((done, *row, f"{run.lr(step):.7f}", seconds))
                file.flush()
                report(done, told)
            if done % run.save_every == 0 or done == run.steps:
                checkpoint.save(saved, run.module, run.optimizers, done)
    finish(folder)


def advance(run: Training, step: int) -> dict[str, Tensor]:
    """One step; returns what is shown."""
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


def refuse_other(folder: Path, asked: dict[str, Any]) -> None:
    """Name the first option in which the run that lies there differs."""
    before = json.loads((folder / RECORD).read_text())["asked"]
    told = json.loads(json.dumps(asked))
    for name in sorted(before.keys() | told.keys()):
        if before.get(name) != told.get(name):
            raise UsageError(
                f"{folder} holds a run with {name} {before.get(name)!r}, not {told.get(name)!r}.",
                "Ask for the same to continue it, or remove that folder to begin anew.",
            )


def begin_log(path: Path, names: tuple[str, ...], first: int) -> None:
    """A log with its header and the lines up to the first step, those after it being redone."""
    rows = list(csv.reader(path.read_text().splitlines()))[1:] if first else []
    with path.open("w", newline="") as file:
        kept = [row for row in rows if int(row[0]) <= first]
        csv.writer(file).writerows([["step", *names, "lr", "seconds"], *kept])


def minutes(log: Path) -> tuple[float, float]:
    """(by the median pace, of wall time) over all sittings; a row's clock starts with its sitting.

    Seconds [50, 90, 130, 900, 20, 60]: paces 50, 40, 40, 770, 20, 40, so 6 rows of 40; 960 in all.
    """
    paces, last = [], 0.0
    with log.open(newline="") as file:
        for row in csv.DictReader(file):
            seconds = float(row["seconds"])
            paces.append(seconds - last if seconds > last else seconds)
            last = seconds
    return (len(paces) * statistics.median(paces) / 60, sum(paces) / 60) if paces else (0.0, 0.0)


def finish(folder: Path) -> None:
    """Adds to the record how many minutes training took."""
    content = json.loads((folder / RECORD).read_text())
    content["minutes"] = minutes(folder / LOG)
    (folder / RECORD).write_text(json.dumps(content, indent=2) + "\n")
