"""Which ways of keeping or reading fewer tokens have passed the gate, on this machine's record.

A way is a model's weights, the windows and whole layers of `--kv-layers`, the shares of `--kv-read`
and `--kv-keep`, and the formats beside them. `headway eval … --gate` that it passes writes a file
named by their SHA-256, and `headway serve` asks for it:

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

    from headway.evals.report import Report

DISTANCES = [0, 300, 800]
"""Lookups that a gate of fewer tokens has to ask, in characters between list and question."""
KEPT_ALIKE = ("dtype", "quantization", "quantization_group", "quantization_head", "kv_cache_dtype")
GIVEN_ALIKE = ("kv_cache_dtype_skip_layers", "block_size", "fp8")
"""Options that are a fact of the way where they are given: layers in the model's own type, tokens
of a block, whose bounds are read, and what FP8 becomes."""


def record_file(folder: Path, engine: EngineOptions) -> Path | None:
    """Where it is written that this way has passed; None where nothing is left out.

    A file of `--kv-layers` that only calls layers whole leaves nothing out by itself.
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
        "formats": [getattr(engine, name) for name in KEPT_ALIKE],
    }
    if engine.kv_keep:
        facts["keep"] = [keep_share(engine.kv_keep), [layer.chooses for layer in layers]]
    defaults = EngineOptions()
    given = {name: getattr(engine, name) for name in GIVEN_ALIKE}
    facts |= {name: value for name, value in given.items() if value != getattr(defaults, name)}
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return state / f"{name}.json"


def digests_of(folder: Path, state: Path) -> list[str]:
    """SHA-256 of each file that a model's weights depend on; raises CheckpointError without any."""
    from headway.runtime.weight_key import content_digest, model_files

    clock = SystemClock()
    return [content_digest(path, state / "digests", clock) for path in model_files(folder)]


def is_of_the_same_weights(folder: Path, other: "Report | None", state: Path) -> bool:
    """Whether a report is of a model of this machine with the weights of `folder`."""
    if other is None or not Path(other.place).exists():
        return False
    return digests_of(Path(other.place), state) == digests_of(folder, state)


def check(folder: Path, engine: EngineOptions) -> None:
    """UsageError where tokens are left out and no gate was passed so."""
    path = record_file(folder, engine)
    if path is None or path.is_file():
        return
    given = [f"--kv-layers {engine.kv_layers}"] if engine.kv_layers else []
    given += [f"--kv-read {engine.kv_read}"] if engine.kv_read else []
    given += [f"--kv-keep {engine.kv_keep}"] if engine.kv_keep else []
    named = " ".join(given)
    of_a = against_arguments(replace(engine, kv_layers="", kv_read="", kv_keep=""))
    of_b = [flag.replace("--against-", "--", 1) for flag in of_a]
    asked = " ".join([named, *of_b, *of_a])
    raise UsageError(
        f"{named} is lossy, and no gate was passed with it here for {folder.name}.",
        f"Run headway eval {folder} {asked} --against {folder} --gate --distances 0,300,800 with "
        "the other options as served, or add --allow-unverified-kv.",
    )


def record(
    folder: Path,
    engine: EngineOptions,
    report: "Report",
    distances: "Sequence[int]",
    against_whole: bool = True,
) -> None:
    """Write down a gate that was passed, where something is left out, and say so.

    `against_whole`: A keeps and reads all of its KV.
    """
    path = record_file(folder, engine)
    if path is None or report.comparison is None or report.comparison.failed:
        return
    if not against_whole:
        print("Not recorded for headway serve: A leaves tokens out, too.")
        return
    if not is_of_the_same_weights(folder, report.against, path.parent):
        name = report.comparison.first
        print(f"Not recorded for headway serve: {name} is no folder of the same weights.")
        print(f"Compare with what reads and keeps all of it: --against {folder}")
        return
    if missing := sorted(set(DISTANCES) - set(distances)):
        apart = ",".join(map(str, missing))
        print(f"Not recorded for headway serve: lookups at {apart} characters were not asked.")
        return
    content = {
        "against": report.comparison.first,
        "measures": msgspec.to_builtins(report.comparison.measures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(content))
    print(f"The gate is passed: headway serve may start so. Recorded in {path}.")
