"""A folder's model with gradients: the layers that serve it, on whole rows of tokens.

It uses the runtime's own model files, so every family that can be served can be trained. There are
three differences: linear layers multiply in fp32 and may round their inputs (`fake.py`), attention
sees rows instead of pages, and weights have gradients.

B rows, T tokens of a row, N query heads, G KV heads, D head size, V vocabulary.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.compress.rows import check_trainable_attention
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


class TrainedLinear(nn.Module):
    """x · weightᵀ + bias, with x and weight rounded by `fake` if there is one."""

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
class RowBatch:
    """The batch as attention sees it: `num_rows` rows of equal length."""

    num_rows: int


class TrainingAttention:
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
        """Return (B · T, N, D) from queries, keys and values of B concatenated rows."""
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
    """Compute attention with a window or a soft cap through explicit scores, (B, N, T, D)."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    visible = (back >= 0) & (back < rule.window) if rule.window else back >= 0
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


class TrainedModel(nn.Module):
    """The decoder of a folder in fp32: rows of token ids to hidden states or logits."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        check_trainable(spec)
        build = Build(
            spec=spec,
            kernels=Kernels(linear=PlainLinear(reference.linear)),
            attention=TrainingAttention(),  # type: ignore[arg-type]
            dtype=torch.float32,
            device="cpu",
        )
        self.spec = spec
        self.decoder = Decoder(build, MODELS[spec.architecture])
        self.rounded: dict[str, RoundedWeight] = {}
        """Linear layer → the levels that a quantized folder has; weights are their values."""
        self._ropes: dict[int, list[tuple[Tensor, Tensor]]] = {}

    @classmethod
    def open(cls, folder: Path, trainable: bool = True) -> "TrainedModel":
        """Open the model with the weights of `folder`; raises HeadwayError if they do not fit.

        A model that is not trainable keeps the runtime's linear layers.
        """
        model = cls(spec_of(folder))
        load_weights(model.decoder, model.spec, folder, ready=model._take)
        if trainable:
            model.make_trainable()
        else:
            model.make_ready()
        return model

    def _take(self, module: str, experts: Rounded) -> None:
        """Save the levels of a linear layer of a quantized folder, and use their values as
        weight."""
        for parts in experts:
            whole = RoundedWeight.joined([part for part in parts if part is not None])
            self.rounded[module] = whole
            weight = self.decoder.get_submodule(module).weight
            assert isinstance(weight, Tensor)
            weight.data.copy_(whole.plain())

    def make_ready(self) -> None:
        """Prepare linear layers for multiplication with their current, final weights."""
        for module in self.decoder.modules():
            if isinstance(module, Linear):
                module.prepare()

    def make_trainable(self) -> None:
        """Give weights gradients, and replace linear layers by ones that may round."""
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
        """All linear layers by name: `layers.0.mlp.down`, `head`."""
        modules = self.decoder.named_modules()
        return {name: module for name, module in modules if isinstance(module, TrainedLinear)}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return hidden states (B, T, H), before the last norm."""
        hidden: Tensor = self.decoder(tokens_BT.flatten(), self.step(*tokens_BT.shape))
        return hidden.view(*tokens_BT.shape, -1)

    def step(self, num_rows: int, length: int) -> Step:
        """Return the step that layers need for concatenated rows of equal length."""
        unknown: Any = None
        return Step(
            batch=RowBatch(num_rows),  # type: ignore[arg-type]
            kv=[unknown] * self.spec.num_layers,
            angles=self._angles(num_rows, length),
        )

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return logits of some hidden states, (R, V), in fp32."""
        return self.decoder.logits(hidden_RH)

    def _angles(self, num_rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return (cos, sin) of each rope for every token, rows concatenated."""
        if length not in self._ropes:
            spec = self.spec
            tables = [RopeTable(rope, spec.rope_dim, length, "cpu") for rope in spec.ropes]
            self._ropes[length] = [table.at(torch.arange(length)) for table in tables]
        return [
            (cos.repeat(num_rows, 1, 1), sin.repeat(num_rows, 1, 1))
            for cos, sin in self._ropes[length]
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights under the names of the checkpoint, as fp32 views."""
        places = targets(self.decoder, self.spec)
        return {name: target.place.detach() for name, target in places.items()}


def spec_of(folder: Path) -> ModelSpec:
    """Return the dimensions of a folder, with the formats of its quantized layers."""
    spec = read_model_spec(folder)
    spec = replace(spec, formats=checkpoint_formats(folder, spec))
    check_trainable_formats(folder, spec)
    return spec


def check_trainable_formats(folder: Path, spec: ModelSpec) -> None:
    """Raise UnsupportedModelError for formats that training cannot write.

    It can write int4 by 32, 64 or 128 and int8 by output, each with scales only, and one format for
    all parts of a fused matrix.
    """
    kinds = formats_by_layer(spec)
    wrong = {
        name: formats
        for name, formats in kinds.items()
        if len(formats) > 1 or not is_trainable(*formats)
    }
    if spec.tied and kinds.get("head", {PLAIN}) != {PLAIN}:
        wrong["the embedding as the head"] = kinds["head"]
    for name, formats in wrong.items():
        raise UnsupportedModelError(
            f"{folder.name} holds {name} in {' and '.join(sorted(map(str, formats)))}, "
            "which is not trained.",
            "Give the folder in 16 bits, or one that `headway quantize` wrote.",
        )


def is_trainable(format: Format) -> bool:
    return format in (PLAIN, INT8) or replace(format, fp32_scales=False) in TRAINED


def formats_by_layer(spec: ModelSpec) -> dict[str, set[Format]]:
    """Return linear layer → the formats of its parts in the folder."""
    kinds: dict[str, set[Format]] = {}
    for name, format in spec.formats:
        whole, _, part = name.rpartition(".")
        fused = part in PARTS.get(whole.rpartition(".")[2], ())
        kinds.setdefault(whole if fused else name, set()).add(format)
    return kinds


def check_trainable(spec: ModelSpec) -> None:
    """Raise UnsupportedModelError for a model with experts or other parts that are not trained
    here."""
    if spec.experts is not None:
        raise UnsupportedModelError(
            f"{spec.architecture} has experts, which are neither pruned nor trained yet.",
            "Give a dense model.",
        )
    check_trainable_attention(spec)
