"""Checkpoints of a training run in one safetensors file.

It is given the model and its optimizer, whose moments become tensors named after the parameters.
It promises that a file is whole or absent, and that loading it continues the same run.
"""

import os
from pathlib import Path

import torch
from recipes.first.model import Llama
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer

FIELDS = ("step", "exp_avg", "exp_avg_sq")


def save(path: Path, model: Llama, optimizer: Optimizer, step: int) -> None:
    """Writes beside the old file and then takes its place."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for field in FIELDS:
            tensors[f"{field}.{name}"] = optimizer.state[parameter][field]
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"step": str(step)})
    os.replace(partial, path)


def load(path: Path, model: Llama, optimizer: Optimizer) -> int:
    """Restores both and returns the number of steps done."""
    tensors = load_file(path)
    model.load_state_dict(weights(tensors))
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {field: tensors[f"{field}.{name}"] for field in FIELDS}
    with safe_open(path, "pt") as file:
        return int(file.metadata()["step"])


def weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's part of a checkpoint: "model.norm.weight" becomes "norm.weight"."""
    prefix = "model."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
