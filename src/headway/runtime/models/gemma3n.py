"""Gemma 3n, text (Gemma Team 2025): several streams for each token, layers that share KV.

A layer computes one of the streams (AltUp, Baykal et al. 2023); the others are predicted before it
and corrected after it, with weights that a router derives from the computed stream:

    streams ─ predict ─ active ─ Gemma's layer plus a low-rank product      ─ correct ─┬─▶
                                            row of this layer, by token ─ gate ─ + ────┘

Before the layers the streams are made from the embedding, after them they are averaged. The last
layers have queries only, and read the keys and values of the last layer of their kind that has
some. The image and audio parts of a checkpoint are not read.

S streams, T tokens, H hidden size, L layers, P numbers of a layer's row.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headway.runtime.layers import Attention, Build, GatedMLP, Linear, RMSNorm, Step
from headway.runtime.models.decoder import Architecture, Decoder, Pieces, Weights, whole
from headway.runtime.models.gemma import WEIGHTS as GEMMA_WEIGHTS
from headway.runtime.models.llama import LAYER
from headway.runtime.models.qwen3 import QK_NORM

MAX_STREAMS = 8
ALTUP, OURS = LAYER + "altup.", "layers.{i}.extras."
WEIGHTS: Weights = {
    **GEMMA_WEIGHTS,
    **QK_NORM,
    ALTUP + "correct_output_scale": (OURS + "scale", None),
    ALTUP + "correction_coefs": (OURS + "correction", None),
    ALTUP + "prediction_coefs": (OURS + "prediction", None),
    ALTUP + "modality_router": (OURS + "routing", None),
    ALTUP + "router_norm": (OURS + "routing_norm", None),
    LAYER + "laurel.linear_left": (OURS + "laurel_down", None),
    LAYER + "laurel.linear_right": (OURS + "laurel_up", None),
    LAYER + "laurel.post_laurel_norm": (OURS + "laurel_norm", None),
    LAYER + "per_layer_input_gate": (OURS + "row_gate", None),
    LAYER + "per_layer_projection": (OURS + "row_out", None),
    LAYER + "post_per_layer_input_norm": (OURS + "row_norm", None),
    "model.embed_tokens_per_layer": ("extras.table", None),
    "model.per_layer_model_projection": ("extras.rows", None),
    "model.per_layer_projection_norm": ("extras.rows_norm", None),
    **{f"model.altup_projections.{n}": (f"extras.spread.{n}", None) for n in range(MAX_STREAMS)},
    **{
        f"model.altup_unembed_projections.{n}": (f"extras.gather.{n}", None)
        for n in range(MAX_STREAMS)
    },
}
MIN_MEAN_SQUARE = 1e-5


class Plain(nn.Module):
    """A small unquantized weight: a matrix (outputs, inputs) or a vector."""

    def __init__(self, build: Build, *shape: int) -> None:
        super().__init__()
        self.weight = build.weight(*shape)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


class LayerExtras(nn.Module):
    """The parts of a layer other than attention and MLP: AltUp, LAuReL, the per-layer row."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        spec = build.spec
        assert spec.altup is not None
        self.altup, hidden = spec.altup, spec.hidden_size
        streams, rank, row = spec.altup.streams, spec.altup.laurel_rank, spec.altup.per_layer_size
        self.scale = Plain(build, hidden)
        self.correction = Plain(build, streams, streams)
        self.prediction = Plain(build, streams**2, streams)
        self.routing = Plain(build, streams, hidden)
        self.routing_norm = RMSNorm(build)
        self.laurel_down, self.laurel_up = Linear(build, hidden, rank), Linear(build, rank, hidden)
        self.laurel_norm = RMSNorm(build)
        self.row_gate, self.row_out = Linear(build, hidden, row), Linear(build, row, hidden)
        self.row_norm = RMSNorm(build)
        self.gated = build.kernels.gated[spec.activation]

    def router_outputs(self, x_TH: Tensor) -> Tensor:
        """Return the router's output for a stream, (T, S), between -1 and 1."""
        normed_TH = self.routing_norm(x_TH) * (1 / x_TH.shape[-1])
        return torch.tanh(self.routing(normed_TH).float()).to(x_TH.dtype)

    def predict(self, x_STH: Tensor) -> Tensor:
        """Return the predicted streams behind the layer, (S, T, H)."""
        mixed_TSS = self.prediction(self.router_outputs(x_STH[self.altup.active]))
        mixed_TSS = mixed_TSS.unflatten(-1, (self.altup.streams, -1))
        return torch.einsum("tos,sth->oth", mixed_TSS, x_STH) + x_STH

    def correct(self, predicted_STH: Tensor, computed_TH: Tensor) -> Tensor:
        """Return the streams, each corrected by its share of the error of the prediction."""
        shares_TS = self.correction(self.router_outputs(computed_TH)) + 1.0
        new_TH = computed_TH - predicted_STH[self.altup.active]
        return predicted_STH + new_TH * shares_TS.T[..., None]

    def laurel(self, x_TH: Tensor) -> Tensor:
        """Return x plus a low-rank product of it (LAuReL)."""
        return x_TH + self.laurel_norm(self.laurel_up(self.laurel_down(x_TH)))

    def add_row(self, x_STH: Tensor, row_TP: Tensor) -> Tensor:
        """Add the tokens' rows of this layer to all streams but the first."""
        query_TH = x_STH[self.altup.active]
        if self.altup.scaled:
            query_TH = query_TH * self.scale.weight
        gated_TP = self.gated(torch.cat([self.row_gate(query_TH), row_TP], -1))
        added_TH = self.row_norm(self.row_out(gated_TP))
        return torch.cat([x_STH[:1], x_STH[1:] + added_TH])


class SparseGateMLP(GatedMLP):
    """A gated MLP with sparse activations: only gates far above the mean are not 0.

    Gates are treated as normally distributed: with 0.95, gates below mean + 1.645 deviations are 0.
    """

    def __init__(self, build: Build, sparsity: float) -> None:
        super().__init__(build)
        normal = torch.distributions.Normal(0.0, 1.0)
        self.deviations = float(normal.icdf(torch.tensor(sparsity))) if sparsity else None

    def forward(self, x_TH: Tensor) -> Tensor:
        if self.deviations is None:
            return super().forward(x_TH)
        gate_TI, up_TI = self.gate_up(x_TH).chunk(2, -1)
        deviations = torch.tensor(self.deviations, dtype=gate_TI.dtype)
        threshold_T1 = (
            gate_TI.mean(-1, True) + gate_TI.std(-1, unbiased=False, keepdim=True) * deviations
        )
        return self.down(self.gated(torch.cat([(gate_TI - threshold_T1).relu(), up_TI], -1)))


class Gemma3nLayer(nn.Module):
    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(build)
        self.attention = Attention(build, index)
        self.attended_norm = RMSNorm(build)
        self.mlp_norm = RMSNorm(build)
        self.mlp = SparseGateMLP(build, build.spec.layers[index].sparsity)
        self.out_norm = RMSNorm(build)
        self.extras = LayerExtras(build)

    def forward(self, x_STH: Tensor, row_TP: Tensor, step: Step) -> Tensor:
        predicted_STH = self.extras.predict(x_STH)
        x_TH = predicted_STH[self.extras.altup.active]
        normed_TH = self.attention_norm(x_TH)
        attended_TH = x_TH + self.attended_norm(self.attention(normed_TH, step))
        x_TH = (attended_TH + self.extras.laurel(normed_TH)) / math.sqrt(2)
        x_TH = x_TH + self.out_norm(self.mlp(self.mlp_norm(x_TH)))
        return self.extras.add_row(self.extras.correct(predicted_STH, x_TH), row_TP)


class ModelExtras(nn.Module):
    """The parts before and after the layers: the streams, and the per-layer rows."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        spec = build.spec
        assert spec.altup is not None and spec.altup.streams <= MAX_STREAMS + 1
        hidden, size = spec.hidden_size, spec.altup.per_layer_size
        self.num_layers, self.altup = spec.num_layers, spec.altup
        rows, others = spec.num_layers * size, spec.altup.streams - 1
        self.table = nn.Embedding(
            spec.altup.per_layer_vocab,
            rows,
            _weight=build.weight(spec.altup.per_layer_vocab, rows),
            _freeze=True,
        )
        self.rows = Linear(build, hidden, rows)
        self.rows_norm = RMSNorm(build, size)
        self.spread = nn.ModuleList(Linear(build, hidden, hidden) for _ in range(others))
        self.gather = nn.ModuleList(Linear(build, hidden, hidden) for _ in range(others))

    def rows_of(self, token_ids_T: Tensor, x_TH: Tensor) -> Tensor:
        """Return the per-layer rows of the tokens, (T, L, P), from a table and the embedding."""
        known_T = torch.lt(token_ids_T, self.altup.per_layer_vocab)
        table_TLP = self.table(token_ids_T * known_T).unflatten(-1, (self.num_layers, -1))
        table_TLP = table_TLP * torch.tensor(table_TLP.shape[-1] ** 0.5, dtype=x_TH.dtype)
        projected_TLP = (self.rows(x_TH) * x_TH.shape[-1] ** -0.5).unflatten(
            -1, (self.num_layers, -1)
        )
        return (self.rows_norm(projected_TLP.contiguous()) + table_TLP) * 0.5**0.5

    def make_streams(self, x_TH: Tensor) -> Tensor:
        """Return the first streams: the embedding and products of it, all of one norm."""
        return self.scaled_alike(x_TH, [spread(x_TH) for spread in self.spread])

    def merge_streams(self, x_STH: Tensor) -> Tensor:
        """Return the mean of the streams, all scaled to the norm of the first."""
        others = [gather(x_TH) for gather, x_TH in zip(self.gather, x_STH[1:], strict=True)]
        return self.scaled_alike(x_STH[0], others).mean(0)

    def scaled_alike(self, first_TH: Tensor, others: list[Tensor]) -> Tensor:
        """Return `first_TH` and the others scaled to its root mean square, (S, T, H)."""
        size_T1 = first_TH.square().mean(-1, True) ** 0.5
        streams = [first_TH]
        for x_TH in others:
            square_T1 = x_TH.square().mean(-1, True).clamp(min=MIN_MEAN_SQUARE)
            streams.append(x_TH * size_T1 / square_T1.sqrt())
        return torch.stack(streams)


class Gemma3nDecoder(Decoder):
    """A `Decoder` with streams and per-layer rows."""

    def __init__(self, build: Build, architecture: Architecture) -> None:
        super().__init__(build, architecture)
        self.extras = ModelExtras(build)

    def forward(self, token_ids_T: Tensor, step: Step) -> Tensor:
        x_TH = self.embedding(token_ids_T)
        x_TH = x_TH * torch.tensor(self.spec.embedding_scale, dtype=x_TH.dtype)
        rows_TLP = self.extras.rows_of(token_ids_T, x_TH)
        x_STH = self.extras.make_streams(x_TH)
        for layer, row_TP in zip(self.layers, rows_TLP.unbind(1), strict=True):
            x_STH = layer(x_STH, row_TP, step)
        return self.extras.merge_streams(x_STH)


def pieces(name: str, shape: Callable[[], Sequence[int]]) -> Pieces:
    """Return the tensor under its name; a bare weight gets `.weight`."""
    suffix = ".weight" if name.endswith(".correct_output_scale") else ""
    return whole(name + suffix, shape)


GEMMA3N = Architecture(Gemma3nLayer, WEIGHTS, pieces, Gemma3nDecoder)
