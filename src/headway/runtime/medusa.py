"""Medusa heads (Cai et al. 2024): they guess several tokens ahead from one state of the model.

The model said t5 from its last hidden state at t4. From the same state head 0 guesses t6, head 1
t7, and so on: a chain of as many guesses as there are heads, each its head's likeliest token.

    h at t4 ── norm ── the model's output matrix ────────────────▶ t5, drawn
                 ├── blocks of head 0 ── output matrix ── argmax ▶ t6, a guess
                 └── blocks of head 1 ── output matrix ── argmax ▶ t7, a guess

A block is x + SiLU(linear(x)). All heads of all sequences are one product for each block and one
for the output, so two guesses take little more time than one. The heads keep nothing between steps:
the state is that of the row behind which the last token of the sample was drawn.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from headway.core.plan import StepPlan
from headway.core.speculation_config import MedusaSpec
from headway.runtime.batch import WorkerSequence
from headway.runtime.checkpoint import read_tensor, readable
from headway.runtime.checkpoint_files import MEDUSA_FILE
from headway.runtime.drafter import Wanted
from headway.runtime.forward import Forward


class Medusa:
    """The heads of `folder`, which guess from the states of `target`; a `drafter.Drafter`.

    N heads, H hidden size, V vocabulary; R rows.
    """

    name = "Medusa"
    kv_bytes = 0

    def __init__(self, folder: Path, medusa: MedusaSpec, target: Forward) -> None:
        self.model = target.model
        path, like = folder / MEDUSA_FILE, {"dtype": target.dtype, "device": target.settings.device}
        heads = range(medusa.num_heads)
        with readable(path), safe_open(path, framework="pt") as file:

            def stacked(pattern: str) -> Tensor:
                parts = [read_tensor(file, path, f"{head}.{pattern}") for head in heads]
                return torch.stack([part.to(**like) for part in parts])

            self.blocks = [
                (
                    stacked(f"{layer}.linear.weight").transpose(1, 2).contiguous(),
                    stacked(f"{layer}.linear.bias")[:, None],
                )
                for layer in range(medusa.num_layers)
            ]
            self.output_NHV: Tensor | None = None
            if not medusa.shares_head:
                self.output_NHV = stacked(f"{medusa.num_layers}.weight").transpose(1, 2)

    def follow(self, plan: StepPlan) -> None:
        """Nothing is kept for blocks."""

    def cut(self, sequence: WorkerSequence) -> None:
        """Nothing is kept for guesses."""

    def propose(self, wanted: list[Wanted], hidden_RH: Tensor) -> dict[int, list[int]]:
        """The likeliest token of each head, up to `most` heads for each sequence."""
        most = max(each.most for each in wanted)
        found_RN = self.guesses(hidden_RH[[each.row for each in wanted]], most).tolist()
        return {
            each.sequence.new.sequence_id: guesses[: each.most]
            for each, guesses in zip(wanted, found_RN, strict=True)
        }

    def guesses(self, hidden_RH: Tensor, count: int) -> Tensor:
        """What the first `count` heads guess behind these states, (R, N)."""
        x_RH = self.model.norm(hidden_RH)
        x_NRH = x_RH.expand(min(count, len(self.blocks[0][0])), -1, -1)
        num_heads, num_rows, hidden = x_NRH.shape
        for weight_NHH, bias_N1H in self.blocks:
            inner = torch.baddbmm(bias_N1H[:num_heads], x_NRH, weight_NHH[:num_heads])
            x_NRH = x_NRH + functional.silu(inner)
        if self.output_NHV is None:
            logits = self.model.head(x_NRH.reshape(-1, hidden))
        else:
            logits = torch.bmm(x_NRH, self.output_NHV[:num_heads])
        return logits.argmax(-1).view(num_heads, num_rows).T

    @property
    def weight_bytes(self) -> int:
        """What the heads take beside the model's weights."""
        own = [] if self.output_NHV is None else [self.output_NHV]
        return sum(tensor.nbytes for block in [*self.blocks, own] for tensor in block)
