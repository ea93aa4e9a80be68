"""Quantized folders of tiny models, as GPTQ, AWQ and FP8 writers make them, and their weights.

The packing follows AutoGPTQ 0.7.1 (`qlinear_cuda_old.pack`), AutoAWQ 0.2.9
(`WQLinear_GEMM.from_linear`) and transformers 5.23 (`Fp8Quantize`), step by step and slowly: loops
over words, no code of ours. Rounding is to the nearest; what counts is the numbers afterwards.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix in integers: weight = (code - zero) · scale; `index_H` has each input's group."""

    codes_OH: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor
    index_H: Tensor
    bits: int

    @property
    def weight(self) -> Tensor:
        """The weights in fp32, as everybody's definition has them."""
        zeros, scales = (each[:, self.index_H] for each in (self.zeros_OG, self.scales_OG))
        return (self.codes_OH - zeros).float() * scales


def make_grid(
    weight_OH: Tensor,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Grid:
    """To nearest; `shuffled` inputs are grouped as GPTQ's desc_act does, `group` -1 is all."""
    inputs = weight_OH.shape[1]
    size, most = inputs if group == -1 else group, 2**bits - 1
    index = torch.arange(inputs) // size
    if shuffled:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    parts = [weight_OH.float()[:, index == g] for g in range(int(index.max()) + 1)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    if symmetric:
        high = torch.maximum(high, -low)
        scales = (2 * high / most).to(dtype).float()
        zeros = torch.full_like(low, 2 ** (bits - 1))
    else:
        scales = ((high - low) / most).to(dtype).float()
        zeros = (-low / scales).round().clamp(1, most)
    codes = (weight_OH.float() / scales[:, index] + zeros[:, index]).round().clamp(0, most)
    return Grid(codes.int(), scales, zeros.int(), index, bits)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """(N, W) codes → int32 words (N · bits / 32, W): lowest bits first, word by word."""
    per_word = 32 // bits
    words = torch.zeros(-(-len(codes) // per_word), codes.shape[1], dtype=torch.int64)
    for row in range(len(codes)):
        words[row // per_word] |= codes[row].long() << (bits * (row % per_word))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def gptq_tensors(grid: Grid, version: int = 1, dtype: torch.dtype = torch.float16) -> Tensors:
    """qweight, qzeros, scales and g_idx; version 1 stores zeros less one."""
    zeros = grid.zeros_OG.T - (1 if version == 1 else 0)
    return {
        "qweight": pack_rows(grid.codes_OH.T, grid.bits),
        "qzeros": pack_rows(zeros.T, grid.bits).T.contiguous(),
        "scales": grid.scales_OG.T.to(dtype).contiguous(),
        "g_idx": grid.index_H.int(),
    }


def awq_tensors(grid: Grid) -> Tensors:
    """qweight (H, O / 8), qzeros and scales: eight outputs a word, in AWQ's order."""

    def pack(codes_HO: Tensor) -> Tensor:
        columns = []
        for column in range(codes_HO.shape[1] // 8):
            eight = codes_HO[:, [8 * column + place for place in AWQ_ORDER]]
            columns.append(pack_rows(eight.T, 4)[0])
        return torch.stack(columns, 1)

    return {
        "qweight": pack(grid.codes_OH.T),
        "qzeros": pack(grid.zeros_OG.T),
        "scales": grid.scales_OG.T.half().contiguous(),
    }


def packed_tensors(grid: Grid) -> Tensors:
    """compressed-tensors' pack-quantized, symmetric: words along the inputs."""
    return {
        "weight_packed": pack_rows(grid.codes_OH.T, grid.bits).T.contiguous(),
        "weight_scale": grid.scales_OG.half().contiguous(),
        "weight_shape": torch.tensor(grid.codes_OH.shape),
    }


def fp8_tensors(weight_OH: Tensor, block: tuple[int, int] | None) -> tuple[Tensors, Tensor]:
    """(weight and its scale, the weights that they are); without blocks one scale for all."""
    outputs, inputs = weight_OH.shape
    high, wide = block or (outputs, inputs)
    rows, columns = -(-outputs // high), -(-inputs // wide)
    scales = torch.empty(rows, columns)
    codes = torch.empty(outputs, inputs)
    whole = torch.empty(outputs, inputs)
    for row in range(rows):
        for column in range(columns):
            place = slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide)
            part = weight_OH[place].float()
            scales[row, column] = part.abs().max() / 448
            codes[place] = (part / scales[row, column]).to(torch.float8_e4m3fn).float()
            whole[place] = codes[place] * scales[row, column]
    numbers = codes.to(torch.float8_e4m3fn)
    if block is None:
        return {"weight": numbers, "weight_scale": scales[0, 0]}, whole
    return {"weight": numbers, "weight_scale_inv": scales}, whole


Quantize = Callable[[str, Tensor], tuple[Tensors, Tensor] | None]
"""(module, weight) → its tensors and the weights that they are; None stays as it is."""


def write_quantized(
    model: PreTrainedModel, folder: Path, config: dict[str, Any], quantize: Quantize
) -> dict[str, Tensor]:
    """Write `model` with its linear layers quantized; returns module → weights in fp32.

    The model has these weights afterwards.
    """
    found: dict[str, Tensor] = {}
    model.save_pretrained(folder)  # for config.json; the weights are written again
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        made = quantize(name, module.weight.data)
        if made is None:
            continue
        tensors, weight = made
        state.pop(f"{name}.weight")
        state |= {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
        found[name] = weight
        if name != "lm_head" or not model.config.tie_word_embeddings:
            module.weight.data = weight.to(module.weight.dtype)
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / FILE)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return found


FILE = "model.safetensors"
