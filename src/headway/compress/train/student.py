"""What a student is made of for training: its rounding, its zeros, its optimizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from headway.compress.train.fake import FakeRounding
from headway.compress.train.model import TrainedModel
from headway.runtime.checkpoint import fill_randomly
from headway.runtime.rounding import RoundedWeight, round_weight
from headway.spec import read_model_spec
from headway.spec.formats import PLAIN
from headway.spec.quantization import Quantization

MOSTLY_ZERO = 0.01
"""A matrix with at least this share of zeros was pruned, and keeps them; no level 0 does."""
SCALE_FACTOR = 3.0
"""Rates of scales over those of weights. A scale's rate is a share of it: at 3e-4, 0.1% a step."""
BETAS = (0.9, 0.95)


def fresh(folder: Path, seed: int) -> TrainedModel:
    """The model of a config with random weights."""
    model = TrainedModel(read_model_spec(folder))
    fill_randomly(model.decoder, seed)
    model.make_trainable()
    return model


def round_layers(student: TrainedModel, quantization: Quantization) -> None:
    """From now on every layer multiplies as it will be served in this quantization.

    What the folder holds rounded begins with its own levels and scales.
    """
    for name, linear in student.linears.items():
        format, start = quantization.format_of(name), student.rounded.get(name)
        if start is not None or format != PLAIN:
            linear.fake = FakeRounding(start or round_weight(linear.weight, format.group))


def rounded_layers(student: TrainedModel) -> dict[str, RoundedWeight]:
    """Levels and scales of the layers that round, by name."""
    return {
        name: linear.fake.rounded(linear.weight)
        for name, linear in student.linears.items()
        if isinstance(linear.fake, FakeRounding)
    }


def keep_zeros(student: TrainedModel) -> tuple[int, Callable[[], None]]:
    """(how many weights are held at zero, what puts them back there after a step)."""
    held = []
    for name, linear in student.linears.items():
        zeros = linear.weight == 0
        if name != "head" and name not in student.rounded and zeros.float().mean() >= MOSTLY_ZERO:
            held.append((linear.weight, zeros))

    @torch.no_grad()
    def settle() -> None:
        for weight, zeros in held:
            weight.masked_fill_(zeros, 0.0)

    return sum(int(zeros.sum()) for _, zeros in held), settle


def make_optimizer(student: TrainedModel) -> Optimizer:
    """AdamW without decay: the student is to stay near its teacher, not near zero."""
    scales: list[Tensor] = []
    weights: list[Tensor] = []
    for name, parameter in student.named_parameters():
        (scales if name.endswith("stretch_OG") else weights).append(parameter)
    groups: list[dict[str, Any]] = [{"params": weights, "factor": 1.0}]
    if scales:
        groups.append({"params": scales, "factor": SCALE_FACTOR})
    return AdamW(groups, lr=1.0, betas=BETAS, weight_decay=0.0)
