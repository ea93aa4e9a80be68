"""Recurrent states of sequences: their memory, and their layers (gated delta rule, Mamba-2, LFM2).

A chunk advances a state token by token, so a state has the same bits for every division of the
prompt into chunks and for every batch.

    x ─ project ─┬─ q k v ─ convolution ─ silu ─┬─ S = decay · S + k ⊗ …, out = Sᵀq ─┬─ norm ─ out
                 ├─ decays, gains ──────────────┘                                    │
                 └─ gate ────────────────────────────────────────────────────────────┘

T tokens, R rows of L tokens, C channels of the convolution, W its width, H heads, G of queries and
keys, K and V numbers of a key and of a value.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.core.plan import NULL_BLOCK
from headway.runtime.attention import KVLayer
from headway.runtime.batch import Batch
from headway.runtime.experts import Fp32Weight, fp32_weight
from headway.runtime.kernels.reference import evenly
from headway.runtime.layers import Build, Linear, Step
from headway.spec import KVGroupSpec

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys of the delta rule."""


@dataclass(slots=True)
class StateLayer(KVLayer):
    """States of one layer in fp32; a block is the state of a sequence, or a checkpoint.

    `k` is S (blocks, H, K, V), `v` the last inputs of the convolution (blocks, W - 1, C).
    """

    size: int = 0
    """Tokens of each entry of a block table."""

    @property
    def block_size(self) -> int:
        return self.size

    def wipe(self, slots_T: Tensor) -> None:
        for part in self.parts:
            part[slots_T // self.size] = 0


def allocate_states(
    group: KVGroupSpec, index: int, count: int, block_size: int, device: str
) -> dict[int, KVLayer]:
    """Return memory for `count` states, by layer."""
    states = group.states
    assert states is not None
    shape = (count, states.heads, states.key_dim, states.value_dim)
    tail_shape = (count, states.conv - 1, states.channels)
    return {
        layer: StateLayer(
            torch.zeros(shape, device=device),
            torch.zeros(tail_shape, device=device),
            index,
            block_size,
        )
        for layer in group.layers
    }


class StateRows(NamedTuple):
    """Rows of equal length that are computed together: their tokens are `begin` … `end` - 1.

    `read` are the blocks of the previous states, the null block for none. `written` lists (tokens
    of a row, blocks of the rows) where states are stored: at checkpoints, and behind the last
    token.
    """

    begin: int
    end: int
    read: list[int]
    written: list[tuple[int, list[int]]]


def state_rows(batch: Batch, layer: StateLayer) -> list[StateRows]:
    """Return the rows of a step, which the first layer of the group makes for all its layers."""
    key = -1 - layer.group
    if key not in batch.views:
        batch.views[key] = make_rows(batch, layer)
    rows: list[StateRows] = batch.views[key]
    return rows


def make_rows(batch: Batch, layer: StateLayer) -> list[StateRows]:
    """Return the rows of a step: all decodes together, and each chunk alone.

    Worked example, blocks of 4, a table [0 5 0 7], tokens 6 … 13: the state behind token 5 is read
    from block 5. After 2 tokens it is written to block 5, the checkpoint behind token 7, and after
    all 8 tokens to block 7.
    """
    table_SB, size = batch.block_tables_GSB[layer.group].tolist(), layer.size
    rows, begin = [], 0
    lens = batch.query_lens
    starts = [end - length for end, length in zip(batch.context_lens, lens, strict=True)]
    read = [
        table[(start - 1) // size] if start else NULL_BLOCK
        for table, start in zip(table_SB, starts, strict=True)
    ]
    if batch.num_decodes:
        begin = batch.num_decodes
        written = [table_SB[row][starts[row] // size] for row in range(begin)]
        rows.append(StateRows(0, begin, read[:begin], [(1, written)]))
    for row in range(batch.num_decodes, len(lens)):
        start, end = starts[row], batch.context_lens[row]
        last, table = (end - 1) // size, table_SB[row]
        checkpoints = [
            ((at + 1) * size - start, [table[at]])
            for at in range(start // size, last)
            if table[at] not in (NULL_BLOCK, table[last])
        ]
        rows.append(
            StateRows(
                begin, begin + lens[row], [read[row]], [*checkpoints, (lens[row], [table[last]])]
            )
        )
        begin += lens[row]
    return rows


class Convolution(nn.Module):
    """A causal convolution of each channel over the last W tokens, then silu if `activated`."""

    def __init__(
        self, build: Build, channels: int, width: int, bias: bool, activated: bool
    ) -> None:
        super().__init__()
        self.weight = fp32_weight(build, channels, width)
        self.bias = fp32_weight(build, channels) if bias else None
        self.width, self.activated = width, activated

    def forward(self, x_RXC: Tensor) -> Tensor:
        """Return L outputs of X = W - 1 + L inputs, all in fp32."""
        length = x_RXC.shape[1] - self.width + 1
        weight_WC = self.weight.t()
        sums_RLC = x_RXC[:, :length] * weight_WC[0]
        for at in range(1, self.width):
            sums_RLC = sums_RLC + x_RXC[:, at : at + length] * weight_WC[at]
        sums_RLC = sums_RLC if self.bias is None else sums_RLC + self.bias
        return evenly(functional.silu, sums_RLC) if self.activated else sums_RLC


class StateMixer(nn.Module, ABC):
    """Base of all rules: projections, convolution, its last inputs."""

    project: Linear
    out: Linear

    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        states = build.spec.states
        assert states is not None
        self.index, self.states, self.dtype = index, states, build.dtype
        linear = {
            name: Linear(build, inputs, outputs, bias=states.bias)
            for name, outputs, inputs in states.matrices(build.spec.hidden_size)
        }
        for name, layer in linear.items():
            self.add_module(name, layer)
        self.convolution = Convolution(
            build, states.channels, states.conv, states.conv_bias, states.rule != "conv"
        )

    @abstractmethod
    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        """Return the output of the layer's mixer, (T, H)."""

    def with_inputs_before(
        self, mixed_RLC: Tensor, layer: StateLayer, read: Tensor, new: Tensor
    ) -> Tensor:
        """Return the last inputs of the rows' states, zeros of `new` ones, and the rows', fp32."""
        before_RWC = layer.v[read].masked_fill_(new[:, None, None], 0.0)
        return torch.cat([before_RWC, mixed_RLC], 1)


class ShortConvolution(StateMixer):
    """LFM2: a convolution between two gates; a state is its last inputs alone."""

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        before_TC, after_TC, values_TC = self.project(x_TH).chunk(3, -1)
        mixed_TC = (before_TC * values_TC).float()
        layer, out = step.kv[self.index], []
        assert isinstance(layer, StateLayer)
        for rows in state_rows(step.batch, layer):
            read = torch.tensor(rows.read, device=x_TH.device)
            mixed_RLC = mixed_TC[rows.begin : rows.end].unflatten(0, (len(rows.read), -1))
            inputs_RXC = self.with_inputs_before(mixed_RLC, layer, read, read == NULL_BLOCK)
            out.append(self.convolution(inputs_RXC).flatten(0, 1))
            for end, blocks in rows.written:
                at = torch.tensor(blocks, device=read.device)
                layer.v[at] = inputs_RXC[:, end : end + self.states.conv - 1]
        return self.out(after_TC * torch.cat(out).to(x_TH.dtype))


class RecurrentMixer(StateMixer):
    """Base of the rules that have a matrix for each head, which decays."""

    def __init__(self, build: Build, index: int) -> None:
        super().__init__(build, index)
        self.decay_log, self.step_bias = (Fp32Weight(build, self.states.heads) for _ in range(2))
        self.scan = build.kernels.scan

    def advance(
        self, mixed_TC: Tensor, decay_TH: Tensor, gain_TH: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Advance the states; return (outputs (T, H, V), values (T, H, V))."""
        layer = step.kv[self.index]
        assert isinstance(layer, StateLayer)
        out, values = [], []
        for rows in state_rows(step.batch, layer):
            inner = slice(rows.begin, rows.end)
            shape = (len(rows.read), -1)
            mixed, decay, gain = (
                x[inner].float().unflatten(0, shape) for x in (mixed_TC, decay_TH, gain_TH)
            )
            given, value = self.advance_rows(mixed, decay, gain, layer, rows)
            out.append(given.flatten(0, 1))
            values.append(value.flatten(0, 1))
        return torch.cat(out), torch.cat(values)

    def advance_rows(
        self,
        mixed_RLC: Tensor,
        decay_RLH: Tensor,
        gain_RLH: Tensor,
        layer: StateLayer,
        rows: StateRows,
    ) -> tuple[Tensor, Tensor]:
        """Advance the states of rows of equal length; return as `advance`."""
        read = torch.tensor(rows.read, device=mixed_RLC.device)
        new = read == NULL_BLOCK
        state_RHKV = layer.k[read].masked_fill_(new[:, None, None, None], 0.0)
        inputs_RXC = self.with_inputs_before(mixed_RLC, layer, read, new)
        q, k, v = self.split_qkv(self.convolution(inputs_RXC).to(self.dtype).float())
        given, begin = [], 0
        for end, blocks in rows.written:
            part = slice(begin, end)
            given.append(
                self.scan(
                    *(state_RHKV, q[:, part], k[:, part], v[:, part]),
                    *(decay_RLH[:, part], gain_RLH[:, part], self.states.rule == "delta"),
                )
            )
            at = torch.tensor(blocks, device=read.device)
            layer.k[at] = state_RHKV
            layer.v[at] = inputs_RXC[:, end : end + self.states.conv - 1]
            begin = end
        return torch.cat(given, 1), v

    @abstractmethod
    def split_qkv(self, mixed_RLC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys (R, L, G, K), and values (R, L, H, V)."""


class DeltaRule(RecurrentMixer):
    """The gated delta rule of Qwen3-Next: the value of a key is corrected to the new value."""

    project_gates: Linear
    project_gate: Linear
    project_gain: Linear
    project_step: Linear

    def __init__(self, build: Build, index: int) -> None:
        super().__init__(build, index)
        self.scale, self.eps = Fp32Weight(build, self.states.value_dim), build.spec.rms_norm_eps

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        mixed_TC, gate_TV, gain_TH, step_TH = self.projected(x_TH)
        steps_TH = evenly(functional.softplus, step_TH.float() + self.step_bias.weight)
        decay_TH = evenly(torch.exp, -self.decay_log.weight.exp() * steps_TH)
        gain_TH = evenly(torch.sigmoid, gain_TH.float())
        given_THV, _ = self.advance(mixed_TC, decay_TH, gain_TH, step)
        gate_THV = gate_TV.reshape(given_THV.shape)
        return self.out(self.normed(given_THV.to(x_TH.dtype), gate_THV).flatten(1))

    def projected(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values (T, C), the output's gate, gains and step sizes."""
        states = self.states
        if not states.fused:
            matrices = (self.project, self.project_gate, self.project_gain, self.project_step)
            mixed_TC, gate_TV, gain_TH, step_TH = (matrix(x_TH) for matrix in matrices)
            return mixed_TC, gate_TV, gain_TH, step_TH
        each = states.heads // states.groups  # the heads of a key are adjacent in the projections
        value = each * states.value_dim
        rows_TGN = self.project(x_TH).unflatten(-1, (states.groups, -1))
        *parts, gate_TGN = rows_TGN.split([states.key_dim, states.key_dim, value, value], -1)
        mixed_TC = torch.cat([part.flatten(1) for part in parts], -1)
        gain, step_size = self.project_gates(x_TH).unflatten(-1, (states.groups, -1)).chunk(2, -1)
        return mixed_TC, gate_TGN.flatten(1), gain.flatten(1), step_size.flatten(1)

    def normed(self, x_THV: Tensor, gate_THV: Tensor) -> Tensor:
        """Return the RMS norm of each head, times silu of the gate."""
        wide = x_THV.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        scaled = self.scale.weight * wide.to(x_THV.dtype)
        return (scaled * evenly(functional.silu, gate_THV.float())).to(x_THV.dtype)

    def split_qkv(self, mixed_RLC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.states.groups * self.states.key_dim
        q, k, v = mixed_RLC.split([keys, keys, self.states.inner], -1)
        q, k = (x.unflatten(-1, (self.states.groups, -1)) for x in (q, k))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS) for x in (q, k))
        return q / self.states.key_dim**0.5, k, v.unflatten(-1, (self.states.heads, -1))


class Mamba2(RecurrentMixer):
    """Mamba-2: a value is added to that of its key; step sizes set its weight and the decay."""

    def __init__(self, build: Build, index: int) -> None:
        super().__init__(build, index)
        states = self.states
        self.skip, self.eps = Fp32Weight(build, states.heads), build.spec.rms_norm_eps
        self.scale = Fp32Weight(build, states.inner)

    def forward(self, x_TH: Tensor, step: Step) -> Tensor:
        states = self.states
        sizes = [states.inner, states.channels, states.heads]
        gate_TI, mixed_TC, steps_TH = self.project(x_TH).split(sizes, -1)
        steps_TH = evenly(functional.softplus, steps_TH.float() + self.step_bias.weight)
        steps_TH = steps_TH.clamp(*states.limits)
        decay_TH = evenly(torch.exp, -self.decay_log.weight.exp() * steps_TH)
        given_THV, value_THV = self.advance(mixed_TC, decay_TH, steps_TH, step)
        given_THV = given_THV + self.skip.weight[:, None] * value_THV
        return self.out(self.normed(given_THV.flatten(1), gate_TI))

    def normed(self, x_TI: Tensor, gate_TI: Tensor) -> Tensor:
        """Return the RMS norm of each group, of x times silu of the gate."""
        wide = x_TI * evenly(functional.silu, gate_TI.float())
        wide = wide.unflatten(-1, (self.states.groups, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.scale.weight * wide.flatten(1)).to(gate_TI.dtype)

    def split_qkv(self, mixed_RLC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.states.groups * self.states.key_dim
        v, k, q = mixed_RLC.split([self.states.inner, keys, keys], -1)
        q, k = (x.unflatten(-1, (self.states.groups, -1)) for x in (q, k))
        return q, k, v.unflatten(-1, (self.states.heads, -1))


MIXERS: dict[str, type[StateMixer]] = {
    "delta": DeltaRule,
    "mamba2": Mamba2,
    "conv": ShortConvolution,
}
"""By `StateSpec.rule`."""
