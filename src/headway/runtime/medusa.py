"""Medusa heads (Cai et al. 2024): several draft tokens from one state of the model.

The model drew t5 from its last hidden state at t4. From the same state head 0 drafts t6, head 1 t7,
and so on: a chain of one draft token for each head, the likeliest of that head.

    h at t4 ── norm ── the model's output matrix ────────────────▶ t5, drawn
                 ├── blocks of head 0 ── output matrix ── argmax ▶ t6, a draft
                 └── blocks of head 1 ── output matrix ── argmax ▶ t7, a draft

A block is x + SiLU(linear(x)). The matrices have the format of the model's output matrix, and
where heads share that, all of them multiply one list of tokens (`DraftVocabulary`) at once. The
heads store nothing between steps: they read the state from which the last token was drawn.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from headway.config.speculation_config import MedusaSpec
from headway.core.plan import StepPlan
from headway.runtime.batch import Batch, WorkerSequence
from headway.runtime.checkpoint import read_tensor
from headway.runtime.checkpoint_files import MEDUSA_FILE
from headway.runtime.draft_vocabulary import DraftVocabulary
from headway.runtime.drafter import DraftRequest
from headway.runtime.forward import Forward
from headway.runtime.shared_weights import SharedWeights
from headway.runtime.sharing import shared_matrices
from headway.runtime.tensor_files import readable


class Medusa:
    """The heads of `folder`, which draft from the states of `target`; a `drafter.Drafter`.

    N heads, H hidden size, V vocabulary; R rows.
    """

    name = "Medusa"
    kv_bytes = 0

    def __init__(
        self,
        folder: Path,
        medusa: MedusaSpec,
        target: Forward,
        shared: SharedWeights | None = None,
    ) -> None:
        self.model = target.model
        self._kernel = target.kernels.drafter_linear
        size = target.settings.speculation.draft_vocab_size
        self.vocabulary = DraftVocabulary(target, size) if size else None
        path, like = folder / MEDUSA_FILE, {"dtype": target.dtype, "device": target.settings.device}
        num_layers, num_heads, hidden = medusa.num_layers, medusa.num_heads, target.spec.hidden_size
        layers = [(f"{h}.{i}.linear", hidden) for h in range(num_heads) for i in range(num_layers)]
        outputs = [(f"{head}.{num_layers}", target.spec.vocab_size) for head in range(num_heads)]
        outputs = [] if medusa.shares_head else outputs
        with readable(path), safe_open(path, framework="pt") as file:

            def read(name: str) -> Tensor:
                return read_tensor(file, path, name).to(**like)

            sizes = {name: (rows, hidden) for name, rows in layers + outputs}
            packed = shared_matrices(
                self._kernel, sizes, lambda name: read(f"{name}.weight"), shared
            )
            blocks = [(packed[name], read(f"{name}.bias")) for name, _ in layers]
        self.heads = [blocks[i : i + num_layers] for i in range(0, len(blocks), num_layers)]
        self.outputs = [packed[name] for name, _ in outputs]

    def apply_plan(self, plan: StepPlan) -> None:
        """Add the tokens of new prompts to the draft vocabulary."""
        if self.vocabulary is not None:
            for sequence in plan.new:
                self.vocabulary.add(sequence.token_ids)

    def observe(self, batch: Batch, hidden_TH: Tensor) -> None:
        """Store nothing: `propose` gets the states that it needs."""

    def discard_rejected(self, sequence: WorkerSequence) -> None:
        """Add the last tokens of the answer to the draft vocabulary."""
        if self.vocabulary is not None:
            self.vocabulary.add_answer(sequence)

    def propose(self, requests: list[DraftRequest], hidden_RH: Tensor) -> dict[int, list[int]]:
        """Return the likeliest token of each head, up to `max_drafts` heads for each sequence."""
        if self.vocabulary is not None:
            self.vocabulary.refresh()
        num_heads = max(each.max_drafts for each in requests)
        drafts_RN = self.draft(hidden_RH[[each.row for each in requests]], num_heads)
        return {
            each.sequence.new.sequence_id: draft[: each.max_drafts]
            for each, draft in zip(requests, drafts_RN, strict=True)
        }

    def draft(self, hidden_RH: Tensor, count: int) -> list[list[int]]:
        """Return the draft tokens of the first `count` heads for each of these states."""
        x_RH = self.model.norm(hidden_RH)
        states_NRH = [self._state(x_RH, blocks) for blocks in self.heads[:count]]
        if self.outputs:
            logits = [
                self._kernel(state_RH.float(), output, None)
                for state_RH, output in zip(states_NRH, self.outputs, strict=False)
            ]
            return torch.stack(logits, 1).argmax(-1).tolist()
        states = torch.stack(states_NRH, 1).flatten(0, 1).float()
        if self.vocabulary is None:
            token_ids = self.model.head(states).argmax(-1).tolist()
        else:
            logits_RL = self.vocabulary.multiply(states)
            token_ids = self.vocabulary.token_ids(logits_RL.argmax(-1).tolist())
        width = len(states_NRH)
        return [token_ids[at : at + width] for at in range(0, len(token_ids), width)]

    def _state(self, x_RH: Tensor, blocks: list[tuple[Any, Tensor]]) -> Tensor:
        """Return the input of the output matrix of one head."""
        for weight, bias_H in blocks:
            x_RH = x_RH + functional.silu(self._kernel(x_RH, weight, bias_H))
        return x_RH

    @property
    def weight_bytes(self) -> int:
        """Bytes of the heads, in addition to the model's weights."""
        blocks = [part for head in self.heads for block in head for part in block]
        list_bytes = 0 if self.vocabulary is None else self.vocabulary.nbytes
        return list_bytes + sum(part.nbytes for part in (*blocks, *self.outputs))
