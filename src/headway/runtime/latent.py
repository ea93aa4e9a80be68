"""Latent attention (MLA, DeepSeek-AI 2024): one cached row for each token.

    q, kv = queries(x), down(x)            kv = [norm(c), rope(k)], all that is cached: 512 + 64
    head n's key is [U_n · c, rope(k)] and its value W_n · c

Keys and values are never expanded. A score is q · U_n · c, so U_n is multiplied into the query; the
sum of values is W_n times the sum of rows, so W_n is applied after the sum. Attention is then that
of one KV head, and the value is the first part of the key. Prefill and decode compute the same, so
that a token does not depend on the chunks of its prompt.

T tokens, H hidden size, N heads, C numbers of a key (rank + rope_dim), R rank, V of a value.
"""

import torch
from torch import Tensor, nn

from headway.runtime.attention import AttentionRule
from headway.runtime.layers import Build, Linear, RMSNorm, Step
from headway.runtime.rounding import RoundedWeight

NORM_EPS = 1e-6
"""Epsilon of the norms of latent rows; the config's value is for the other norms."""


class KVUp(nn.Module):
    """U and W of all heads, (N · (nope_dim + value_dim), R), always in the model's type."""

    def __init__(self, build: Build, inputs: int, outputs: int) -> None:
        super().__init__()
        self.parts = (outputs,)
        self.weight = build.weight(outputs, inputs)

    def fill(self, weight: RoundedWeight) -> None:
        """Fill the matrix from a checkpoint that holds it rounded."""
        self.weight.copy_(weight.plain())


class LatentAttention(nn.Module):
    """Self-attention over paged latent rows."""

    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        spec, latent = build.spec, build.spec.latent
        assert latent is not None
        self.index, self.latent, self.num_heads = index, latent, spec.num_heads
        hidden, heads, bias = spec.hidden_size, spec.num_heads, spec.qkv_bias
        if latent.q_rank:
            self.q_down = Linear(build, hidden, latent.q_rank, bias=bias)
            self.q_norm = RMSNorm(build, latent.q_rank, NORM_EPS)
            self.q_up = Linear(build, latent.q_rank, spec.q_size)
        else:
            self.q = Linear(build, hidden, spec.q_size)
        self.kv_down = Linear(build, hidden, latent.key_dim, bias=bias)
        self.kv_norm = RMSNorm(build, latent.rank, NORM_EPS)
        self.kv_up = KVUp(build, latent.rank, heads * (latent.nope_dim + latent.value_dim))
        self.out = Linear(build, heads * latent.value_dim, hidden, bias=spec.o_bias)
        layer = spec.layers[index]
        assert layer.rope is not None
        self.rope_index, self.rope = layer.rope, build.kernels.rope
        self.backend = build.attention
        self.rule = AttentionRule(
            scale=spec.attention_scale, window=layer.window, sinks=layer.sinks
        )

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        latent = self.latent
        up_NDR = self.kv_up.weight.unflatten(0, (self.num_heads, -1))
        keys_NDR, values_NVR = up_NDR.split([latent.nope_dim, latent.value_dim], 1)
        q_TND = self.queries(x_TH).unflatten(-1, (self.num_heads, -1))
        q_TND, turned_TND = q_TND.split([latent.nope_dim, latent.rope_dim], -1)
        q_TNR = torch.bmm(q_TND.transpose(0, 1), keys_NDR).transpose(0, 1)
        row_TR, k_TD = self.kv_down(x_TH).split([latent.rank, latent.rope_dim], -1)
        angles = step.angles[self.rope_index]
        q_TNC = torch.cat([q_TNR, self.turn(turned_TND, angles)], -1)
        row_T1R, k_T1D = self.kv_norm(row_TR)[:, None], self.turn(k_TD[:, None], angles)
        k_T1C = torch.cat([row_T1R, k_T1D], -1)
        layer = step.kv[self.index]
        sums_TNR = self.backend.attend(q_TNC, k_T1C, row_T1R, layer, step.batch, self.rule)
        out_NTV = torch.bmm(sums_TNR.transpose(0, 1), values_NVR.transpose(1, 2))
        return self.out(out_NTV.transpose(0, 1).flatten(1))

    def queries(self, x_TH: Tensor) -> Tensor:
        """Return the queries of all heads, (T, N · (nope_dim + rope_dim))."""
        if self.latent.q_rank:
            return self.q_up(self.q_norm(self.q_down(x_TH)))
        return self.q(x_TH)

    def turn(self, x_TND: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Apply the rope; interleaved pairs of queries and keys are reordered into halves."""
        if self.latent.interleaved:
            x_TND = x_TND.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return self.rope(x_TND, *angles)
