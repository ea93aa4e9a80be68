"""GGUF files of any content, right or wrong, written from the format's description."""

import json
import struct
from pathlib import Path
from typing import Any

from headway.spec.gguf.types import TYPES

NUMBERS = {each.name: number for number, each in TYPES.items()}
LETTERS = {4: "I", 5: "i", 6: "f", 7: "?", 10: "Q"}
STRING, ARRAY = 8, 9
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name → (format, shape with rows first, bytes)."""


def text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def kind_of(value: Any) -> int:
    """The type that a Python value is written as: numbers take 32 bits where they fit."""
    if isinstance(value, bool):
        return 7
    if isinstance(value, str | bytes):
        return STRING
    if isinstance(value, float):
        return 6
    if isinstance(value, int):
        return 5 if value < 0 else 4 if value < 1 << 32 else 10
    raise TypeError(value)


def scalar(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(f"<{LETTERS[kind]}", value)


def pair(key: str, value: Any) -> bytes:
    """One key with its value; a list becomes an array, whole numbers in it int32."""
    if not isinstance(value, list):
        kind = kind_of(value)
        return text(key) + struct.pack("<I", kind) + scalar(kind, value)
    kind = 5 if all(type(item) is int for item in value) else kind_of(value[0])
    items = b"".join(scalar(kind, item) for item in value)
    return text(key) + struct.pack("<IIQ", ARRAY, kind, len(value)) + items


def header(metadata: dict[str, Any], tensors: Tensors, version: int = 3, align: int = 32) -> bytes:
    """Everything before the tensors' numbers, filled up to the alignment."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [pair(key, value) for key, value in metadata.items()]
    offset = 0
    for name, (kind, shape, data) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(text(name) + dims + struct.pack("<IQ", NUMBERS[kind], offset))
        offset += -(-len(data) // align) * align
    joined = b"".join(parts)
    return joined + bytes(-len(joined) % align)


def file_bytes(
    metadata: dict[str, Any], tensors: Tensors, version: int = 3, align: int = 32
) -> bytes:
    """A whole file."""
    if align != 32:
        metadata = {**metadata, "general.alignment": align}
    data = b"".join(part + bytes(-len(part) % align) for _, _, part in tensors.values())
    return header(metadata, tensors, version, align) + data


def write(path: Path, metadata: dict[str, Any], tensors: Tensors, **how: int) -> Path:
    path.write_bytes(file_bytes(metadata, tensors, **how))
    return path


def write_split(path: Path, metadata: dict[str, Any], tensors: Tensors, count: int) -> list[Path]:
    """A model in `count` files as llama-gguf-split writes it, the metadata in the first."""
    names = list(tensors)
    files = []
    for number in range(count):
        own = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        part = {name: tensors[name] for name in names[number::count]}
        file = path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}.gguf")
        files.append(write(file, own | (metadata if number == 0 else {}), part))
    return files


def vocabulary_of(folder: Path, pre: str = "", whole: bool = False) -> dict[str, Any]:
    """What converters write of a folder's tokenizer.

    `pre` names the splitting of a byte-level one; `whole` adds tokenizer.json itself. The scores of
    a SentencePiece vocabulary fall with the ids, as its trainer numbers them.
    """
    document = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    model, added = document["model"], {each["id"]: each for each in document["added_tokens"]}
    by_id = {i: token for token, i in model["vocab"].items()}
    by_id |= {i: each["content"] for i, each in added.items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id) + 1)]
    types = [
        (3 if added[i]["special"] else 4) if i in added else 1 if i in by_id else 5
        for i in range(len(tokens))
    ]
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if model.get("byte_fallback"):
        types = [6 if token.startswith("<0x") else kind for token, kind in zip(tokens, types)]
        types[0] = 2
        scores = [0.0 if kind in (2, 3, 6) else -float(i) for i, kind in enumerate(types)]
        metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
    else:
        merges = [" ".join(merge) for merge in model["merges"]]
        metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
        metadata["tokenizer.ggml.pre"] = pre
    metadata["tokenizer.ggml.token_type"] = types
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = config.get(f"{name}_token")
        if token in tokens:
            metadata[f"tokenizer.ggml.{key}_token_id"] = tokens.index(token)
    beside = folder / "chat_template.jinja"
    template = beside.read_text() if beside.exists() else config.get("chat_template")
    if template:
        metadata["tokenizer.chat_template"] = template
    if whole:
        metadata["tokenizer.huggingface.json"] = json.dumps(document)
    return metadata


LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 8,
    "llama.vocab_size": 8,
}
"""Metadata of a small Llama."""


def zeros(kind: str, *shape: int) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor of zero bytes."""
    count = 1
    for size in shape:
        count *= size
    return kind, shape, bytes(TYPES[NUMBERS[kind]].bytes_of(count))


def llama_tensors(kind: str = "Q4_0") -> Tensors:
    """Tensors of zeros for `LLAMA`."""
    return {
        "token_embd.weight": zeros(kind, 8, 32),
        "output_norm.weight": zeros("F32", 32),
        "blk.0.attn_norm.weight": zeros("F32", 32),
        "blk.0.attn_q.weight": zeros(kind, 32, 32),
        "blk.0.attn_k.weight": zeros(kind, 16, 32),
        "blk.0.attn_v.weight": zeros(kind, 16, 32),
        "blk.0.attn_output.weight": zeros(kind, 32, 32),
        "blk.0.ffn_norm.weight": zeros("F32", 32),
        "blk.0.ffn_gate.weight": zeros(kind, 64, 32),
        "blk.0.ffn_up.weight": zeros(kind, 64, 32),
        "blk.0.ffn_down.weight": zeros(kind, 32, 64),
    }
