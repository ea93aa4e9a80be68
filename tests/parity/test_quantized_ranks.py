"""Folders that are quantized already, cut over ranks: their numbers as they are, and one answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.config.parallel import Parallel, cut_of
from headway.core.errors import UsageError
from headway.runtime.parallel.shard import Shard
from headway.runtime.quantized.gguf_blocks import PACKINGS
from headway.runtime.rounding import RoundedWeight
from headway.spec import ModelSpec
from parity.quantized_folders import (
    Quantize,
    Tensors,
    awq_tensors,
    fp8_tensors,
    gptq_tensors,
    make_grid,
    packed_tensors,
    write_quantized,
)
from parity.rounded_weights import some_weight
from parity.tiny import tiny_model
from ranked import answers_of, requests
from resolve_cases import model

pytestmark = pytest.mark.usefixtures("one_thread")

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    "ignore": ["lm_head"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}


def of_layers(make: Any) -> Quantize:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor] | None:
        return None if name == "lm_head" else make(weight)

    return quantize


def packed(weight: Tensor) -> tuple[Tensors, Tensor]:
    grid = make_grid(weight, symmetric=True)
    return packed_tensors(grid), grid.weight


def gptq(weight: Tensor, **of: Any) -> tuple[Tensors, Tensor]:
    grid = make_grid(weight, **of)
    return gptq_tensors(grid), grid.weight


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    grid = make_grid(weight)
    return awq_tensors(grid), grid.weight


@pytest.mark.parametrize(
    ("family", "config", "make"),
    [
        ("qwen2", PACKED, packed),
        ("qwen2", GPTQ, gptq),
        ("phi3", GPTQ, gptq),
        ("qwen2", AWQ, awq),
        ("llama", FP8, lambda weight: fp8_tensors(weight, (16, 32))),
    ],
    ids=["compressed-tensors", "GPTQ with zeros", "GPTQ fused", "AWQ", "FP8 by block"],
)
def test_two_ranks_answer_as_one(tmp_path: Path, family: str, config: dict[str, Any], make: Any):
    """Attention in 2 groups of 32 inputs; of 96 neurons one rank has 32 and one 64."""
    tiny = tiny_model(family, intermediate_size=96, dtype=torch.bfloat16)
    write_quantized(tiny, tmp_path, config, of_layers(make))
    asked = requests(0, 2) + requests(1.0, 4, logprobs=2)[2:]
    one = answers_of(tmp_path, asked, sum_parts=2)
    assert answers_of(tmp_path, asked, sum_parts=2, tensor_parallel_size=2) == one


def test_weights_whose_inputs_stand_in_another_order_are_refused(tmp_path: Path):
    tiny = tiny_model("qwen2", intermediate_size=96)
    quantize = of_layers(lambda weight: gptq(weight, shuffled=True))
    write_quantized(tiny, tmp_path, GPTQ | {"desc_act": True}, quantize)
    with pytest.raises(UsageError, match="stand in another order"):
        answers_of(tmp_path, [], tensor_parallel_size=2)


FORMATS = sorted({packing.format for packing in PACKINGS.values()}, key=str)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_pieces_of_a_rounded_matrix_are_pieces_of_its_numbers(format):
    """Outputs in fused parts, and inputs, of GGUF's formats, the super-blocks among them."""
    spec = cut_spec()
    parallel = Parallel(size=2)
    qkv = some_weight(format, spec.q_size + 2 * spec.kv_size, 512)
    down = some_weight(format, 64, spec.intermediate_size)
    found: dict[str, list[RoundedWeight]] = {"qkv": [], "q": [], "down": []}
    for rank in range(2):
        shard = Shard(spec, cut_of(spec, parallel, rank, 256), rank, 2)
        found["qkv"].append(shard.of(qkv, "layers.0.attention.qkv", None))
        q = qkv.rows(slice(0, spec.q_size))
        found["q"].append(shard.of(q, "layers.0.attention.qkv", "q"))
        found["down"].append(shard.of(down, "layers.0.mlp.down", None))
    q, k, v = qkv.plain().split([spec.q_size, spec.kv_size, spec.kv_size])
    halves = zip(*(part.chunk(2) for part in (q, k, v)), strict=True)
    for fused, of_q, half in zip(found["qkv"], found["q"], halves, strict=True):
        assert torch.equal(fused.plain(), torch.cat(half)) and torch.equal(of_q.plain(), half[0])
        assert fused.fits(format)
    assert torch.equal(torch.cat([one.plain() for one in found["down"]], 1), down.plain())
    assert [one.levels_OH.shape[1] for one in found["down"]] == [256, 512]


def cut_spec() -> ModelSpec:
    """4 query and 2 KV heads of 128, 768 neurons."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "intermediate_size": 768}
    return replace(model(), **sizes)
