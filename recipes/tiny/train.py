"""Trains `headway-base` from nothing on two CPU cores, or on a GPU when there is one.

It is given the folder that `tokenizer` and `data` filled, and continues a run it finds there.
It promises, in the folder `headway-base` of it, `checkpoint.safetensors` and a line of `loss.csv`
for every ten steps. `tune` makes `headway-tiny` of it.
"""

import argparse
import csv
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from recipes.tiny.model import Llama, Shape
from recipes.tiny.muon import Muon
from recipes.tiny.start import start
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import AdamW, Optimizer

from headway.compress.train import checkpoint
from headway.compress.train.loop import minutes

LOG_EVERY = 10
SAVE_EVERY = 250
NUM_ROWS, LENGTH = 32, 512
PEAK_LR = 3e-3
STEP_TOKENS = 4608
SOURCES = ("books", "chats", "practice")
SHARES = (0.3, 0.5, 0.2)
"""Of the sources in the loss."""
BASE, TARGET = "headway-base", "headway-tiny"

Losses = Callable[[Llama, Tensor, Tensor, Tensor], list[Tensor]]
"""The loss of either corpus, given a model and a batch of inputs, targets and weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One dial, the number of steps; the rest fits a model of a few million parameters.

    Matrices inside the layers are trained by Muon (Jordan et al. 2024), whose updates are scaled
    to the size of AdamW's, so that one learning rate serves both; embedding and norms by AdamW.
    """

    steps: int
    seed: int = 0
    step_tokens: int = STEP_TOKENS
    length: int = 384
    long_length: int = 2048
    long_every: int = 8
    peak_lr: float = PEAK_LR
    final_lr: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0

    def lr(self, step: int) -> float:
        """A straight rise to the peak, then half a cosine down to the end."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        wave = 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_lr + (self.peak_lr - self.final_lr) * wave

    def row_length(self, step: int) -> int:
        """384 for seven steps of eight, 2048 for the eighth."""
        return self.long_length if step % self.long_every == 0 else self.length


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens, how much each counts in the loss, and where rows may start."""

    tokens: Tensor
    weights: Tensor
    starts: Tensor

    @classmethod
    def read(cls, path: Path) -> "Corpus":
        return cls(**load_file(path))

    def rows(self, num_rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Inputs [rows, length], the tokens that follow them, and how much those count."""
        usable = int(torch.searchsorted(self.starts, len(self.tokens) - length - 1))
        picked = self.starts[torch.randint(usable, (num_rows,), generator=generator)]
        index = picked[:, None] + torch.arange(length + 1)
        tokens = self.tokens[index].long()
        return tokens[:, :-1], tokens[:, 1:], self.weights[index][:, 1:].float()


def split(num_rows: int) -> list[int]:
    """Rows of books, chats and practice: 12 are 3, 7 and 2; two are 0, 1 and 1; one is of chats."""
    books, practice = num_rows // 4, max(min(1, num_rows - 1), num_rows // 6)
    return [books, num_rows - books - practice, practice]


def batch(
    corpora: list[Corpus], plan: Plan, step: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and their weights of this step's rows, [B, T], in the order of SOURCES.

    The rows depend on seed and step alone, so that a run that was stopped goes on as it would have.
    """
    generator = torch.Generator().manual_seed(plan.seed * 1_000_000 + step)
    length = plan.row_length(step)
    sizes = split(plan.step_tokens // length)
    parts = [
        corpus.rows(size, length, generator) for corpus, size in zip(corpora, sizes, strict=True)
    ]
    inputs, targets, weights = (torch.cat(part).to(device) for part in zip(*parts, strict=True))
    return inputs, targets, weights


def by_source(*parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of each source, in order, of each tensor [B, ...]."""
    return zip(*(part.split(split(len(part))) for part in parts), strict=True)


def losses(model: Llama, inputs: Tensor, targets: Tensor, weights: Tensor) -> list[Tensor]:
    """The weighted mean cross-entropy of each source, in nats; weight 0 costs no logits."""
    means = []
    for hidden, target, weight in by_source(model(inputs), targets, weights):
        learned = weight > 0
        entropies = F.cross_entropy(
            model.logits(hidden[learned]).float(), target[learned], reduction="none"
        )
        means.append(mean(entropies, weight[learned]))
    return means


def mean(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean, 0 of nothing."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)


@torch.no_grad()
def bits_per_byte(model: Llama, corpus: Corpus, tokenizer: Tokenizer) -> float:
    """How well unseen books are told: the bits that a byte of 32 fixed rows costs."""
    inputs, targets, _ = corpus.rows(NUM_ROWS, LENGTH, torch.Generator().manual_seed(0))
    nats = 0.0
    for row, target in zip(inputs, targets, strict=True):
        hidden = model(row[None].to(model.cos.device))
        nats += F.cross_entropy(model.logits(hidden)[0].float().cpu(), target).item() * LENGTH
    num_bytes = sum(len(text.encode()) for text in tokenizer.decode_batch(targets.tolist()))
    return nats / math.log(2) / num_bytes


def descend(model: Llama, optimizers: list[Optimizer], loss: Tensor, plan: Plan, lr: float) -> None:
    """One step along the clipped gradient, every optimizer on its own parameters."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()


def make_optimizers(model: Llama, plan: Plan) -> list[Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and, undecayed, the norms."""
    matrices = [p for layer in model.layers for p in layer.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": [model.embed_tokens.weight], "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [
        Muon(matrices, lr=plan.peak_lr, weight_decay=plan.weight_decay),
        AdamW(groups, lr=plan.peak_lr, betas=(0.9, 0.95), fused=True),
    ]


def arithmetic(device: torch.device) -> AbstractContextManager[object]:
    """bf16 products where the device multiplies it, fp32 elsewhere; weights stay in fp32."""
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16) if native else nullcontext()


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
    columns = [f"{source}_loss" for source in SOURCES]
    header = ["step", "tokens", *columns, "unseen_bits_per_byte", "lr", "seconds"]
    rows = list(csv.reader(path.read_text().splitlines()))[1:] if first else []
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *(row for row in rows if int(row[0]) <= first)])


def record(path: Path, plan: Plan, shape: Shape, first: int) -> None:
    """Adds this sitting: [[0, 5600], [4000, 4600]] was planned anew at step 4000 to end sooner."""
    sittings = json.loads(path.read_text())["sittings"] if first else []
    sittings = [sitting for sitting in sittings if sitting[0] < first] + [[first, plan.steps]]
    content = {"plan": asdict(plan), "shape": asdict(shape), "sittings": sittings}
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_corpora(out: Path, chats: str) -> list[Corpus]:
    """Books, chats and practice; the chats are those of the file `chats`."""
    files = [chats if source == "chats" else source for source in SOURCES]
    return [Corpus.read(out / f"{file}.safetensors") for file in files]


def finish(folder: Path) -> None:
    """Adds to the record how many minutes training took."""
    content = json.loads((folder / "training.json").read_text())
    content["minutes"] = minutes(folder / "loss.csv")
    (folder / "training.json").write_text(json.dumps(content, indent=2) + "\n")


def train(
    out: Path,
    name: str,
    plan: Plan,
    shape: Shape,
    device: torch.device,
    losses: Losses,
    *,
    chats: str = "chats",
    begin: Path | None = None,
) -> None:
    """Every step: draw rows, measure the loss of each source, descend along their mean.

    Its chats are read from `chats`; `begin` is the checkpoint whose weights it starts with. A run
    that has its steps is left as it is.
    """
    torch.manual_seed(plan.seed)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = Llama(shape)
    start(model, shape, [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())])
    if begin is not None:
        model.load_state_dict(checkpoint.weights(load_file(begin)))
    model.to(device)
    optimizers = make_optimizers(model, plan)
    corpora = read_corpora(out, chats)
    validation = Corpus.read(out / "val.safetensors")
    folder = out / name
    folder.mkdir(exist_ok=True)
    saved = folder / "checkpoint.safetensors"
    first = checkpoint.load(saved, model, optimizers) if saved.exists() else 0
    if first >= plan.steps:
        return
    record(folder / "training.json", plan, shape, first)
    begin_log(folder / "loss.csv", first)
    began = time.perf_counter()
    with progress_bar() as progress, (folder / "loss.csv").open("a", newline="") as file:
        log = csv.writer(file)
        task = progress.add_task("", total=plan.steps, completed=first)
        for step in range(first, plan.steps):
            with arithmetic(device):
                parts = losses(model, *batch(corpora, plan, step, device))
            loss = torch.stack(parts) @ torch.tensor(SHARES, device=device)
            descend(model, optimizers, loss, plan, plan.lr(step))
            done = step + 1
            save = done % SAVE_EVERY == 0 or done == plan.steps
            if save:
                checkpoint.save(saved, model, optimizers, done)
            if save or done % LOG_EVERY == 0:
                told = [f"{part.item():.4f}" for part in parts]
                unseen = f"{bits_per_byte(model, validation, tokenizer):.4f}" if save else ""
                seconds = f"{time.perf_counter() - began:.1f}"
                rate = f"{plan.lr(step):.6f}"
                log.writerow((done, done * plan.step_tokens, *told, unseen, rate, seconds))
                file.flush()
                line = ", ".join(map(" ".join, zip(SOURCES, told, strict=True)))
                progress.update(task, completed=done, description=line)
                if save:
                    progress.console.print(f"step {done}: saved, {line}, unseen {unseen} bits/byte")
    finish(folder)


def arguments(
    description: str | None, steps: int, peak_lr: float = PEAK_LR
) -> argparse.ArgumentParser:
    """What training, tuning and distilling are told alike."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder that `data` filled")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--peak-lr", type=float, default=peak_lr)
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def plan_of(args: argparse.Namespace, **rest: Any) -> Plan:
    """The plan that the arguments ask for; `rest` are further fields of it."""
    given = {"step_tokens": args.step_tokens, "peak_lr": args.peak_lr}
    return Plan(**{"steps": args.steps, **given, **rest})


def main() -> None:
    args = arguments(__doc__, steps=4000).parse_args()
    torch.set_num_threads(args.threads)
    plan = plan_of(args, seed=args.seed)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    shape = Shape(vocab_size=tokenizer.get_vocab_size())
    train(args.out, BASE, plan, shape, torch.device(args.device), losses)


if __name__ == "__main__":
    main()
