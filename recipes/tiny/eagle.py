"""Trains an EAGLE head for an exported model (Li et al. 2024); the model stays as it is.

It is given the exported folder, whose own greedy answers to generated chats it learns to foresee
state by state. It promises `eagle.safetensors` in that folder, which `--speculative-method eagle`
reads.

    entry p    token p, the model's state at p - 1  →  its state at p, which says token p + 1

The head goes on from states that it guessed itself. So each batch is run `DEPTHS` times, first from
the model's states, then from those of the run before (as HASS and EAGLE-3 do, but for the entries
that it attends to, which are those of the same run).
"""

import argparse
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from recipes.tiny.medusa import answered, load_exported
from recipes.tiny.model import Attention, Llama, Mlp, Shape
from safetensors.torch import save_file
from torch import Tensor, nn

from headway.compress.train.loop import Training
from headway.compress.train.loop import train as loop
from headway.core.progress import steps_bar

FILE = "eagle.safetensors"
DEPTHS, DECAY = 3, 0.8
"""Guesses ahead in a step of training, and what each counts beside the one before."""
LONGEST = 512
"""Longer rows, prompts of frameworks mostly, are left out: attention takes what they teach."""
UNSEEN = 100
"""Answers that are not learned from, to say how often guesses are right."""


class Layer(nn.Module):
    """A layer of Llama without the norm before its attention, as EAGLE's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)


class Eagle(nn.Module):
    """From embeddings and the states before them to the next states; names as published."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        with torch.no_grad():  # at first it says what the model said before
            for last in (self.layers[0].self_attn.o_proj, self.layers[0].mlp.down_proj):
                last.weight.mul_(0.1)
            self.fc.weight.mul_(0.1)[:, size:] += torch.eye(size)

    def forward(self, embedded_BTC: Tensor, before_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTC = self.fc(torch.cat((embedded_BTC, before_BTC), -1)).float()
        for layer in self.layers:
            x_BTC = x_BTC + layer.self_attn(x_BTC, cos, sin)
            x_BTC = x_BTC + layer.mlp(layer.post_attention_layernorm(x_BTC))
        return x_BTC

    def tensors(self) -> dict[str, Tensor]:
        return {n: value.detach().bfloat16().contiguous() for n, value in self.named_parameters()}


def shifted(states_BTC: Tensor) -> Tensor:
    """At each position the state of the one before; zeros at the first."""
    return F.pad(states_BTC, (0, 0, 1, 0))[:, :-1]


Row = tuple[list[int], int]
"""Tokens of a prompt and its answer, how many are the prompt's."""


def batches(rows: list[Row], most_tokens: int) -> list[list[Row]]:
    """Rows of like lengths together, with padding at most so many tokens.

    >>> found = batches([([0] * length, 1) for length in (3, 9, 4)], 9)
    >>> [[len(tokens) for tokens, _ in each] for each in found]
    [[3, 4], [9]]
    """
    found: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row[0])):
        if not found or (len(found[-1]) + 1) * len(row[0]) > most_tokens:
            found.append([])
        found[-1].append(row)
    return found


def padded(rows: list[Row], depth: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens [B, T], the entries whose states are learned [B, T]): those behind an answer's
    tokens, of the first of which the first guess comes, `depth` later where guesses go before."""
    longest = max(len(tokens) for tokens, _ in rows)
    tokens_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    counts_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (tokens, num_prompt) in enumerate(rows):
        tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
        counts_BT[row, num_prompt + depth : len(tokens) - 1] = True
    return tokens_BT, counts_BT


class Foresight:
    """The losses of a step: cross-entropy against the model's distribution, and smooth L1 on its
    states, of each depth."""

    def __init__(self, eagle: Eagle, model: Llama, rows: list[Row], batch: int, seed: int) -> None:
        self.eagle, self.model, self._seed = eagle, model, seed
        self._batches = batches(rows, batch)

    def __call__(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        total, shown = torch.zeros(()), {}
        for depth, (guessed_NC, true_NC) in enumerate(self.states(self._drawn(step), DEPTHS)):
            output_VC = self.model.embed_tokens.weight.bfloat16()
            wanted_NV = (true_NC.bfloat16() @ output_VC.T).float().softmax(-1)
            given_NV = (guessed_NC.bfloat16() @ output_VC.T).float()
            nats, off = F.cross_entropy(given_NV, wanted_NV), F.smooth_l1_loss(guessed_NC, true_NC)
            total = total + DECAY**depth * (nats + off)
            shown |= {f"guess {depth}": nats, f"off {depth}": off}
        return total, shown

    def states(self, rows: list[Row], depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each depth (states as guessed, as the model has them), (N, C), of what is learned."""
        model = self.model
        tokens_BT, _ = padded(rows)
        T = tokens_BT.shape[1]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            true_BTC = model(tokens_BT).float()
        embedded_BTC, states_BTC = model.embed_tokens(tokens_BT), true_BTC
        for depth in range(depths):
            with torch.autocast("cpu", torch.bfloat16):
                before_BTC = shifted(states_BTC)
                states_BTC = self.eagle(embedded_BTC, before_BTC, model.cos[:T], model.sin[:T])
            _, counts_BT = padded(rows, depth)
            yield states_BTC[counts_BT].float(), true_BTC[counts_BT]

    def _drawn(self, step: int) -> list[Row]:
        """All batches once, in an order of their own, then again: by the number of the step."""
        number, at = divmod(step, len(self._batches))
        order = torch.Generator().manual_seed(self._seed + number)
        return self._batches[int(torch.randperm(len(self._batches), generator=order)[at])]


def train(losses: Foresight, args: argparse.Namespace, run: Path) -> None:
    """AdamW, warm-up and cosine, in the loop of `headway distill`; goes on with the run there."""

    def lr(step: int) -> float:
        wave = 0.05 + 0.95 * (1 + math.cos(math.pi * step / args.steps)) / 2
        return float(args.peak_lr * min(1.0, (step + 1) / 50) * wave)

    optimizer = torch.optim.AdamW(losses.eagle.parameters(), lr=args.peak_lr, weight_decay=0.01)
    training = Training(
        module=losses.eagle,
        optimizers=[optimizer],
        steps=args.steps,
        lr=lr,
        losses=losses,
        names=tuple(f"{what} {depth}" for depth in range(DEPTHS) for what in ("guess", "off")),
        log_every=min(50, args.steps),
    )
    asked = {name: value for name, value in vars(args).items() if name != "threads"}
    asked["model"] = args.model.name
    with steps_bar("step", args.steps) as advance:
        loop(
            training,
            run,
            asked,
            lambda done, told: advance(done, " ".join(f"{value:.3f}" for value in told.values())),
        )


@torch.inference_mode()
def right(losses: Foresight, rows: list[Row], depths: int = 4) -> list[float]:
    """How often the likeliest token behind each depth is the model's own likeliest."""
    hits, counts = [0] * depths, [0] * depths
    output_VC = losses.model.embed_tokens.weight
    for batch in batches(rows, LONGEST):
        for depth, (guessed_NC, true_NC) in enumerate(losses.states(batch, depths)):
            same_N = (guessed_NC @ output_VC.T).argmax(-1) == (true_NC @ output_VC.T).argmax(-1)
            hits[depth] += int(same_N.sum())
            counts[depth] += len(same_N)
    return [hit / max(count, 1) for hit, count in zip(hits, counts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--answers", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a step, with padding")
    parser.add_argument("--peak-lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = load_exported(args.model)
    rows = list(answered(args.model, args.answers, args.seed))
    fitting = [row for row in rows if row[1] + 2 < len(row[0]) <= LONGEST]
    print(f"{len(rows):,} answers, {len(fitting):,} of them of up to {LONGEST} tokens")
    num_unseen = min(UNSEEN, len(fitting) // 10)
    unseen, seen = fitting[:num_unseen], fitting[num_unseen:]
    losses = Foresight(Eagle(model.shape), model, seen, args.batch, args.seed)
    run = args.model.with_name(f"{args.model.name}.eagle")
    train(losses, args, run)
    shares = " ".join(f"{share:.3f}" for share in right(losses, unseen))
    print("the likeliest is the model's, unseen answers, by depth:", shares)
    facts = {"answers": len(rows), "steps": args.steps, "right": shares}
    metadata = {name: str(value) for name, value in facts.items()}
    save_file(losses.eagle.tensors(), args.model / FILE, metadata=metadata)
    shutil.rmtree(run)


if __name__ == "__main__":
    main()
