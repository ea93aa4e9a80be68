"""The record of KV settings that have passed the gate on this machine.

A setting is the model's weights, the windows and whole layers of `--kv-layers`, the shares of
`--kv-read` and `--kv-keep`, and the formats. A passed `headway eval … --gate` writes a file named
by the SHA-256 of the setting, which `headway serve` looks up:

    ~/.local/state/headway/kv-gates/5f0c….json      {"against": "…", "measures": [ … ]}
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.config.kv_keep import keep_share
from headway.config.kv_read import read_share
from headway.config.options import EngineOptions
from headway.config.options.against import against_arguments
from headway.config.served_spec import as_served
from headway.core.clock import SystemClock
from headway.core.errors import UsageError
from headway.edge.database import default_folder
from headway.spec import read_model_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.evals.report import EvalReport

REQUIRED_DISTANCES = [0, 300, 800]
"""Distances of lookups that such a gate has to ask, in characters from list to question."""
GATED_OPTIONS = (
    "dtype",
    "quantization",
    "quantization_group",
    "quantization_head",
    "kv_cache_dtype",
)
GATED_OPTIONS_IF_GIVEN = ("kv_cache_dtype_skip_layers", "block_size", "fp8")
"""Options that belong to the setting: always, and where they differ from the default (layers in the
model's own type, tokens of a block, the substitute of FP8)."""


def record_file(folder: Path, engine: EngineOptions) -> Path | None:
    """Return the record's file of a setting; None where the KV is complete.

    A file of `--kv-layers` with whole layers alone leaves the KV complete.
    """
    if not (engine.kv_layers or engine.kv_read or engine.kv_keep):
        return None
    whole = read_model_spec(folder)
    layers = as_served(whole, engine).layers
    if layers == tuple(
        replace(own, whole=layer.whole) for own, layer in zip(whole.layers, layers, strict=True)
    ):
        return None
    state = default_folder() / "kv-gates"
    facts: dict[str, Any] = {
        "files": digests_of(folder, state),
        "layers": [[layer.window, layer.sinks, bool(layer.bounds)] for layer in layers],
        "read": read_share(engine.kv_read),
        "formats": [getattr(engine, name) for name in GATED_OPTIONS],
    }
    if engine.kv_keep:
        facts["keep"] = [keep_share(engine.kv_keep), [layer.chooses for layer in layers]]
    defaults = EngineOptions()
    given = {name: getattr(engine, name) for name in GATED_OPTIONS_IF_GIVEN}
    facts |= {name: value for name, value in given.items() if value != getattr(defaults, name)}
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return state / f"{name}.json"


def digests_of(folder: Path, state: Path) -> list[str]:
    """Return the SHA-256 of each file of a model's weights; CheckpointError without any."""
    from headway.runtime.weight_key import content_digest, model_files

    clock = SystemClock()
    return [content_digest(path, state / "digests", clock) for path in model_files(folder)]


def has_same_weights(folder: Path, other: "EvalReport | None", state: Path) -> bool:
    """Whether a report is of a model of this machine with the weights of `folder`."""
    if other is None or not Path(other.place).exists():
        return False
    return digests_of(Path(other.place), state) == digests_of(folder, state)


def check(folder: Path, engine: EngineOptions) -> None:
    """Raise UsageError where the KV is not complete and no gate is recorded for the setting."""
    path = record_file(folder, engine)
    if path is None or path.is_file():
        return
    given = [f"--kv-layers {engine.kv_layers}"] if engine.kv_layers else []
    given += [f"--kv-read {engine.kv_read}"] if engine.kv_read else []
    given += [f"--kv-keep {engine.kv_keep}"] if engine.kv_keep else []
    named = " ".join(given)
    of_a = against_arguments(replace(engine, kv_layers="", kv_read="", kv_keep=""))
    of_b = [flag.replace("--against-", "--", 1) for flag in of_a]
    flags = " ".join([named, *of_b, *of_a])
    raise UsageError(
        f"{named} is lossy, and no gate was passed with it here for {folder.name}.",
        f"Run headway eval {folder} {flags} --against {folder} --gate --distances 0,300,800 with "
        "the other options as served, or add --allow-unverified-kv.",
    )


def record(
    folder: Path,
    engine: EngineOptions,
    report: "EvalReport",
    distances: "Sequence[int]",
    against_whole: bool = True,
) -> None:
    """Record a passed gate of a setting that leaves tokens out, and print that.

    `against_whole`: A keeps and reads all of its KV.
    """
    path = record_file(folder, engine)
    if path is None or report.comparison is None or report.comparison.failed:
        return
    if not against_whole:
        print("Not recorded for headway serve: A leaves tokens out, too.")
        return
    if not has_same_weights(folder, report.against, path.parent):
        name = report.comparison.first
        print(f"Not recorded for headway serve: {name} is no folder with the same weights.")
        print(f"Compare with what reads and keeps all of it: --against {folder}")
        return
    if missing := sorted(set(REQUIRED_DISTANCES) - set(distances)):
        apart = ",".join(map(str, missing))
        print(f"Not recorded for headway serve: lookups at {apart} characters were not asked.")
        return
    content = {
        "against": report.comparison.first,
        "measures": msgspec.to_builtins(report.comparison.measures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(content))
    print(f"The gate is passed: headway serve may start with these options. Recorded in {path}.")
