"""A model's profile: the mean power of each matrix's inputs, and the loss of each matrix by format.

It is measured once (`compress.sensitivity`) and kept in the user's cache beside packed weights.
Where 16-bit weights are rounded to int4 at load, it decides the formats, and scales of int4 are
chosen for the least error of the outputs.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headway.core.errors import CheckpointError
from headway.runtime.rounding import RoundedWeight, round_weight_by_power
from headway.spec import ModelSpec
from headway.spec.formats import Format

Tensors = Iterator[tuple[str, Callable[[], Tensor | RoundedWeight]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProfile:
    """One matrix of a checkpoint: its place in our module, the mean square of each input, and the
    loss of each format in nats per token."""

    module: str
    part: str | None
    shape: tuple[int, int]
    power_I: Tensor
    losses: Mapping[Format, float]

    @property
    def place(self) -> str:
        """Its name in `ModelSpec.formats`: `layers.0.attention.qkv.v`."""
        return self.module if self.part is None else f"{self.module}.{self.part}"


def write_profile(path: Path, profile: Mapping[str, MatrixProfile]) -> None:
    """Write a profile atomically. Raises OSError."""
    facts = {
        name: {
            "module": one.module,
            "part": one.part,
            "shape": one.shape,
            "losses": [[[f.kind, f.group, f.rotated], loss] for f, loss in one.losses.items()],
        }
        for name, one in profile.items()
    }
    metadata = {"profile": json.dumps(facts)}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, part = tempfile.mkstemp(".part", dir=path.parent)  # another process may write it, too
    try:
        with open(handle, "wb") as file:
            file.write(save({n: one.power_I for n, one in profile.items()}, metadata))
        os.replace(part, path)
    except OSError:
        Path(part).unlink(missing_ok=True)
        raise


def read_profile(path: Path) -> dict[str, MatrixProfile]:
    """Return the profile in a file. Raises CheckpointError where it is invalid."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["profile"])
            return {
                name: MatrixProfile(
                    module=one["module"],
                    part=one["part"],
                    shape=(one["shape"][0], one["shape"][1]),
                    power_I=file.get_tensor(name),
                    losses={
                        Format(kind, group, rotated=rotated): loss
                        for (kind, group, rotated), loss in one["losses"]
                    },
                )
                for name, one in facts.items()
            }
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"The profile {path.name} cannot be read ({error}).",
            "Remove it, and it is measured again; or give --quantization-group 64.",
        ) from error


def round_tensors(tensors: Tensors, spec: ModelSpec) -> Tensors:
    """Yield the tensors of a folder, its matrices in int4 as the profile of `spec` rounds them."""
    profile, formats = read_profile(Path(spec.profile)), dict(spec.formats)
    for name, read in tensors:
        one = profile.get(name.removesuffix(".weight"))
        format = formats.get(one.place) if one is not None else None
        if one is None or format is None or not format.group:
            yield name, read
        else:
            yield name, partial(round_matrix, read, format.group, one.power_I)


def round_matrix(
    read: Callable[[], Tensor | RoundedWeight], group: int, power_I: Tensor
) -> RoundedWeight:
    """Read and round one matrix."""
    weight = read()
    assert isinstance(weight, Tensor)
    return round_weight_by_power(weight, group, power_I)
