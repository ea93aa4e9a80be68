"""The output folder of an interrupted run: finished layers survive a kill, and the next run
resumes.

`OUT.partial` holds one file of rounded matrices per layer, and the key of the settings. It is
renamed to OUT when all is written and judged.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.core.errors import UsageError
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import Format

KEY_FILE = "asked.json"
WORK = "work"


@dataclass(slots=True)
class QuantizedLayer:
    """Result of quantizing one layer: matrices by (name, format), their losses, changed plain
    tensors."""

    matrices: dict[tuple[str, Format], RoundedWeight] = field(default_factory=dict)
    plain: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    uncalibrated: list[str] = field(default_factory=list)
    """Matrices that no token reached."""


def format_named(kind: str, group: str) -> Format:
    """Return the format whose kind and group are in the name of a tensor of a `Partial`."""
    known = {"int8": Format("int8"), "int4": Format("int4")}
    return replace(known[kind], group=int(group))


class Partial:
    """The folder beside OUT with the unfinished work."""

    def __init__(self, out: Path, key: str) -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} exists already.", "Name a folder that does not exist yet.")
        self.out = out
        self.folder = out.with_name(f"{out.name}.partial")
        self.work = self.folder / WORK
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            marker = self.work / KEY_FILE
            if not marker.exists() or json.loads(marker.read_text()) != key:
                shutil.rmtree(self.folder)
                self.work.mkdir(parents=True)
                marker.write_text(json.dumps(key))
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.folder} cannot be used: {error}.", "Remove it.") from None

    def path(self, name: str) -> Path:
        return self.work / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        """Whether this layer (`layer-3`) or the head is finished."""
        return self.path(name).exists()

    def save(self, name: str, rounded: QuantizedLayer) -> None:
        """Save a layer; its file is complete or absent."""
        tensors: dict[str, Tensor] = {}
        for (matrix, format), weight in rounded.matrices.items():
            prefix = f"{format.kind}|{format.group}|{matrix}"
            tensors[f"{prefix}|levels"] = weight.levels_OH.contiguous()
            tensors[f"{prefix}|scales"] = weight.scales_OG.contiguous()
        tensors |= {f"plain||{n}|": t.contiguous() for n, t in rounded.plain.items()}
        metadata = {
            "losses": json.dumps(rounded.losses),
            "unseen": json.dumps(rounded.uncalibrated),
        }
        path = self.path(name)
        try:
            save_file(tensors, path.with_suffix(".new"), metadata=metadata)
            os.replace(path.with_suffix(".new"), path)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} cannot be written: {error}.", "Free some disk.") from None

    def load(self, name: str) -> QuantizedLayer:
        """Load a saved layer."""
        layer = QuantizedLayer()
        parts: dict[tuple[str, Format], dict[str, Tensor]] = {}
        with safe_open(self.path(name), framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118
                kind, group, matrix, which = key.split("|")
                if kind == "plain":
                    layer.plain[matrix] = file.get_tensor(key)
                else:
                    own = parts.setdefault((matrix, format_named(kind, group)), {})
                    own[which] = file.get_tensor(key)
        for (matrix, format), both in parts.items():
            layer.matrices[matrix, format] = RoundedWeight(
                both["levels"], both["scales"], format.group
            )
        layer.losses = json.loads(metadata.get("losses", "{}"))
        layer.uncalibrated = json.loads(metadata.get("unseen", "[]"))
        return layer

    def finish(self) -> None:
        """Delete the intermediate files and rename the folder."""
        shutil.rmtree(self.work)
        if self.out.is_dir():
            self.out.rmdir()
        self.folder.rename(self.out)
