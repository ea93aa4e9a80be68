"""The disk tier of an executor: its folder, named by all that the bytes of a block depend on.

A block may be read only by an engine that would compute the same bytes: the same checkpoint,
kernels, instruction set, threads, types, formats, layout, block size and served context. With any
difference it is another folder.
"""

import hashlib
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

import torch

from headway import __version__
from headway.config.resolve import Settings
from headway.core.clock import SystemClock
from headway.core.errors import HeadwayError
from headway.runtime.attention.cache import KVLayer
from headway.runtime.checkpoint_files import MALFORMED
from headway.runtime.kvstore.disk import DiskStore, InUseError
from headway.runtime.kvstore.transfers import DiskTransfers
from headway.runtime.native.available import best_instruction_set, compiled_module
from headway.runtime.weight_key import content_digest, model_files
from headway.spec import ModelSpec

log = logging.getLogger(__name__)

FORMAT = 2
"""Version of the meaning of a block's bytes; increase it when that changes."""


def open_disk(
    folder: Path, spec: ModelSpec, settings: Settings, layers: list[KVLayer]
) -> DiskTransfers | None:
    """Return the configured disk tier; None if there is none or, with a warning, on errors."""
    if not settings.cache.disk_bytes:
        return None
    try:
        root = Path(settings.cache.disk_folder or default_folder()).expanduser().absolute()
        mark = fingerprint(folder, spec, settings, layers, root)
        store = DiskStore(root, mark, settings.cache.disk_bytes)
    except InUseError as error:
        log.warning("The KV disk tier is off: %s. Name another folder with --kv-disk.", error)
        return None
    except (OSError, RuntimeError, HeadwayError, *MALFORMED) as error:
        log.warning(
            "The KV disk tier is off: %s. Name a folder that can be written with --kv-disk.", error
        )
        return None
    return DiskTransfers(layers, len(settings.cache.num_blocks), store)


def default_folder() -> Path:
    """Return $XDG_CACHE_HOME/headway/kv. Raises RuntimeError without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headway" / "kv"


def fingerprint(
    folder: Path, spec: ModelSpec, settings: Settings, layers: list[KVLayer], root: Path
) -> bytes:
    """Return the SHA-256 of all that a block's bytes depend on. Raises OSError, HeadwayError.

    Random weights have no files: `spec` and the seed define them.
    """
    instruction_set, _ = best_instruction_set()
    files = model_files(folder) if settings.load_format != "dummy" else []
    if instruction_set:
        files = [*files, compiled_module()]
    digests, clock = root.parent / "kv-digests", SystemClock()
    facts = {
        "format": FORMAT,
        "version": [__version__, torch.__version__],
        "files": [[path.name, content_digest(path, digests, clock)] for path in files],
        "instruction_set": instruction_set,
        "settings": [
            *(settings.device, settings.dtype, settings.kernels, settings.attention_backend),
            *(settings.threads, settings.max_model_len, settings.load_format),
            *([settings.seed] if settings.load_format == "dummy" else []),
        ],
        "formats": [[pattern, asdict(format)] for pattern, format in settings.quantization.formats],
        "cache": [
            *(settings.cache.block_size, settings.cache.dtype, list(settings.cache.windows)),
            list(settings.cache.sinks),
        ],
        "spec": repr(spec),
        "layers": [layout(layer) for layer in layers],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def layout(layer: KVLayer) -> list[object]:
    """Return the layer's class, its group, and types and shapes of its parts."""
    parts = [[str(part.dtype), list(part.shape[1:])] for part in layer.parts]
    return [type(layer).__name__, layer.group, parts]
