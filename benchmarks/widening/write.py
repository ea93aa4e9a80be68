"""Writes the widened folder: config, weights one piece at a time, tokenizer, a card.

Given a folder, a shape and an empty place it promises a whole model folder or none. Memory stays
at the small model and one tensor of a layer, whatever the shape.
"""

import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch

from headway.core.errors import CheckpointError, UsageError
from headway.runtime.checkpoint import Progress, stream_tensors
from headway.runtime.checkpoint_files import find_files
from headway.spec import DTYPE_BYTES, read_json, read_model_spec
from widening.eagle import widen_eagle
from widening.heads import widen_heads
from widening.plan import Widening, plan_widening
from widening.shapes import Shape
from widening.tensors import Entry, entries

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
CARRIED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
    "rope_theta",
    "rope_parameters",
)
"""Keys of config.json that stay as they are."""
SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16"}
CARD = """# {small}, widened

This is `{small}` in the sizes of a {architecture} with {layers} layers of {hidden}: it gives
the same logits and costs what a model of {parameters:,} parameters costs. It knows no more than
`{small}` does.

Written by `python benchmarks/widen.py`; ids from {vocab} on belong to no text and are never chosen.
"""


def widen(
    folder: Path, like: Shape, out: Path, *, dtype: str = "auto", progress: Progress | None = None
) -> Widening:
    """Write `out`; raises HeadwayError before anything is written when it cannot be done.

    `dtype` is bfloat16 or float32; auto keeps a bfloat16 folder as it is and takes float32 else.
    """
    spec = read_model_spec(folder)
    plan = plan_widening(spec, like, dtype)
    small = read_small(folder, plan)
    tensors = entries(plan, small)
    size = sum(prod(entry.shape) for entry in tensors) * DTYPE_BYTES[plan.dtype]
    with new_folder(out, size):
        for name in COPIED:
            if (folder / name).exists():
                shutil.copyfile(folder / name, out / name)
        write_safetensors(out / "model.safetensors", tensors, plan.dtype, progress)
        widen_heads(folder, plan, out)
        widen_eagle(folder, plan, out)
        (out / "README.md").write_text(card(folder, plan, tensors), encoding="utf-8")
        config = config_of(plan, read_json(folder / "config.json"))
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return plan


def read_small(folder: Path, plan: Widening) -> dict[str, torch.Tensor]:
    """The small model's weights; CheckpointError when one that is painted is missing or odd."""
    found = dict(stream_tensors(find_files(folder)))
    for name, shape in small_shapes(plan).items():
        tensor = found.get(name)
        if tensor is None:
            raise CheckpointError(f"{folder} has no weight {name}.", "Copy the folder again.")
        if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point:
            raise CheckpointError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; config.json implies {shape}.",
                "Check that config.json and the weights are of the same model.",
            )
    return found


def small_shapes(plan: Widening) -> dict[str, tuple[int, ...]]:
    """The small model's own tensors, by checkpoint name."""
    s = plan.small
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (s.vocab_size, s.hidden_size),
        "model.norm.weight": (s.hidden_size,),
    }
    layer = {
        "input_layernorm": (s.hidden_size,),
        "post_attention_layernorm": (s.hidden_size,),
        "self_attn.q_proj": (s.q_size, s.hidden_size),
        "self_attn.k_proj": (s.kv_size, s.hidden_size),
        "self_attn.v_proj": (s.kv_size, s.hidden_size),
        "self_attn.o_proj": (s.hidden_size, s.q_size),
        "mlp.gate_proj": (s.intermediate_size, s.hidden_size),
        "mlp.up_proj": (s.intermediate_size, s.hidden_size),
        "mlp.down_proj": (s.hidden_size, s.intermediate_size),
    }
    for i in range(s.num_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


@contextmanager
def new_folder(out: Path, size: int) -> Iterator[None]:
    """Make `out`, empty until now; what was written goes again when the writing fails."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file.", "Name a folder that does not exist yet.")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty.", "Name a folder that does not exist yet.")
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise UsageError(f"{out} cannot be made: {error.strerror}.", "Name another.") from None
    try:
        if free < size:
            raise UsageError(
                f"{out} needs {size / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free there.",
                "Name a folder on another disk, or a smaller shape.",
            )
        yield
    except BaseException as error:
        for path in out.iterdir():
            path.unlink()
        if not existed:
            out.rmdir()
        if isinstance(error, OSError):
            raise UsageError(f"{out}: {error.strerror or error}.", "Name another.") from error
        raise


def write_safetensors(
    path: Path, tensors: list[Entry], dtype: str, progress: Progress | None = None
) -> None:
    """One file, its header first, then each tensor piece by piece as it is made."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in tensors:
        begin, end = end, end + prod(entry.shape) * DTYPE_BYTES[dtype]
        header[entry.name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": entry.shape,
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    done = 0
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for entry in tensors:
            for piece in entry.make():
                file.write(piece.contiguous().view(torch.uint8).numpy().data)
                done += piece.nbytes
                if progress is not None:
                    progress(done, end)
    assert done == end, "a tensor was not made in its own size"


def config_of(plan: Widening, small: dict[str, Any]) -> dict[str, Any]:
    """The large shape's config.json; what belongs to the text and the rope stays the small one's.

    `rms_norm_eps` shrinks with the mean square: 1e-5 · 9/14 with three copies of 192 in 896.
    """
    large = plan.large
    config: dict[str, Any] = {
        "architectures": [large.architecture],
        "model_type": large.model_type,
        "hidden_size": large.hidden_size,
        "num_hidden_layers": large.num_layers,
        "num_attention_heads": large.num_heads,
        "num_key_value_heads": large.num_kv_heads,
        "head_dim": large.head_dim,
        "intermediate_size": large.intermediate_size,
        "vocab_size": large.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": plan.rms_norm_eps,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "torch_dtype": plan.dtype,
        "use_cache": True,
    }
    if not large.qkv_bias:
        config |= {"attention_bias": False, "mlp_bias": False}
    return config | {key: small[key] for key in CARRIED if key in small}


def card(folder: Path, plan: Widening, tensors: list[Entry]) -> str:
    """What somebody reads who finds the folder."""
    return CARD.format(
        small=folder.resolve().name,
        architecture=plan.large.architecture,
        layers=plan.large.num_layers,
        hidden=plan.large.hidden_size,
        parameters=sum(prod(entry.shape) for entry in tensors),
        vocab=plan.small.vocab_size,
    )
