"""One model on one device: its weights, its KV memory, and a batch's way through it.

Where every operation is native, the layers are one call and the head is another.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.core.errors import CapacityError
from headway.core.model_spec import ModelSpec
from headway.core.resolve import Settings
from headway.runtime.attention import (
    AttentionBackend,
    KVLayer,
    NativeAttention,
    NativeKVLayer,
    allocate_kv,
    choose_attention,
)
from headway.runtime.attention.int4 import allocate_int4, memory_of
from headway.runtime.batch import Batch
from headway.runtime.checkpoint import Progress
from headway.runtime.kernels import Kernels
from headway.runtime.layers import Build, Linear, Step
from headway.runtime.loading import load_model
from headway.runtime.models import MODELS, Decoder
from headway.runtime.native.fp8 import PackedFp8
from headway.runtime.native.linear import PackedWeight
from headway.runtime.native.lower import lower
from headway.runtime.native.program import Program
from headway.runtime.native.quantized import PackedLevels
from headway.runtime.rope import RopeTable
from headway.runtime.weight_cache import Lookup


class Forward:
    """The model of `folder`, with `num_blocks` KV blocks for each of its groups."""

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        settings: Settings,
        kernels: Kernels,
        num_blocks: tuple[int, ...],
        progress: Progress | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        self.spec, self.settings, self.kernels = spec, settings, kernels
        self.dtype, device = getattr(torch, settings.dtype), settings.device
        attention, self.attention = choose_attention(settings, kernels.library)
        build = Build(
            spec=spec, kernels=kernels, attention=attention, dtype=self.dtype, device=device
        )
        self.model = Decoder(build, MODELS[spec.architecture])
        self.linears = load_model(self.model, spec, settings, kernels, folder, progress, lookup)
        try:
            self.ropes = [
                RopeTable(rope, spec.head_dim, settings.max_model_len, device)
                for rope in spec.ropes
            ]
            self.kv = self._allocate(num_blocks, attention)
        except (RuntimeError, OSError) as error:  # torch's out-of-memory is one, ENOMEM another
            raise CapacityError(
                f"KV cache and rope tables could not be allocated: {str(error)[:200]}.",
                "Lower --kv-memory or --max-model-len.",
            ) from error
        self.program, self.head, self.lowered = self._lower(isinstance(attention, NativeAttention))
        self.experts_read = 0
        """Of the last forward; 0 for a dense model."""

    def _allocate(self, num_blocks: tuple[int, ...], attention: AttentionBackend) -> list[KVLayer]:
        """The KV memory of all layers, in the resolved format."""
        cache, groups = self.settings.cache, self.spec.kv_groups
        if cache.open_blocks:
            kind = NativeKVLayer if isinstance(attention, NativeAttention) else KVLayer
            return allocate_int4(groups, num_blocks, cache.block_size, self.dtype, kind)
        dtype = torch.int8 if cache.dtype == "int8" else self.dtype
        device, kind = self.settings.device, attention.kv_layer
        return allocate_kv(groups, num_blocks, cache.block_size, dtype, device, kind)

    def _lower(self, attends: bool) -> tuple[Program | None, Program | None, str]:
        """(the model's forward as one native call, its head as another, why).

        None where not all is native.
        """
        library = self.kernels.library
        if library is None or not attends:
            return None, None, "each operation called from Python, as not all are native"
        unknown: Any = None
        angles = [(rope.cos, rope.sin) for rope in self.ropes]
        step = Step(batch=unknown, kv=self.kv, angles=angles)
        program, why = lower(lambda token_ids: self.model(token_ids, step), library, self.dtype)
        head, _ = lower(self.model.logits, library, self.dtype, given=self.spec.hidden_size)
        if program is not None:
            why += ", the head in another" if head is not None else ", the head from Python"
        return program, head, why

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states of all tokens of `batch`, (T, H); valid until the next forward."""
        if self.program is not None:
            return self.program(batch)
        angles = [rope.at(batch.positions_T) for rope in self.ropes]
        step = Step(batch=batch, kv=self.kv, angles=angles)
        hidden_TH: Tensor = self.model(batch.token_ids_T, step)
        self.experts_read = step.experts_read
        return hidden_TH

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """`Decoder.logits` of these rows, dense in memory; valid until the next call."""
        return self.model.logits(hidden_RH) if self.head is None else self.head.over(hidden_RH)

    def wipe_bad(self, hidden_TH: Tensor, batch: Batch) -> Tensor | None:
        """Which of the tokens are not finite, (T,), after what they wrote is zeros; None: none."""
        return wipe_bad(self.kernels, memory_of(self.kv), hidden_TH, batch)

    @property
    def weights(self) -> list[Tensor]:
        """All its weights, as they are and as they are packed."""
        weights = [parameter.detach() for parameter in self.model.parameters()]
        packed = [one for m in self.linears if isinstance(m, Linear) for one in m.matrices]
        kinds = PackedWeight | PackedLevels | PackedFp8
        return weights + [w.panels for w in packed if isinstance(w, kinds)]

    @property
    def weight_bytes(self) -> int:
        """What they take."""
        plain = sum(p.nbytes for p in self.model.parameters())
        return plain + sum(m.prepared_bytes for m in self.linears)

    @property
    def kv_bytes(self) -> int:
        """What its KV memory takes."""
        return sum(part.nbytes for layer in memory_of(self.kv) for part in layer.parts)


def wipe_bad(kernels: Kernels, kv: list[KVLayer], hidden_TH: Tensor, batch: Batch) -> Tensor | None:
    """Which of the tokens are not finite, (T,), after what they wrote into `kv` is zeros.

    A token attends to itself, so a key or value that is not finite shows in its own hidden state.
    Left in a block, it would reach the next owner's sums as 0 · inf.
    """
    if kernels.are_finite(hidden_TH):
        return None
    bad_T = ~torch.isfinite(hidden_TH).all(-1)
    for layer in kv:
        layer.wipe(batch.slots_GT[layer.group][bad_T])
    return bad_T
