"""A folder's model with gradients: the layers that serve it, over whole rows of tokens.

The runtime's own model files are the architecture, so every family that is served can be trained.
Three things differ: linear layers multiply in fp32 and may round what they read (`fake.py`),
attention sees rows instead of pages, and weights have gradients.

B rows, T tokens of a row, N query heads, G KV heads, D head size, V vocabulary.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.compress.rows import refuse_unread
from headway.core.errors import UnsupportedModelError
from headway.runtime.attention import AttentionRule
from headway.runtime.checkpoint import Rounded, checkpoint_formats, load_weights, targets
from headway.runtime.kernels import Kernels, reference
from headway.runtime.kernels.table import PlainLinear
from headway.runtime.layers import Build, Linear, Step
from headway.runtime.models import MODELS, Decoder
from headway.runtime.rope import RopeTable
from headway.runtime.rounding import RoundedWeight
from headway.spec import ModelSpec, read_model_spec
from headway.spec.formats import GROUPS, INT8, PARTS, PLAIN, Format

TRAINED = [Format("int4", group) for group in GROUPS]
Seen = Any
"""What a linear layer does with (inputs, weight) before the product; None: nothing."""


class TrainedLinear(nn.Module):
    """x · weightᵀ + bias, of what `fake` makes of x and weight where there is one."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.fake: nn.Module | None = None

    def forward(self, x_TH: Tensor) -> Tensor:
        weight_OH: Tensor = self.weight
        if self.fake is not None:
            x_TH, weight_OH = self.fake(x_TH, weight_OH)
        return functional.linear(x_TH, weight_OH, self.bias)


@dataclass(frozen=True, slots=True)
class Rows:
    """What attention knows of the tokens: they are `num_rows` rows of equal length."""

    num_rows: int


class RowAttention:
    """Causal attention within rows; an `AttentionBackend` without pages."""

    name = "rows"

    def attend(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: Any,
        rows: Any,
        rule: AttentionRule,
    ) -> Tensor:
        """(B · T, N, D) of queries, keys and values of B rows, one behind the other."""
        q, k, v = (
            x.unflatten(0, (rows.num_rows, -1)).transpose(1, 2) for x in (q_TND, k_TGD, v_TGD)
        )
        if rule.softcap or 0 < rule.window < q.shape[2]:
            out = plain_attention(q, k, v, rule)
        else:
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2).flatten(0, 1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """The same with a window or a soft cap, scores and all, (B, N, T, D)."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    seen = (back >= 0) & (back < rule.window) if rule.window else back >= 0
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


class TrainedModel(nn.Module):
    """The decoder of a folder in fp32: rows of token ids in, hidden states or logits out."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        refuse_experts(spec)
        build = Build(
            spec=spec,
            kernels=Kernels(linear=PlainLinear(reference.linear)),
            attention=RowAttention(),  # type: ignore[arg-type]
            dtype=torch.float32,
            device="cpu",
        )
        self.spec = spec
        self.decoder = Decoder(build, MODELS[spec.architecture])
        self.rounded: dict[str, RoundedWeight] = {}
        """By linear layer, the levels that a quantized folder holds; weights are their numbers."""
        self._ropes: dict[int, list[tuple[Tensor, Tensor]]] = {}

    @classmethod
    def open(cls, folder: Path, trainable: bool = True) -> "TrainedModel":
        """The model with the weights of `folder`; raises HeadwayError where they do not fit.

        One that is not trainable keeps the runtime's own linear layers.
        """
        model = cls(spec_of(folder))
        load_weights(model.decoder, model.spec, folder, ready=model._take)
        if trainable:
            model.make_trainable()
        else:
            model.make_ready()
        return model

    def _take(self, module: str, experts: Rounded) -> None:
        """What a quantized folder holds of a linear layer, and its numbers as the weight."""
        for parts in experts:
            whole = RoundedWeight.joined([part for part in parts if part is not None])
            self.rounded[module] = whole
            weight = self.decoder.get_submodule(module).weight
            assert isinstance(weight, Tensor)
            weight.data.copy_(whole.plain())

    def make_ready(self) -> None:
        """Let linear layers multiply the weights that they have now, and go on having."""
        for module in self.decoder.modules():
            if isinstance(module, Linear):
                module.prepare()

    def make_trainable(self) -> None:
        """Give weights gradients and linear layers that may round."""
        for name, module in list(self.decoder.named_modules()):
            if isinstance(module, Linear):
                assert isinstance(module.weight, nn.Parameter)
                self._replace(name, TrainedLinear(module.weight, module.bias))
        for parameter in self.decoder.parameters():
            parameter.requires_grad_(True)

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.decoder.get_submodule(parent), child, module)

    @property
    def linears(self) -> dict[str, TrainedLinear]:
        """Every linear layer by name: `layers.0.mlp.down`, `head`."""
        found = self.decoder.named_modules()
        return {name: module for name, module in found if isinstance(module, TrainedLinear)}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Hidden states (B, T, H), before the last norm."""
        hidden: Tensor = self.decoder(tokens_BT.flatten(), self.step(*tokens_BT.shape))
        return hidden.view(*tokens_BT.shape, -1)

    def step(self, num_rows: int, length: int) -> Step:
        """What layers are told of rows of equal length, one behind the other."""
        unknown: Any = None
        return Step(
            batch=Rows(num_rows),  # type: ignore[arg-type]
            kv=[unknown] * self.spec.num_layers,
            angles=self._angles(num_rows, length),
        )

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits of some hidden states, (R, V), in fp32."""
        return self.decoder.logits(hidden_RH)

    def _angles(self, num_rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """(cos, sin) of each rope for every token, rows one behind the other."""
        if length not in self._ropes:
            spec = self.spec
            tables = [RopeTable(rope, spec.rope_dim, length, "cpu") for rope in spec.ropes]
            self._ropes[length] = [table.at(torch.arange(length)) for table in tables]
        return [
            (cos.repeat(num_rows, 1, 1), sin.repeat(num_rows, 1, 1))
            for cos, sin in self._ropes[length]
        ]

    def tensors(self) -> dict[str, Tensor]:
        """The weights under the names of the checkpoint, views in fp32."""
        found = targets(self.decoder, self.spec)
        return {name: target.place.detach() for name, target in found.items()}


def spec_of(folder: Path) -> ModelSpec:
    """The dimensions of a folder, and the formats of what it holds quantized."""
    spec = read_model_spec(folder)
    spec = replace(spec, formats=checkpoint_formats(folder, spec))
    refuse_untrained(folder, spec)
    return spec


def refuse_untrained(folder: Path, spec: ModelSpec) -> None:
    """UnsupportedModelError for formats that no training writes.

    It writes int4 by 32, 64 or 128 and int8 by output, each with a scale alone, the same in all
    parts of a fused matrix.
    """
    kinds = formats_by_layer(spec)
    wrong = {name: found for name, found in kinds.items() if len(found) > 1 or not known(*found)}
    if spec.tied and kinds.get("head", {PLAIN}) != {PLAIN}:
        wrong["the embedding as the head"] = kinds["head"]
    for name, found in wrong.items():
        raise UnsupportedModelError(
            f"{folder.name} holds {name} in {' and '.join(sorted(map(str, found)))}, "
            "which is not trained.",
            "Give the folder in 16 bits, or one that `headway quantize` wrote.",
        )


def known(format: Format) -> bool:
    return format in (PLAIN, INT8) or replace(format, fp32_scales=False) in TRAINED


def formats_by_layer(spec: ModelSpec) -> dict[str, set[Format]]:
    """Linear layer → the formats of its parts in the folder."""
    kinds: dict[str, set[Format]] = {}
    for name, format in spec.formats:
        whole, _, part = name.rpartition(".")
        fused = part in PARTS.get(whole.rpartition(".")[2], ())
        kinds.setdefault(whole if fused else name, set()).add(format)
    return kinds


def refuse_experts(spec: ModelSpec) -> None:
    """A sparse model is neither pruned nor trained here, nor one of several streams."""
    if spec.experts is not None:
        raise UnsupportedModelError(
            f"{spec.architecture} has experts, which are neither pruned nor trained yet.",
            "Give a dense model.",
        )
    refuse_unread(spec)
