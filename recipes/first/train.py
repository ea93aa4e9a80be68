"""Trains `headway-first` on half an hour of one CPU core.

It is given the folder that `tokenizer` and `data` filled, and continues a run it finds there.
It promises `checkpoint.safetensors` and a line of `loss.csv` for every ten steps.
"""

import argparse
import csv
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from recipes.first import checkpoint
from recipes.first.model import Llama, Shape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

LOG_EVERY = 10
SAVE_EVERY = 250
SOURCES = ("books", "chats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One dial, the number of steps; the rest fits a model of a million parameters."""

    steps: int
    seed: int = 0
    step_tokens: int = 2048
    length: int = 256
    long_length: int = 1024
    long_every: int = 8
    peak_lr: float = 4e-3
    final_lr: float = 2e-4
    warmup_steps: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0

    def lr(self, step: int) -> float:
        """A straight rise to the peak, then half a cosine down to the end."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        wave = 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_lr + (self.peak_lr - self.final_lr) * wave

    def row_length(self, step: int) -> int:
        """256 for seven steps of eight, 1024 for the eighth."""
        return self.long_length if step % self.long_every == 0 else self.length


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens, which of them are learned, and where rows may start."""

    tokens: Tensor
    learned: Tensor
    starts: Tensor

    @classmethod
    def read(cls, path: Path) -> "Corpus":
        return cls(**load_file(path))

    def rows(self, num_rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Inputs [rows, length], the tokens that follow them, and which of those are learned."""
        usable = int(torch.searchsorted(self.starts, len(self.tokens) - length - 1))
        picked = self.starts[torch.randint(usable, (num_rows,), generator=generator)]
        index = picked[:, None] + torch.arange(length + 1)
        tokens = self.tokens[index].long()
        return tokens[:, :-1], tokens[:, 1:], self.learned[index][:, 1:].bool()


def losses(model: Llama, corpora: list[Corpus], plan: Plan, step: int) -> list[Tensor]:
    """The mean loss of each corpus on this step's rows, which depend on seed and step alone."""
    generator = torch.Generator().manual_seed(plan.seed * 1_000_000 + step)
    length = plan.row_length(step)
    num_rows = plan.step_tokens // length // len(corpora)
    parts = [corpus.rows(num_rows, length, generator) for corpus in corpora]
    hidden = model(torch.cat([inputs for inputs, _, _ in parts])).split(num_rows)
    return [
        F.cross_entropy(model.logits(h[learned]), targets[learned])
        for h, (_, targets, learned) in zip(hidden, parts, strict=True)
    ]


def update(model: Llama, optimizer: torch.optim.Optimizer, loss: Tensor, plan: Plan) -> None:
    """One step of descent along the clipped gradient."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
    optimizer.step()


def make_optimizer(model: Llama, plan: Plan) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves the norms alone."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.peak_lr, betas=(0.9, 0.95), fused=True)


def progress_bar() -> Progress:
    return Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )


def begin_log(path: Path, first: int) -> None:
    """A log with its header and the lines up to the first step, those after it being redone."""
    header = ["step", "tokens", "books_loss", "chats_loss", "lr", "seconds"]
    rows = list(csv.reader(path.read_text().splitlines()))[1:] if first else []
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *(row for row in rows if int(row[0]) <= first)])


def record(path: Path, plan: Plan, shape: Shape, first: int) -> None:
    """Adds this sitting: [[0, 5600], [4000, 4600]] was planned anew at step 4000 to end sooner."""
    sittings = json.loads(path.read_text())["sittings"] if first else []
    sittings = [sitting for sitting in sittings if sitting[0] < first] + [[first, plan.steps]]
    content = {"plan": asdict(plan), "shape": asdict(shape), "sittings": sittings}
    path.write_text(json.dumps(content, indent=2) + "\n")


def train(folder: Path, plan: Plan, shape: Shape) -> None:
    """Every step: draw rows, measure the loss of both corpora, descend along their mean."""
    torch.manual_seed(plan.seed)
    model = Llama(shape)
    optimizer = make_optimizer(model, plan)
    corpora = [Corpus.read(folder / f"{source}.safetensors") for source in SOURCES]
    saved = folder / "checkpoint.safetensors"
    first = checkpoint.load(saved, model, optimizer) if saved.exists() else 0
    record(folder / "training.json", plan, shape, first)
    begin_log(folder / "loss.csv", first)
    start = time.perf_counter()
    with progress_bar() as progress, (folder / "loss.csv").open("a", newline="") as file:
        log = csv.writer(file)
        task = progress.add_task("", total=plan.steps, completed=first)
        for step in range(first, plan.steps):
            for group in optimizer.param_groups:
                group["lr"] = plan.lr(step)
            parts = losses(model, corpora, plan, step)
            update(model, optimizer, torch.stack(parts).mean(), plan)
            done = step + 1
            if done % LOG_EVERY == 0:
                books, chats = (f"{part.item():.4f}" for part in parts)
                seconds = f"{time.perf_counter() - start:.1f}"
                log.writerow(
                    (done, done * plan.step_tokens, books, chats, f"{plan.lr(step):.6f}", seconds)
                )
                file.flush()
                progress.update(task, completed=done, description=f"books {books} chats {chats}")
            if done % SAVE_EVERY == 0 or done == plan.steps:
                checkpoint.save(saved, model, optimizer, done)
                progress.console.print(f"step {done}: saved, books {books}, chats {chats}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that `data` filled")
    parser.add_argument("--steps", type=int, default=5600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    plan = Plan(steps=args.steps, seed=args.seed)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    shape = Shape(vocab_size=tokenizer.get_vocab_size())
    train(args.out, plan, shape)


if __name__ == "__main__":
    main()
