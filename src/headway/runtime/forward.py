"""One model on one device: its weights, its KV memory, and the forward of a batch.

Where every operation is native, the layers are one native call and the head is another.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from headway.config.parallel import cut_of
from headway.config.resolve import Settings
from headway.core.errors import CapacityError
from headway.runtime.attention import (
    AttentionBackend,
    KVLayer,
    NativeAttention,
    NativeKVLayer,
    allocate_kv,
    choose_attention,
)
from headway.runtime.attention.int4 import allocate_int4, with_open_layers
from headway.runtime.batch import Batch
from headway.runtime.checkpoint import Progress
from headway.runtime.experts import SparseMLP
from headway.runtime.kernels import Kernels
from headway.runtime.layers import Build, Linear, Step
from headway.runtime.loading import load_model
from headway.runtime.models import MODELS, Decoder
from headway.runtime.native.fp8 import PackedFp8
from headway.runtime.native.linear import PackedWeight
from headway.runtime.native.lower import lower
from headway.runtime.native.program import Program
from headway.runtime.native.quantized import PackedLevels
from headway.runtime.parallel.group import RankGroup, RankGroups, SingleRank
from headway.runtime.parallel.halves import run_attention_half, run_mlp_half
from headway.runtime.parallel.rows import partition_rows
from headway.runtime.parallel.shard import Shard
from headway.runtime.parallel.stage import Half, Stage
from headway.runtime.rope import RopeTable, rope_rows
from headway.runtime.shared_weights import SharedWeights
from headway.runtime.states import allocate_states
from headway.runtime.weight_cache import Lookup
from headway.spec import ModelSpec
from headway.spec.kv_format import kv_format


class Forward:
    """The model of `folder`, with `num_blocks` KV blocks for each of its groups.

    With `groups` of ranks, or as a `stage`, it is this rank's part of the model `spec`.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        settings: Settings,
        kernels: Kernels,
        num_blocks: tuple[int, ...],
        progress: Progress | None = None,
        lookup: Lookup | None = None,
        groups: RankGroups = (None, None),
        stage: Stage | None = None,
        shared: SharedWeights | None = None,
    ) -> None:
        group, holders = groups[0] or SingleRank(), groups[1]
        self.stage, self.group, self.holders = stage or Stage(), group, holders
        cut = cut_of(spec, settings.parallel, group.rank, settings.quantization.unit)
        shard = Shard(spec, cut, group.rank, group.size)
        self.spec = spec = cut.part_of(spec) if group.size > 1 else spec
        self.settings, self.kernels = settings, kernels
        self.dtype, device = getattr(torch, settings.dtype), settings.device
        attention, self.attention = choose_attention(settings, kernels.library, holders)
        build = Build(
            spec=spec,
            kernels=kernels,
            attention=attention,
            dtype=self.dtype,
            device=device,
            parallel=settings.parallel,
            cut=cut,
            group=group,
            stage=self.stage,
        )
        architecture = MODELS[spec.architecture]
        self.model = (architecture.decoder or Decoder)(build, architecture)
        self.linears = load_model(
            self.model, spec, settings, kernels, folder, progress, lookup, shard, shared
        )
        try:
            rows = rope_rows(settings)
            self.ropes = [
                RopeTable(rope, spec.rope_dim, settings.max_model_len, device, rows)
                for rope in spec.ropes
            ]
            self.kv = self._allocate(num_blocks, attention)
        except (RuntimeError, OSError) as error:  # torch's out-of-memory is one, ENOMEM another
            raise CapacityError(
                f"KV cache and rope tables could not be allocated: {str(error)[:200]}.",
                "Lower --kv-memory or --max-model-len.",
            ) from error
        attends = isinstance(attention, NativeAttention)
        self.program, self.head, self.lowered = self._lower(attends, group)
        self.experts_read: int | Tensor = 0
        """Experts read by the last forward; 0 for a dense model."""

    def _allocate(self, num_blocks: tuple[int, ...], attention: AttentionBackend) -> list[KVLayer]:
        """Return the KV memory of all layers, in the resolved format."""
        if self.stage.half is not None and self.stage.half.has_mlps:
            return []
        cache, own = self.settings.cache, self.stage.layers(self.spec.num_layers)
        groups = tuple(
            replace(group, layers=tuple(layer for layer in group.layers if layer in own))
            for group in self.spec.kv_groups
        )
        if cache.open_blocks:
            kind = NativeKVLayer if isinstance(attention, NativeAttention) else KVLayer
            return allocate_int4(groups, num_blocks, kv_format(cache.dtype), self.dtype, kind)
        dtype = torch.int8 if cache.dtype == "int8" else self.dtype
        device, kind = self.settings.device, attention.kv_layer
        if cache.ranks > 1:
            assert self.holders is not None
            at = self.holders.rank
            held = allocate_kv(
                groups, num_blocks[at : at + 1], cache.block_size, dtype, device, kind
            )
            for one in held:
                one.group = at
            return held
        if not cache.state_every:
            return allocate_kv(groups, num_blocks, cache.block_size, dtype, device, kind)
        last, size = len(groups) - 1, cache.block_size
        layers = allocate_states(groups[-1], last, num_blocks[-1], size, device)
        attending = sorted(layer for group in groups[:-1] for layer in group.layers)
        kv = allocate_kv(groups[:-1], num_blocks[:-1], size, dtype, device, kind)
        layers |= zip(attending, kv, strict=True)
        return [layers[layer] for layer in sorted(layers)]

    def _lower(self, attends: bool, group: RankGroup) -> tuple[Program | None, Program | None, str]:
        """Return (the forward as one native call, the head as another, the reason).

        A call is None where not all of its operations are native.
        """
        library = self.kernels.library
        half = self.stage.half
        if half is not None and half.has_mlps:
            return None, None, "the MLPs of all layers, for the rank that has attention"
        if library is None or not attends:
            return None, None, "each operation called from Python, as not all are native"
        unknown: Any = None
        angles = [(rope.cos, rope.sin) for rope in self.ropes]
        step = Step(batch=unknown, kv=self.kv_by_layer, angles=angles)
        width = self.spec.hidden_size
        if group.size > 1:
            program, why = lower(
                lambda x: self.model.run_layers(x, step), library, self.dtype, width
            )
            return program, None, f"{why}, embedding, sums and head from Python"
        given = 0 if self.stage.is_first else width
        program, why = lower(lambda x: self.model(x, step), library, self.dtype, given)
        head = None
        if self.stage.is_last:
            head, _ = lower(self.model.logits, library, self.dtype, given=width)
        if program is not None:
            why += ", the head in another" if head is not None else ", the head from Python"
        return program, head, why

    def __call__(self, batch: Batch) -> Tensor:
        """Return the hidden states of all tokens of `batch`, (T, H); valid until the next forward.

        A pipeline stage returns the states behind its own layers, after the next stage received
        them.
        """
        if self.holders is not None:
            return self._forward_split_context(batch, self.holders)
        half = self.stage.half
        if half is not None and half.has_mlps:
            return self._serve_mlps(batch, half)
        if half is not None:
            return run_attention_half(half, lambda: self._run_layers(batch, None))
        return self._run_stage(batch)

    @property
    def kv_by_layer(self) -> list[KVLayer]:
        """`kv` by layer of the model; layers before the stage's own are absent."""
        absent: Any = None
        return [absent] * self.stage.layers(self.spec.num_layers).start + self.kv

    def _run_stage(self, batch: Batch) -> Tensor:
        """Run the own layers on the rows of the previous stage, and send the result to the next."""
        if self.stage.count == 1:
            return self._run_layers(batch, None)
        shape = len(batch.token_ids_T), self.spec.hidden_size
        return self.stage.run(shape, self.dtype, lambda given_TH: self._run_layers(batch, given_TH))

    def _run_layers(self, batch: Batch, given_TH: Tensor | None) -> Tensor:
        """Run the layers of this stage on the tokens, or on the rows of the previous stage."""
        for rope in self.ropes:
            rope.fill(batch.rope_prompt)
        if self.program is not None:
            if self.group.size > 1 and self.stage.is_first:
                given_TH = self.model.embed(batch.token_ids_T)
            return self.program(batch, given_TH)
        angles = [rope.at(batch.rope_rows) for rope in self.ropes]
        step = Step(batch=batch, kv=self.kv_by_layer, angles=angles)
        given = batch.token_ids_T if given_TH is None else given_TH
        hidden_TH: Tensor = self.model(given, step)
        self.experts_read = step.experts_read
        return hidden_TH

    def _forward_split_context(self, batch: Batch, holders: RankGroup) -> Tensor:
        """Run the rows of this rank, and return those of all ranks.

        Where another stage draws, the other ranks' rows are zeros. An error of one rank does not
        reach the others.
        """
        partition = partition_rows(batch, holders)
        try:
            rows_TH = self._run_stage(partition.own)
            if self.stage.is_last:
                return partition.gather(rows_TH)
            return partition.scatter_own(rows_TH)
        except Exception:
            holders.leave()
            self.group.leave()
            raise

    def _serve_mlps(self, batch: Batch, half: Half) -> Tensor:
        """Compute the MLPs for the rank that has attention; returns one row of zeros."""
        step = Step(batch=batch, kv=[], angles=[])
        shape = len(batch.token_ids_T), self.spec.hidden_size
        mlps = [
            partial(layer.mlp, step=step) if isinstance(layer.mlp, SparseMLP) else layer.mlp
            for layer in cast(Iterable[Any], self.model.layers)
        ]
        run_mlp_half(half, mlps, torch.empty(shape, dtype=self.dtype))
        self.experts_read = step.experts_read
        return torch.zeros(1, shape[1], dtype=self.dtype)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return `Decoder.logits` of these rows, dense in memory; valid until the next call."""
        return self.model.logits(hidden_RH) if self.head is None else self.head.run_rows(hidden_RH)

    def wipe_bad(self, hidden_TH: Tensor, batch: Batch) -> Tensor | None:
        """Clear the KV of tokens that are not finite; return which they are, (T,), or None."""
        return wipe_bad(self.kernels, with_open_layers(self.kv), hidden_TH, batch)

    @property
    def weights(self) -> list[Tensor]:
        """All weights, plain and packed."""
        weights = [parameter.detach() for parameter in self.model.parameters()]
        packed = [one for m in self.linears if isinstance(m, Linear) for one in m.matrices]
        kinds = PackedWeight | PackedLevels | PackedFp8
        return weights + [w.panels for w in packed if isinstance(w, kinds)]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        plain = sum(p.nbytes for p in self.model.parameters())
        return plain + sum(m.prepared_bytes for m in self.linears)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV memory."""
        return sum(part.nbytes for layer in with_open_layers(self.kv) for part in layer.parts)


def wipe_bad(kernels: Kernels, kv: list[KVLayer], hidden_TH: Tensor, batch: Batch) -> Tensor | None:
    """Set what tokens that are not finite wrote into `kv` to zero; return which they are, (T,).

    None: all are finite. A token attends to itself, so a key or value that is not finite shows in
    its own hidden state. In a block it would reach the sums of the block's next owner as 0 · inf.
    """
    if kernels.are_finite(hidden_TH):
        return None
    bad_T = ~torch.isfinite(hidden_TH).all(-1)
    for layer in kv:
        layer.wipe(batch.slots_GT[layer.group][bad_T])
    return bad_T
