"""A model that is read layer by layer and runs on whole rows of tokens, without a KV cache.

It computes the inputs of every layer in fp32. In memory are the hidden states of all rows and the
weights of one layer.

T tokens of all rows, H hidden size, N query heads, G KV heads, D head size.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from headway.core.errors import CheckpointError, UnsupportedModelError
from headway.runtime.attention import AttentionRule, KVLayer
from headway.runtime.attention.sdpa import masked_attention
from headway.runtime.batch import Batch
from headway.runtime.checkpoint import fill
from headway.runtime.checkpoint_files import find_files
from headway.runtime.experts import ExpertLinear
from headway.runtime.kernels import Kernels, onednn, reference
from headway.runtime.kernels.table import PlainLinear
from headway.runtime.layers import Build, Linear, RMSNorm, Step
from headway.runtime.models import MODELS
from headway.runtime.models.decoder import Architecture
from headway.runtime.rope import RopeTable
from headway.runtime.tensor_files import check_finite, readable
from headway.spec import ModelSpec, read_model_spec

TOKENS_AT_ONCE = 2048
"""Tokens that go through a layer together: an MLP of 4,864 needs 80 MB for them."""
EMBEDDING, NORM, HEAD_NAME = "model.embed_tokens.weight", "model.norm.weight", "lm_head"
HEAD = f"{HEAD_NAME}.weight"


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias in fp32, by oneDNN if available: 154 GFLOP/s, MKL 88."""
    linear = onednn.gemm if onednn.available() else reference.linear
    return linear(x_TI, weight_OI, bias_O)


class RowAttention:
    """Attention backend in which each row of a batch attends to itself only, from its first
    token."""

    name = "rows"
    kv_layer: type[KVLayer] = KVLayer

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        layer: KVLayer,
        batch: Batch,
        rule: AttentionRule,
    ) -> Tensor:
        assert k_TGD is not None and v_TGD is not None, "see check_trainable_attention"
        lens = batch.query_lens
        parts = zip(q_TND.split(lens), k_TGD.split(lens), v_TGD.split(lens), strict=True)
        return torch.cat([attend_row(q, k, v, rule) for q, k, v in parts])


def attend_row(q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, rule: AttentionRule) -> Tensor:
    """Compute causal attention within one row, (T, N, D)."""
    tokens, heads, _ = q_TND.shape
    group = heads // k_TGD.shape[1]
    q = q_TND.unflatten(1, (-1, group)).permute(1, 2, 0, 3)
    k, v = (x.permute(1, 0, 2)[:, None].expand(-1, group, -1, -1) for x in (k_TGD, v_TGD))
    mask = None
    if rule.softcap or 0 < rule.window < tokens:
        at = torch.arange(tokens)
        mask = at[None, :] <= at[:, None]
        if rule.window:
            mask &= at[None, :] > at[:, None] - rule.window
    attended = masked_attention(q, k, v, mask, rule)
    return attended.permute(2, 0, 1, 3).reshape(q_TND.shape)


class Tensors:
    """The tensors of a folder by name, read on access."""

    own_head = False
    """Whether a tied model gets a separate head, as after a rotation."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in find_files(folder):
            with readable(path), safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    self._files[name] = path
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape without reading the tensor."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Return the tensor as stored; raises CheckpointError if it is missing."""
        path = self._files.get(name)
        if path is None:
            raise CheckpointError(f"The checkpoint has no {name}.", "Copy the folder again.")
        with readable(path), safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        check_finite(name, tensor)
        return tensor


class RowModel:
    """The model of a folder, computed in fp32 on whole rows, one layer at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spec = folder, read_model_spec(folder)
        check_trainable_attention(self.spec)
        if self.spec.quantization:
            raise UnsupportedModelError(
                f"config.json says that the folder is quantized already ({self.spec.quantization}) "
                "and matrices are rounded once.",
                "Give the folder of the same model in 16 or 32 bits.",
            )
        self.tensors = Tensors(folder)
        self.architecture: Architecture = MODELS[self.spec.architecture]
        self._build = Build(
            spec=self.spec,
            kernels=Kernels(linear=PlainLinear(product)),
            attention=RowAttention(),
            dtype=torch.float32,
            device="cpu",
        )

    def embed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the input of the first layer, fp32 (T, H)."""
        table_VH = self.tensors.read(EMBEDDING)
        x_TH = table_VH[torch.tensor([token for row in rows for token in row])].float()
        return x_TH * self.spec.embedding_scale

    @property
    def dtype(self) -> torch.dtype:
        """The type of the checkpoint."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    def skeleton(self, index: int) -> nn.Module:
        """Return layer `index` without weights; no memory is touched."""
        return self.architecture.layer(self._build, index)

    def layer(self, index: int) -> nn.Module:
        """Return layer `index` with its weights."""
        layer = self.skeleton(index)
        for name, place in layer_places(layer, self.architecture, self.spec, index).items():
            fill(name, place, self.tensors.read(name))
        for module in layer.modules():
            if isinstance(module, Linear | ExpertLinear):
                module.prepare()
        return layer

    def norm(self) -> RMSNorm:
        """Return the norm before the head."""
        norm = RMSNorm(self._build)
        fill(NORM, norm.weight, self.tensors.read(NORM))
        return norm

    def head(self) -> Linear:
        """Return the head; of a tied model it is the embedding."""
        head = Linear(self._build, self.spec.hidden_size, self.spec.vocab_size)
        assert head.weight is not None
        fill(HEAD, head.weight, self.tensors.read(self.head_name))
        head.prepare()
        return head

    @property
    def head_name(self) -> str:
        """Name of the head's tensor."""
        return EMBEDDING if self.spec.tied and not self.tensors.own_head else HEAD

    def run(self, layer: nn.Module, x_TH: Tensor, lens: Sequence[int]) -> Tensor:
        """Run `layer` on all rows, (T, H), up to TOKENS_AT_ONCE tokens at a time."""
        with torch.no_grad():
            return self.forward(layer, x_TH, lens)

    def forward(self, layer: nn.Module, x_TH: Tensor, lens: Sequence[int]) -> Tensor:
        """Run `layer` as `run` does, with gradients if they are enabled."""
        out = []
        longest = max(lens, default=0)
        ropes = [RopeTable(rope, self.spec.rope_dim, longest, "cpu") for rope in self.spec.ropes]
        kv: Any = [None] * self.spec.num_layers
        for chosen, part_TH in portions(x_TH, lens):
            batch = batch_of(chosen)
            angles = [rope.at(batch.positions_T) for rope in ropes]
            out.append(layer(part_TH, Step(batch=batch, kv=kv, angles=angles)))
        return torch.cat(out) if out else x_TH

    def logits(self, norm: RMSNorm, head: Linear, x_TH: Tensor) -> Tensor:
        """Return fp32 logits (T, V), scaled and capped as the family does."""
        with torch.no_grad():
            return self.scaled(head(norm(x_TH)))

    def scaled(self, logits_TV: Tensor) -> Tensor:
        """Apply the family's scale and cap to the head's output."""
        logits_TV = logits_TV * self.spec.logits_scale
        cap = self.spec.logits_softcap
        return cap * torch.tanh(logits_TV / cap) if cap else logits_TV


def check_trainable_attention(spec: ModelSpec) -> None:
    """Raise UnsupportedModelError for attention that cannot be computed on whole rows."""
    if spec.altup is not None:
        raise UnsupportedModelError(
            f"{spec.architecture} has several streams: it is served, and neither quantized, pruned "
            "nor trained here.",
            "Give a model of another family, or serve it with --quantization.",
        )
    if spec.states is not None:
        raise UnsupportedModelError(
            f"{spec.architecture} keeps states of sequences: it is served, and neither quantized, "
            "pruned nor trained here.",
            "Give a model of another family, or serve it with --quantization.",
        )
    if spec.latent is not None:
        raise UnsupportedModelError(
            f"{spec.architecture} has latent attention: it is served, and neither quantized nor "
            "trained here.",
            "Give a model of another family, or serve it with --quantization.",
        )
    if spec.experts is not None and spec.experts.shared:
        raise UnsupportedModelError(
            f"{spec.architecture} has experts that every token visits: it is served, and neither "
            "quantized nor trained here.",
            "Give a model of another family, or serve it with --quantization.",
        )
    if spec.sink_logits:
        raise UnsupportedModelError(
            f"{spec.architecture} has sink logits and stacked experts: it is served, and neither "
            "quantized nor trained here.",
            "Give a model of another family.",
        )


def portions(x_TH: Tensor, lens: Sequence[int]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield (lengths of some rows, their tokens), up to TOKENS_AT_ONCE tokens or one row."""
    begin = 0
    chosen: list[int] = []
    for length in [*lens, None]:
        if chosen and (length is None or sum(chosen) + length > TOKENS_AT_ONCE):
            yield chosen, x_TH[begin : begin + sum(chosen)]
            begin, chosen = begin + sum(chosen), []
        if length is not None:
            chosen.append(length)


def batch_of(lens: list[int]) -> Batch:
    """Return a batch of rows that all begin at position 0, without KV blocks."""
    return Batch(
        token_ids_T=torch.empty(0, dtype=torch.int64),
        positions_T=torch.cat([torch.arange(length) for length in lens]),
        slots_GT=[],
        block_tables_GSB=[],
        query_lens=lens,
        context_lens=lens,
        num_decodes=0,
        sampled_rows=[],
        sampled_sequences=[],
    )


def layer_places(
    layer: nn.Module, architecture: Architecture, spec: ModelSpec, index: int
) -> dict[str, Tensor]:
    """Return checkpoint name → the part of a weight of `layer` that it fills."""
    places = {}
    parameters = dict(layer.named_parameters())
    for pattern, (module, part) in architecture.weights.items():
        if "{i}" not in pattern:
            continue
        own = module.format(i=index).removeprefix(f"layers.{index}.")
        for suffix in (".weight", ".bias"):
            parameter = parameters.get(own + suffix)
            sparse = "{e}" in pattern
            if parameter is None or sparse != (parameter.dim() == 3):
                continue
            for e in range(len(parameter) if sparse else 1):
                place = parameter.data[e] if sparse else parameter.data
                rows = place.narrow(0, *rows_of(part, place, spec)) if part else place
                places[pattern.format(i=index, e=e) + suffix] = rows
    return places


def rows_of(part: str, place: Tensor, spec: ModelSpec) -> tuple[int, int]:
    """Return (first row, number of rows) of a part of a fused matrix."""
    q, kv, inner = spec.q_size, spec.kv_size, place.shape[0] // 2
    ranges = {
        "q": (0, q),
        "k": (q, kv),
        "v": (q + kv, kv),
        "gate": (0, inner),
        "up": (inner, inner),
    }
    return ranges[part]
