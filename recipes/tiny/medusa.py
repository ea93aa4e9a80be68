"""Trains Medusa heads for an exported model (Cai et al. 2024, Medusa-1: the model stays as it is).

It is given the exported folder, whose own greedy answers to generated chats it learns to foresee.
It promises `medusa.safetensors` in that folder, which `--speculative-method medusa` reads.
"""

import argparse
import json
import math
import random
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from recipes.tiny.model import Llama, Shape
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headway import LLM, SamplingParams
from headway.compress.train.checkpoint import weights
from headway.compress.train.loop import Training
from headway.compress.train.loop import train as loop
from headway.core.progress import steps_bar
from headway.evals.skills.example import Example
from headway.evals.skills.suite import training_examples
from headway.evals.skills.varied import varied_examples

FILE = "medusa.safetensors"
NUM_HEADS, NUM_LAYERS = 4, 2
DECAY = 0.8
"""What head i + 1 counts in the loss beside head i (the paper's)."""
NOTHING = -100
"""The target behind the end of an answer: not learned."""
VARIED = 0.1
"""The share of chats as frameworks write them; their prompts are the longest."""
MEMORY = 256 * 2**20
MAX_TOKENS = 250
CHUNK_TOKENS = 8192
UNSEEN = 3000
"""Positions of answers that are not learned from, to say how often heads are right."""


class Heads(nn.Module):
    """Head i: residual blocks x + SiLU(linear(x)), then the model's own output matrix."""

    def __init__(self, size: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        for head in self.blocks:
            for linear in head:
                nn.init.zeros_(linear.weight)  # at first each head says what the model says
                nn.init.zeros_(linear.bias)

    def forward(self, x_NC: Tensor) -> list[Tensor]:
        """What each head gives to the output matrix, (N, C)."""
        found = []
        for head in self.blocks:
            y_NC = x_NC
            for linear in head:
                y_NC = y_NC + F.silu(linear(y_NC))
            found.append(y_NC)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Under the names of the reference implementation: head, block, `linear`."""
        return {
            f"{i}.{j}.linear.{name}": value.detach().bfloat16().contiguous()
            for i, head in enumerate(self.blocks)
            for j, linear in enumerate(head)
            for name, value in linear.named_parameters()
        }


def asked(seed: int) -> Iterator[Example]:
    """Endless chats that training may see: those of the skills, some as frameworks write them."""
    rng = random.Random(f"{seed} medusa")
    skills, varied = training_examples(seed), varied_examples(seed)
    while True:
        yield next(varied if rng.random() < VARIED else skills)


def answered(folder: Path, count: int, seed: int) -> Iterator[tuple[list[int], int]]:
    """(tokens of a prompt and its greedy answer, how many are the prompt's)."""
    llm = LLM(folder, kv_memory=MEMORY, threads=1)
    tokenizer = llm.needs_tokenizer()
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    prompts = [tokenizer.chat_ids(example.messages) for example in islice(asked(seed), count)]
    fitting = [ids for ids in prompts if len(ids) + MAX_TOKENS < llm.settings.max_model_len]
    given = [{"prompt_token_ids": ids} for ids in fitting]
    for ids, output in zip(fitting, llm.generate(given, greedy, use_tqdm=False), strict=True):
        yield ids + list(output.outputs[0].token_ids), len(ids)


def targets(tokens: list[int], num_prompt: int, num_heads: int) -> np.ndarray:
    """For each position from the prompt's last on what head 0, 1 … should say.

    >>> targets([7, 8, 1, 2, 3], 2, 2)      behind 8 comes 1, which the model says; head 0: 2
    array([[   2,    3],
           [   3, -100],
           [-100, -100],
           [-100, -100]])
    """
    found = np.full((len(tokens) - num_prompt + 1, num_heads), NOTHING, np.int64)
    for i in range(num_heads):
        later = tokens[num_prompt + 1 + i :]
        found[: len(later), i] = later
    return found


@torch.inference_mode()
def states(model: Llama, rows: list[tuple[list[int], int]]) -> Iterator[Tensor]:
    """For each row the hidden states of the same positions, as the output matrix reads them."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    found: dict[int, Tensor] = {}
    while order:
        longest = len(rows[order[-1]][0])
        chosen = [order.pop() for _ in range(min(len(order), max(1, CHUNK_TOKENS // longest)))]
        tokens = torch.zeros(len(chosen), longest, dtype=torch.long)
        for row, i in enumerate(chosen):
            tokens[row, : len(rows[i][0])] = torch.tensor(rows[i][0])
        hidden = model(tokens).bfloat16()
        for row, i in enumerate(chosen):
            found[i] = hidden[row, rows[i][1] - 1 : len(rows[i][0])].clone()
    return (found[i] for i in range(len(rows)))


def learned(
    model: Llama, rows: list[tuple[list[int], int]], num_heads: int
) -> tuple[Tensor, Tensor]:
    """Hidden states [N, C] and targets [N, heads] of all rows, those positions that have any."""
    x = torch.cat(list(states(model, rows)))
    y = torch.from_numpy(np.concatenate([targets(t, n, num_heads) for t, n in rows]))
    has = y[:, 0] != NOTHING
    return x[has], y[has]


class Foresight:
    """The losses of a step: the mean cross-entropy of each head, fading by head."""

    def __init__(
        self, heads: Heads, output_VC: Tensor, x: Tensor, y: Tensor, batch: int, seed: int
    ) -> None:
        self.heads, self.output_VC, self.x, self.y = heads, output_VC.bfloat16(), x, y
        self._batch, self._rng, self._drawn = batch, torch.Generator().manual_seed(seed), 0

    def __call__(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        chosen = self._draw(step)
        wanted = self.y[chosen]
        losses = [
            F.cross_entropy(
                (out.bfloat16() @ self.output_VC.T).float(), wanted[:, i], ignore_index=NOTHING
            )
            for i, out in enumerate(self.heads(self.x[chosen].float()))
        ]
        faded = sum((DECAY**i * each for i, each in enumerate(losses)), torch.zeros(()))
        return faded, {f"head {i}": each for i, each in enumerate(losses)}

    def _draw(self, step: int) -> Tensor:
        """The positions of this step: draws come one behind the other, those before are skipped."""
        while self._drawn < step:
            self._draw(self._drawn)
        self._drawn = step + 1
        return torch.randint(len(self.x), (self._batch,), generator=self._rng)


def train(
    heads: Heads, output_VC: Tensor, x: Tensor, y: Tensor, args: argparse.Namespace, run: Path
) -> None:
    """AdamW, warm-up and cosine, in the loop of `headway distill`; goes on with the run there."""

    def lr(step: int) -> float:
        wave = 0.05 + 0.95 * (1 + math.cos(math.pi * step / args.steps)) / 2
        return float(args.peak_lr * min(1.0, (step + 1) / 50) * wave)

    training = Training(
        module=heads,
        optimizers=[torch.optim.AdamW(heads.parameters(), lr=args.peak_lr, weight_decay=0.01)],
        steps=args.steps,
        lr=lr,
        losses=Foresight(heads, output_VC, x, y, args.batch, args.seed),
        names=tuple(f"head {i}" for i in range(args.heads)),
        clip=0.0,
        log_every=min(100, args.steps),
    )
    asked = {name: value for name, value in vars(args).items() if name != "threads"}
    asked |= {"model": args.model.name, "positions": len(x)}
    with steps_bar("step", args.steps) as advance:
        loop(
            training,
            run,
            asked,
            lambda done, told: advance(done, " ".join(f"{nats:.3f}" for nats in told.values())),
        )


@torch.inference_mode()
def right(heads: Heads, output_VC: Tensor, x: Tensor, y: Tensor) -> list[float]:
    """How often the likeliest token of each head is the one that came."""
    found = []
    for i, out in enumerate(heads(x.float())):
        has = y[:, i] != NOTHING
        found.append(float(((out[has] @ output_VC.T).argmax(-1) == y[has, i]).float().mean()))
    return found


def load_exported(folder: Path) -> Llama:
    """The exported model, in fp32."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
    model = Llama(shape).eval().requires_grad_(False)
    tensors = weights(load_file(folder / "model.safetensors"))
    model.load_state_dict({name: value.float() for name, value in tensors.items()})
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--answers", type=int, default=6000)
    parser.add_argument("--heads", type=int, default=NUM_HEADS)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="residual blocks of a head")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=1024, help="positions in a step")
    parser.add_argument("--peak-lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_exported(args.model)
    rows = list(answered(args.model, args.answers, args.seed))
    x, y = learned(model, rows, args.heads)
    print(f"{len(rows):,} answers, {len(x):,} positions")
    num_unseen = min(UNSEEN, len(x) // 10)
    heads = Heads(x.shape[1], args.heads, args.layers)
    output_VC = model.embed_tokens.weight
    run = args.model.with_name(f"{args.model.name}.medusa")
    train(heads, output_VC, x[num_unseen:], y[num_unseen:], args, run)
    shares = right(heads, output_VC, x[:num_unseen], y[:num_unseen])
    print("the likeliest is right, unseen answers:", *(f"{share:.3f}" for share in shares))
    facts = {
        "medusa_num_heads": args.heads,
        "medusa_num_layers": args.layers,
        "head": "shared",
        "answers": len(rows),
        "steps": args.steps,
        "right": " ".join(f"{share:.3f}" for share in shares),
    }
    metadata = {name: str(value) for name, value in facts.items()}
    save_file(heads.tensors(), args.model / FILE, metadata=metadata)
    shutil.rmtree(run)


if __name__ == "__main__":
    main()
