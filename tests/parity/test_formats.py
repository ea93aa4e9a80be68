"""Folders that others have quantized: the same numbers as their writers', and their logits.

Weights are compared with plain dequantization in fp32; products with the definition in
`runtime/kernels/reference.py`, bit for bit; distributions with transformers on the same weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headway.spec.quantization import planned_bytes
from parity.quantized_folders import (
    Grid,
    Quantize,
    Tensors,
    awq_tensors,
    fp8_tensors,
    gptq_tensors,
    make_grid,
    write_quantized,
)
from parity.quantized_models import (
    LARGEST_KL,
    check_products,
    divergence,
    executor_of,
    plain_weights,
)
from parity.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def of_layers(make: Callable[[Tensor], tuple[Tensors, Tensor]]) -> Quantize:
    """All linear layers but the head and routers."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor] | None:
        return None if name == "lm_head" or name.endswith("mlp.gate") else make(weight)

    return quantize


def by_grid(tensors: Callable[..., Tensors], of: dict[str, Any], **options: Any) -> Quantize:
    """Integers on a grid with these properties, in the tensors of a format."""

    def make(weight: Tensor) -> tuple[Tensors, Tensor]:
        grid: Grid = make_grid(weight, **of)
        return tensors(grid, **options), grid.weight

    return of_layers(make)


def gptq(config: dict[str, Any], version: int = 1, **of: Any) -> tuple[dict[str, Any], Quantize]:
    """GPTQ's config, and what quantizes so."""
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    return said | config, by_grid(gptq_tensors, of, version=version)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CASES: dict[str, tuple[dict[str, Any], Quantize]] = {
    "gptq": gptq({}),
    "gptq, version 2": gptq({"checkpoint_format": "gptq_v2"}, version=2),
    "gptq, version 2 not said": gptq({"checkpoint_format": "gptq"}, version=2),
    "gptq, version 1 not said": gptq({"checkpoint_format": "gptq_v2"}),
    "gptq, symmetric": gptq({"sym": True}, symmetric=True),
    "gptq, symmetric, version 2 not said": gptq({"sym": True}, version=2, symmetric=True),
    "gptq, desc_act": gptq({"desc_act": True}, shuffled=True),
    "gptq, all inputs": gptq({"group_size": -1}, group=-1),
    "gptq, 8 bits": gptq({"bits": 8}, bits=8),
    "gptq, 8 bits, symmetric, all inputs": gptq(
        {"bits": 8, "group_size": -1, "sym": True}, bits=8, group=-1, symmetric=True
    ),
    "awq": (AWQ, by_grid(awq_tensors, {})),
    "awq, all inputs": (AWQ | {"group_size": -1}, by_grid(awq_tensors, {"group": -1})),
    "awq, symmetric": (AWQ, by_grid(awq_tensors, {"symmetric": True})),
    "fp8, by tensor": (FP8, of_layers(lambda weight: fp8_tensors(weight, None))),
    "fp8, by block": (
        FP8 | {"weight_block_size": [48, 32]},
        of_layers(lambda weight: fp8_tensors(weight, (48, 32))),
    ),
}


def small(family: str = "qwen2", **changes: object) -> PreTrainedModel:
    """Inputs of 64 and 96; q of 64 rows beside k and v of 32; biases."""
    return tiny_model(family, **{"intermediate_size": 96, **changes})


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_writer(case: str, tmp_path: Path):
    """Weights within fp32's rounding, products bit for bit, logits near those of transformers."""
    config, quantize = CASES[case]
    model = small()
    expected = write_quantized(model, tmp_path, config, quantize)
    slow, fast = executor_of(tmp_path, kernels="torch"), executor_of(tmp_path)
    found = plain_weights(slow)
    assert len(expected) == 14
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7, msg=name)
    check_products(slow, fast)
    if fast.kernels.library is not None:
        assert fast.kernels.reasons["quantized"][0] == "native"
        assert fast.target.program is not None
    assert divergence(model, slow) < LARGEST_KL
    planned = planned_bytes(fast.settings.quantization, fast.spec, "float32")
    assert planned * 0.9 < fast.describe().weight_bytes < planned * 2.5
