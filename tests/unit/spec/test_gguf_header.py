"""GGUF headers: what is read, and what lies."""

import random
import resource
import struct
import time
from pathlib import Path

import pytest

import gguf_file
from headway.core.errors import CheckpointError, ModelError, UnsupportedModelError
from headway.spec import read_model_spec
from headway.spec.gguf.header import MOST_HEADER_BYTES, read_header
from headway.spec.model_files import read_document

VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
METADATA = {**gguf_file.LLAMA, **VOCABULARY}
TENSORS = gguf_file.llama_tensors()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def refuse(file: Path, content: bytes, words: str, error: type = CheckpointError) -> None:
    file.write_bytes(content)
    with pytest.raises(error, match=words):
        read_header(file)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("align", [32, 8, 4096])
def test_what_a_header_says_is_read(file: Path, version: int, align: int):
    tensors = gguf_file.llama_tensors("Q8_0")
    gguf_file.write(file, METADATA, tensors, version=version, align=align)
    header = read_header(file)
    assert header.version == version
    for key, value in METADATA.items():
        read = header.metadata[key]
        texts = isinstance(value, list) and isinstance(value[0], str)
        assert read == ([each.encode() for each in value] if texts else value)
    assert {name: info.shape for name, info in header.tensors.items()} == {
        name: shape for name, (_, shape, _) in tensors.items()
    }
    down = header.tensors["blk.0.ffn_down.weight"]
    assert down.type.name == "Q8_0" and down.end - down.begin == 32 * 64 // 32 * 34
    assert down.begin % align == 0


def test_numbers_of_32_bits_are_read_as_they_were_written(file: Path):
    """0.22 in fp32 is 0.2199999988…; NaN and what needs all its digits stay."""
    values = {
        "a.b": 0.22,
        "a.c": 1e-5,
        "a.d": 16777216.0,
        "a.e": float("inf"),
        "a.f": 3.4028234663852886e38,
    }
    gguf_file.write(file, values, {})
    assert read_header(file).metadata == values


def test_changed_file_is_read_again(file: Path):
    gguf_file.write(file, {"a": 1}, {})
    assert read_header(file).metadata == {"a": 1}
    gguf_file.write(file, {"a": 2, "b": 3}, {})
    assert read_header(file).metadata == {"a": 2, "b": 3}


def good() -> bytearray:
    return bytearray(gguf_file.file_bytes(METADATA, gguf_file.llama_tensors()))


def test_files_that_are_none(file: Path):
    refuse(file, b"", "is empty")
    refuse(file, b"GG", "ends within its first bytes")
    refuse(file, b"PK\3\4" + bytes(64), "does not begin as GGUF does")
    with pytest.raises(CheckpointError, match="no file"):
        read_header(file.with_name("other.gguf"))


@pytest.mark.parametrize(("version", "words"), [(1, "version 1"), (4, "version 4"), (0, "version")])
def test_other_versions_are_refused(file: Path, version: int, words: str):
    content = good()
    content[4:8] = struct.pack("<I", version)
    refuse(file, bytes(content), words, UnsupportedModelError)


def test_big_endian_files_are_refused_by_name(file: Path):
    content = b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64)
    refuse(file, content, "big-endian(.|\n)*little-endian", UnsupportedModelError)


def test_split_files_are_one_model(file: Path):
    first, second, third = gguf_file.write_split(file, METADATA, TENSORS, 3)
    header = read_header(first)
    whole = read_header(gguf_file.write(file, METADATA, TENSORS))
    assert {name: info.shape for name, info in header.tensors.items()} == {
        name: info.shape for name, info in whole.tensors.items()
    }
    assert {info.path for info in header.tensors.values()} == {first, second, third}
    for name, (_, _, data) in TENSORS.items():
        info = header.tensors[name]
        assert info.path.read_bytes()[info.begin : info.end] == data


def test_what_is_wrong_with_split_files_is_named(file: Path):
    first, second, third = gguf_file.write_split(file, METADATA, TENSORS, 3)
    with pytest.raises(UnsupportedModelError, match=rf"Name the first one: {first.name}"):
        read_header(second)
    alone = first.rename(file.with_name("alone.gguf"))
    with pytest.raises(UnsupportedModelError, match="one of 3 files"):
        read_header(alone)
    alone.rename(first)
    content = third.read_bytes()
    third.unlink()
    with pytest.raises(CheckpointError, match=third.name):
        read_header(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match="is file 1 of 3 by its metadata, and 2 of 3"):
        read_header(first)
    name, tensor = next(iter(TENSORS.items()))
    gguf_file.write(third, {"split.no": 2, "split.count": 3}, {name: tensor})
    with pytest.raises(CheckpointError, match="of an earlier file again"):
        read_header(first)
    gguf_file.write(third, {"split.no": 2, "split.count": 3}, {})
    with pytest.raises(CheckpointError, match=r"promises .* tensors"):
        read_header(first)
    third.write_bytes(content)
    assert len(read_header(first).tensors) == len(TENSORS)


@pytest.mark.parametrize("place", [8, 16])
@pytest.mark.parametrize("count", [1 << 20, 1 << 62, (1 << 64) - 1])
def test_counts_beyond_the_file_are_refused(file: Path, place: int, count: int):
    content = good()
    content[place : place + 8] = struct.pack("<Q", count)
    refuse(file, bytes(content), f"claims {count}")


@pytest.mark.parametrize("length", [1 << 16, 1 << 40, (1 << 64) - 1])
def test_lengths_beyond_the_file_are_refused(file: Path, length: int):
    """Of a key, of a text, of an array of numbers and one of texts, of a tensor's name."""
    content = bytes(good())
    for word in (b"llama.block_count", b"llama", b"blk.0.attn_q.weight"):
        at = content.index(struct.pack("<Q", len(word)) + word)
        refuse(file, content[:at] + struct.pack("<Q", length) + content[at + 8 :], "ends within")
    for key in (b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens"):
        at = content.index(key) + len(key) + 8
        refuse(file, content[:at] + struct.pack("<Q", length) + content[at + 8 :], "claims")


def test_one_key_or_tensor_twice(file: Path):
    content = bytes(good())
    for old, new in (
        (b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens"),
        (b"blk.0.attn_v.weight", b"blk.0.attn_q.weight"),
    ):
        refuse(file, content.replace(old, new), "twice")


@pytest.mark.parametrize("alignment", [0, 3, 48, 1 << 20])
def test_odd_alignments_are_refused(file: Path, alignment: int):
    gguf_file.write(file, {**METADATA, "general.alignment": alignment}, {})
    with pytest.raises(CheckpointError, match="alignment"):
        read_header(file)


def test_tensors_that_lie_upon_each_other_or_outside(file: Path):
    content = bytes(good())
    name = b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name) + 4 + 16 + 4
    for offset, words in ((0, "upon each other"), (1 << 40, "lies at"), (8, "lies at")):
        refuse(file, content[:at] + struct.pack("<Q", offset) + content[at + 8 :], words)


def test_shapes_that_cannot_be(file: Path):
    """0 rows, a row that is no whole number of blocks, more numbers than any model has."""
    for shape in ((0, 32), (4, 33), (1 << 40, 1 << 20)):
        tensors = {"a": ("Q4_0", shape, b"")}
        file.write_bytes(gguf_file.file_bytes({}, tensors))
        with pytest.raises(CheckpointError, match=r"shape|lies at"):
            read_header(file)


def test_types_nobody_knows_are_refused_by_number(file: Path):
    content = bytes(good())
    name = b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name) + 4 + 16
    refuse(
        file,
        content[:at] + struct.pack("<I", 4) + content[at + 4 :],
        "number 4(.|\n)*Q4_K",
        UnsupportedModelError,
    )


def test_truncated_anywhere(file: Path):
    """Cut at every byte of the header, and within the numbers."""
    content = bytes(good())
    for length in (*range(1, len(content) - 4096, 7), len(content) - 33):
        file.write_bytes(content[:length])
        with pytest.raises(ModelError):
            read_header(file)


def test_long_headers_are_not_read_to_their_end(file: Path):
    """A sparse file of 100 GB whose key claims most of it."""
    length = 90_000_000_000
    with file.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length))
        out.truncate(length + 1000)
    with pytest.raises(CheckpointError, match=f"{MOST_HEADER_BYTES >> 20} MiB"):
        read_header(file)


WORDS = [struct.pack("<Q", n) for n in (0, 1, 255, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)]


def mutated(content: bytes, generator: random.Random) -> bytes:
    """Some bytes changed, a word replaced by a large one, a part cut out, doubled, or cut off."""
    changed = bytearray(content)
    for _ in range(generator.choice((1, 1, 2, 5))):
        at = generator.randrange(4, len(changed))
        match generator.randrange(6):
            case 0 | 1:
                changed[at] = generator.randrange(256)
            case 2 | 3:
                changed[at : at + 8] = generator.choice(WORDS)
            case 4:
                del changed[at : at + generator.randrange(1, 64)]
            case 5:
                changed[at:at] = changed[at : at + generator.randrange(1, 64)]
    return bytes(changed)


def survive(file: Path, count: int, seed: int) -> float:
    """Read mutated headers and all that is made of them; returns the longest in seconds of CPU."""
    metadata = {**METADATA, "tokenizer.ggml.tokens": VOCABULARY["tokenizer.ggml.tokens"]}
    header = gguf_file.header(metadata, gguf_file.llama_tensors())
    numbers = bytes(1 << 14)
    generator = random.Random(seed)
    longest = 0.0
    for _ in range(count):
        file.write_bytes(mutated(header, generator) + numbers)
        started = time.process_time()
        try:
            read_model_spec(file)
            read_document(file, "tokenizer.json")
            read_document(file, "tokenizer_config.json")
        except ModelError:
            pass
        longest = max(longest, time.process_time() - started)
    return longest


def test_mutated_headers_end_in_errors_with_a_fix(file: Path):
    survive(file, 300, seed=25)


@pytest.mark.hardening
def test_ten_thousand_mutated_headers(file: Path):
    """No crash; a second and 512 MB are far away for each."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert survive(file, 10_000, seed=2025) < 1.0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 512 * 1024
