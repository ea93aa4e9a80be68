"""Checkpoints of a training run in one safetensors file.

It is given a module and its optimizers, whose moments become tensors named after the parameters.
It promises that a file is whole or absent, and that loading it continues the same run.
"""

import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

PREFIX = "model."


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, what two names share once."""
    parameters = dict(module.named_parameters())
    kept = module.state_dict().keys()
    buffers = {name: value for name, value in module.named_buffers() if name in kept}
    return {name: value.detach() for name, value in (parameters | buffers).items()}


def save(path: Path, module: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    """Writes beside the old file and then takes its place.

    A moment is named after its field and its parameter: "exp_avg/embed_tokens.weight".
    """
    tensors = {PREFIX + name: value.contiguous() for name, value in own_tensors(module).items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            tensors |= {f"{field}/{names[parameter]}": value for field, value in state.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"step": str(step)})
    os.replace(partial, path)


def load(path: Path, module: nn.Module, optimizers: list[Optimizer]) -> int:
    """Restores all and returns the number of steps done."""
    tensors = load_file(path)
    restore(module, weights(tensors))
    parameters = dict(module.named_parameters())
    for optimizer in optimizers:
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        for key in (key for key in tensors if "/" in key):
            field, name = key.split("/")
            if parameters[name] in owned:
                value = tensors[key] if field == "step" else tensors[key].to(parameters[name])
                optimizer.state[parameters[name]][field] = value
    with safe_open(path, "pt") as file:
        return int(file.metadata()["step"])


@torch.no_grad()
def restore(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fill the module; KeyError where the file is of another one."""
    for name, place in own_tensors(module).items():
        place.copy_(tensors[name])


def weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's part of a checkpoint: "model.norm.weight" becomes "norm.weight"."""
    return {k.removeprefix(PREFIX): v for k, v in tensors.items() if k.startswith(PREFIX)}
