"""Checkpoints of a training run in one safetensors file.

Optimizer moments are tensors named after the parameters. A file is complete or absent, and a loaded
one continues the same run.
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
    """Return parameters and buffers by name; a shared tensor occurs once."""
    parameters = dict(module.named_parameters())
    persistent = module.state_dict().keys()
    buffers = {name: value for name, value in module.named_buffers() if name in persistent}
    return {name: value.detach() for name, value in (parameters | buffers).items()}


def save(path: Path, module: nn.Module, optimizers: list[Optimizer], step: int) -> None:
    """Write a temporary file and rename it.

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
    """Restore module and optimizers; return the number of finished steps."""
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
    """Fill the module; raises KeyError if the file belongs to another one."""
    for name, place in own_tensors(module).items():
        place.copy_(tensors[name])


def weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's part of a checkpoint: "model.norm.weight" becomes "norm.weight"."""
    return {k.removeprefix(PREFIX): v for k, v in tensors.items() if k.startswith(PREFIX)}
