"""Preparation of a student for training: rounding, zeros, optimizer."""

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

MIN_ZERO_SHARE = 0.01
"""Share of zeros from which a matrix counts as pruned and keeps them."""
SCALE_FACTOR = 3.0
"""Ratio of the rates of scales and weights. A scale's rate is relative: at 3e-4, 0.1% a step."""
BETAS = (0.9, 0.95)


def random_student(folder: Path, seed: int) -> TrainedModel:
    """Return the model of a config with random weights."""
    model = TrainedModel(read_model_spec(folder))
    fill_randomly(model.decoder, seed)
    model.make_trainable()
    return model


def round_layers(student: TrainedModel, quantization: Quantization) -> None:
    """Make every layer multiply as it will be served in this quantization.

    Layers that are quantized in the folder start with its levels and scales.
    """
    for name, linear in student.linears.items():
        format, start = quantization.format_of(name), student.rounded.get(name)
        if start is not None or format != PLAIN:
            linear.fake = FakeRounding(start or round_weight(linear.weight, format.group))


def rounded_layers(student: TrainedModel) -> dict[str, RoundedWeight]:
    """Return levels and scales of the layers that round, by name."""
    return {
        name: linear.fake.rounded(linear.weight)
        for name, linear in student.linears.items()
        if isinstance(linear.fake, FakeRounding)
    }


def keep_zeros(student: TrainedModel) -> tuple[int, Callable[[], None]]:
    """Return (number of weights held at zero, function that zeros them after a step)."""
    held = []
    for name, linear in student.linears.items():
        zeros = linear.weight == 0
        if (
            name != "head"
            and name not in student.rounded
            and zeros.float().mean() >= MIN_ZERO_SHARE
        ):
            held.append((linear.weight, zeros))

    @torch.no_grad()
    def settle() -> None:
        for weight, zeros in held:
            weight.masked_fill_(zeros, 0.0)

    return sum(int(zeros.sum()) for _, zeros in held), settle


def make_optimizer(student: TrainedModel) -> Optimizer:
    """Return AdamW without weight decay, which would pull the student to zero instead of its
    teacher."""
    scales: list[Tensor] = []
    weights: list[Tensor] = []
    for name, parameter in student.named_parameters():
        (scales if name.endswith("stretch_OG") else weights).append(parameter)
    groups: list[dict[str, Any]] = [{"params": weights, "factor": 1.0}]
    if scales:
        groups.append({"params": scales, "factor": SCALE_FACTOR})
    return AdamW(groups, lr=1.0, betas=BETAS, weight_decay=0.0)
