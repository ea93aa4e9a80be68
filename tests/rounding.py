"""Model folders with rounded weights: the plainest quantization, to see whether an eval notices it.

Every matrix of a checkpoint is rounded to the nearest level and written back in its own type, as an
ordinary folder. Symmetric: the largest weight of a group is its largest level. Worked example, two
bits (levels -1, 0, 1) and groups of 4:

    0.9 -0.5 0.4 0.1 | 0.2 0.1 -0.1 0.0     scales 0.9 and 0.2
    0.9 -0.9 0.0 0.0 | 0.2 0.0  0.0 0.0     (0.1 is half of 0.2: ties go to the even level)
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """So many bits a weight, a scale for so many neighbours of a row; 0: one for the row."""

    bits: int
    group: int = 0


ROUNDINGS = {
    "int8": Rounding(bits=8),
    "int4": Rounding(bits=4, group=64),
    "int2": Rounding(bits=2, group=64),
}


def rounded(weight_OI: Tensor, rounding: Rounding) -> Tensor:
    """`weight_OI` with every row's groups rounded; the last group of a row may be shorter."""
    size = weight_OI.shape[1]
    group = rounding.group or size
    padded = functional.pad(weight_OI.float(), (0, -size % group)).unflatten(1, (-1, group))
    largest_level = 2 ** (rounding.bits - 1) - 1
    scale = padded.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest_level
    return (torch.round(padded / scale) * scale).flatten(1)[:, :size].to(weight_OI.dtype)


def write_rounded(folder: Path, out: Path, rounding: Rounding) -> Path:
    """Write `folder` to `out`, its matrices rounded, everything else as it is."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                tensors[name] = rounded(tensor, rounding).contiguous()
        save_file(tensors, out / path.name, metadata=metadata)
    return out
