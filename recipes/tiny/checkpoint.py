"""Checkpoints of a training run in one safetensors file.

It is given the model and its optimizer, whose moments become tensors named after the parameters.
It promises that a file is whole or absent, and that loading it continues the same run.
"""

import os
from pathlib import Path

import torch
from recipes.tiny.model import Llama
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer


def save(path: Path, model: Llama, optimizers: list[Optimizer], step: int) -> None:
    """Writes beside the old file and then takes its place.

    A moment is named after its field and its parameter: "exp_avg/embed_tokens.weight".
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            tensors |= {f"{field}/{names[parameter]}": value for field, value in state.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"step": str(step)})
    os.replace(partial, path)


def load(path: Path, model: Llama, optimizers: list[Optimizer]) -> int:
    """Restores all and returns the number of steps done."""
    tensors = load_file(path)
    model.load_state_dict(weights(tensors))
    parameters = dict(model.named_parameters())
    for optimizer in optimizers:
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        for key in (key for key in tensors if "/" in key):
            field, name = key.split("/")
            if parameters[name] in owned:
                value = tensors[key] if field == "step" else tensors[key].to(parameters[name])
                optimizer.state[parameters[name]][field] = value
    with safe_open(path, "pt") as file:
        return int(file.metadata()["step"])


def weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's part of a checkpoint: "model.norm.weight" becomes "norm.weight"."""
    prefix = "model."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
