"""Engines on quantized folders: their weights in fp32, their products, their distributions."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drive import engine_for
from headway.runtime.executor import TorchExecutor
from headway.runtime.experts import ExpertLinear
from headway.runtime.layers import Linear
from headway.runtime.quantized.folder import linear_places
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import PARTS
from parity.logits import our_logits, their_logits
from parity.tiny import prompts

LARGEST_KL = 2e-3
"""Inputs are rounded to int8 by token, which costs as much on these random models."""


def executor_of(folder: Path, **options: object) -> TorchExecutor:
    executor = engine_for(folder, **options).executor
    assert isinstance(executor, TorchExecutor)
    return executor


def linears_of(executor: TorchExecutor) -> dict[str, Linear | ExpertLinear]:
    return {
        name: module
        for name, module in executor.model.named_modules()
        if isinstance(module, Linear | ExpertLinear)
    }


def plain_weights(executor: TorchExecutor) -> dict[str, Tensor]:
    """Module of the checkpoint → its weights in fp32; of kernels in torch."""
    linears, found = linears_of(executor), {}
    for name, place in linear_places(executor.spec).items():
        if place.module not in linears:  # a router in fp32, or what latent attention absorbs
            found[name] = executor.model.get_submodule(place.module).weight
            continue
        module = linears[place.module]
        matrices = module.matrices
        if isinstance(module, ExpertLinear):
            matrices = [matrices[int(name.split(".experts.")[1].split(".")[0])]]
        rows = torch.cat([plain_of(matrix) for matrix in matrices])
        names = PARTS.get(place.module.rpartition(".")[2], (place.part,))
        sizes = module.parts if place.part else [len(rows)]
        found[name] = rows.split(list(sizes))[names.index(place.part) if place.part else 0]
    return found


def plain_of(matrix: RoundedWeight | Tensor) -> Tensor:
    return matrix.plain() if isinstance(matrix, RoundedWeight) else matrix.float()


def check_products(slow: TorchExecutor, fast: TorchExecutor) -> None:
    """Every rounded layer of `fast` multiplies as the definition, before a bias is added.

    To the bit where sums are those of integers; of fp8 within the type's rounding.
    """
    theirs = linears_of(fast)
    for name, module in linears_of(slow).items():
        other = theirs[name]
        rounded = [each for each in module.matrices if isinstance(each, RoundedWeight)]
        if not rounded:
            continue
        x = torch.randn(5, rounded[0].levels_OH.shape[1], dtype=slow.model.embedding.weight.dtype)
        assert isinstance(module, Linear) and isinstance(other, Linear)
        found = other.kernel(x, other.prepared, None)
        expected = module.kernel(x, module.prepared, None)
        exact = not any(each.kind == "fp8" for each in rounded)
        if exact and len(rounded) == len(module.matrices):
            assert torch.equal(found, expected), name
        else:  # a part in the model's type is multiplied otherwise by other kernels
            torch.testing.assert_close(found, expected)


def divergence(model: PreTrainedModel, executor: TorchExecutor) -> float:
    """KL of our next tokens from those of transformers, in the mean over a prompt."""
    (prompt,) = prompts([60])
    expected, found = (
        logits.log_softmax(-1)
        for logits in (their_logits(model, prompt), our_logits(executor, prompt))
    )
    return float((expected.exp() * (expected - found)).sum(-1).mean())
