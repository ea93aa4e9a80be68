"""Layers that keep a state of each sequence in place of keys and values of its tokens, in numbers.

A head's state is a matrix S of `key_dim` × `value_dim` numbers that each token changes, in fp32
(none by the rule `conv`, whose `key_dim` is 0: LFM2):

    S = decay · S + k ⊗ v                     mamba2 (Dao and Gu 2024)
    S = decay · S + k ⊗ β (v − decay · Sᵀk)   delta, the gated delta rule (Yang et al. 2024)
    out = Sᵀq

Queries, keys and values come out of a causal convolution over `conv` tokens, whose last inputs are
kept, too. Worked example, Qwen3-Next: 32 heads of 128 × 128 and 3 inputs of 8,192 channels are
2.19 MB a layer; 36 such layers 79 MB a sequence, however long it is.
"""

from dataclasses import dataclass
from typing import Literal

STATE_BYTES = 4
"""Of a number of a state, and of an input of the convolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One such layer: `heads` states, whose queries and keys are those of `groups`.

    The convolution and the projections of `mamba2` and `conv` may have a bias; the steps of
    `mamba2` lie between the two `limits`. `fused`: the projections of `delta` are one matrix whose
    rows stand by key (Qwen3-Next), and not a matrix each (Qwen3.5).
    """

    rule: Literal["delta", "mamba2", "conv"]
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    conv: int
    conv_bias: bool = False
    bias: bool = False
    fused: bool = True
    limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution goes over: queries, keys and values."""
        return 2 * self.groups * self.key_dim + self.inner

    def matrices(self, hidden: int) -> list[tuple[str, int, int]]:
        """(name, outputs, inputs) of its linear layers."""
        out = ("out", hidden, self.inner)
        if self.rule == "conv":
            return [("project", 3 * self.inner, hidden), out]
        if self.rule == "mamba2":
            return [("project", self.inner + self.channels + self.heads, hidden), out]
        if not self.fused:
            gates = [(name, self.heads, hidden) for name in ("project_gain", "project_step")]
            gates.append(("project_gate", self.inner, hidden))
            return [("project", self.channels, hidden), *gates, out]
        more = ("project_gates", 2 * self.heads, hidden)
        return [("project", self.channels + self.inner, hidden), more, out]

    def matrix_parameters(self, hidden: int) -> int:
        """Elements of its linear layers, with their biases."""
        return sum(out * (inputs + self.bias) for _, out, inputs in self.matrices(hidden))

    def parameters(self, hidden: int) -> int:
        """All elements: also the convolution, decays, steps and the norm; mamba2's skip."""
        conv = self.channels * (self.conv + self.conv_bias)
        if self.rule == "conv":
            return self.matrix_parameters(hidden) + conv
        if self.rule == "mamba2":
            return self.matrix_parameters(hidden) + conv + 3 * self.heads + self.inner
        return self.matrix_parameters(hidden) + conv + 2 * self.heads + self.value_dim

    @property
    def num_bytes(self) -> int:
        """What a sequence takes in one layer."""
        conv_inputs = (self.conv - 1) * self.channels
        return STATE_BYTES * (self.heads * self.key_dim * self.value_dim + conv_inputs)

    @property
    def flops(self) -> int:
        """FLOPs of a token: to decay, to add and to read; delta's own read before it adds."""
        each = 5 if self.rule == "mamba2" else 7
        numbers = self.heads * self.key_dim * self.value_dim
        return each * numbers + 2 * self.channels * self.conv
