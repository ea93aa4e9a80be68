"""The two YAML files of a placement: models and machines.

    models.yaml                              machines.yaml
    models:                                  machines:
      chat:                                    small: {memory: 32GiB, price: 0.4, count: 3}
        folder: /models/chat                   large: {memory: 64GiB, price: 0.7}
        quantization: int4
        context: 8192
        sequences: 16
        replicas: 2
        apart: true
      draft: {memory: 3GiB}                    node: {memory: 80GiB, devices: 8, price: 30}
      large: {folder: /models/large, ranks: 4}

A model needs the bytes of its weights in that format, and of the KV of `sequences` sequences of
`context` tokens; or `memory` states them. A copy with several `ranks` takes a device for each, all
on one machine (`--tensor-parallel-size`). `memory` of a machine is that of each of its `devices`,
of which `reserve` stays free (2GiB by default).
"""

from pathlib import Path
from typing import Any

import msgspec

from headway.cluster.place import ModelReplica, PlacementMachine
from headway.config.cache_config import DEFAULT_BLOCK_SIZE
from headway.config.memory_plan import gib, useful_blocks, with_open_blocks
from headway.config.options.field import parse_bytes
from headway.config.parallel import MOST_RANKS, Parallel, check_cut, held_by_all
from headway.core.errors import HeadwayError, UsageError
from headway.core.yaml_file import read_yaml
from headway.spec import ModelSpec, read_model_spec
from headway.spec.kv_format import APART, ROUNDED, kv_format
from headway.spec.quantization import Quantization, planned_bytes


class PlacedModelRow(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A model's row of the file."""

    folder: str = ""
    memory: str = ""
    quantization: str = "none"
    kv: str = ""
    context: int = 0
    sequences: int = 16
    replicas: int = 1
    ranks: int = 1
    apart: bool = False

    def __post_init__(self) -> None:
        if bool(self.folder) == bool(self.memory):
            raise ValueError("it needs either folder or memory")
        if self.quantization not in ("none", "int8", "int4"):
            raise ValueError("quantization is none, int8 or int4")
        if self.kv and self.kv not in (*ROUNDED, *APART):
            names = " or ".join((*ROUNDED, *APART))
            raise ValueError(f"kv is {names}, or left out for the model's type")
        if self.context < 0 or self.sequences < 1 or not 1 <= self.replicas <= 10_000:
            raise ValueError("context, sequences and replicas are positive numbers")
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"ranks are 1 to {MOST_RANKS}")


class MachineRow(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A machine's row of the file."""

    memory: str
    price: float = 0.0
    count: int = 1
    devices: int = 1
    reserve: str = "2GiB"

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 10_000 or not 0 <= self.price < 1e9:
            raise ValueError("count is positive and price not negative")
        if not 1 <= self.devices <= MOST_RANKS:
            raise ValueError(f"devices are 1 to {MOST_RANKS}")


def read_models(path: Path) -> list[ModelReplica]:
    """Read all replicas of a file; raises UsageError that names the row and the fix."""
    replicas = []
    for name, row in rows(path, "models", PlacedModelRow):
        one = replica_of(path, name, row)
        replicas += [one] * row.replicas
    return replicas


def read_machines(path: Path) -> list[PlacementMachine]:
    """Read all machines of a file; raises UsageError that names the row and the fix."""
    machines = []
    for name, row in rows(path, "machines", MachineRow):
        usable = size(path, name, "memory", row.memory) - size(path, name, "reserve", row.reserve)
        for number in range(1, row.count + 1):
            each = f"{name}-{number}" if row.count > 1 else name
            host = PlacementMachine(
                name=each, num_bytes=max(usable, 0), price=row.price, devices=row.devices
            )
            machines.append(host)
    return machines


def rows(path: Path, key: str, kind: type[Any]) -> list[tuple[str, Any]]:
    """Return (name, row) of the mapping under `key`."""
    content = read_yaml(path, "The file")
    if not isinstance(content, dict) or not isinstance(content.get(key), dict):
        raise UsageError(
            f"{path} has no mapping {key!r}.", f"Write {key}: and a row for each name."
        )
    parsed = []
    for name, row in content[key].items():
        try:
            parsed.append((str(name), msgspec.convert(row, kind)))
        except msgspec.ValidationError as error:
            raise UsageError(f"{path}, {key}, {name}: {error}.", "Correct that row.") from error
    return parsed


def size(path: Path, name: str, field: str, text: str) -> int:
    """Parse the bytes of a field such as 32GiB."""
    try:
        num_bytes = parse_bytes(text)
        if num_bytes < 0:
            raise ValueError(text)
    except ValueError:
        raise UsageError(
            f"{path}, {name}: {field} is {text!r}.", "Write a number of bytes, such as 32GiB."
        ) from None
    return int(num_bytes)


def replica_of(path: Path, name: str, row: PlacedModelRow) -> ModelReplica:
    """Return one copy of a model with the bytes that it needs."""
    if row.memory:
        num_bytes = size(path, name, "memory", row.memory)
        return ModelReplica(
            model=name,
            num_bytes=num_bytes,
            ranks=row.ranks,
            apart=row.apart,
            why="as the file says",
        )
    folder, rounded = Path(row.folder), Quantization.of(row.quantization)
    parallel = Parallel(size=row.ranks)
    try:
        spec = read_model_spec(folder if folder.is_absolute() else path.parent / folder)
        check_cut(spec, parallel, rounded.unit)
    except HeadwayError as error:
        raise UsageError(f"{path}, {name}: {error.cause}", error.fix) from error
    weights = planned_bytes(rounded, spec, spec.dtype)
    spec = held_by_all(spec, parallel, rounded.unit)
    context = min(row.context or spec.default_len, spec.max_len)
    kv = kv_bytes(spec, row.kv or spec.dtype, context, row.sequences)
    why = (
        f"weights {gib(weights)}, KV {gib(kv)} for {row.sequences} sequences of {context:,} tokens"
    )
    return ModelReplica(
        model=name, num_bytes=weights + kv, ranks=row.ranks, apart=row.apart, why=why
    )


def kv_bytes(spec: ModelSpec, kv_dtype: str, context: int, sequences: int) -> int:
    """Return the bytes of the KV blocks that the engine would reserve for these sequences."""
    size = kv_format(kv_dtype).block_size or DEFAULT_BLOCK_SIZE
    return sum(
        useful_blocks(group, size, context, sequences, context) * group.block_bytes(kv_dtype, size)
        for group in with_open_blocks(spec.kv_groups, spec, spec.dtype, kv_dtype)
    )
