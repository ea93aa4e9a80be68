"""Checkpoints: shards load like one file, and what is wrong with files is said in two lines."""

import json
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drive import engine_for
from headway.core.errors import CheckpointError, HeadwayError
from headway.runtime.checkpoint import stream_tensors
from headway.runtime.checkpoint_files import find_files
from parity.mutations import mutated
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SLOWEST_S = 60.0


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint in one file; tests copy it."""
    return save(tiny_model(vocab_size=40, num_hidden_layers=1), tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the good checkpoint to spoil."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights as the runtime holds them."""
    return dict(engine_for(folder).executor.model.named_parameters())


def refused(folder: Path, *mentioned: str) -> None:
    """Loading raises CheckpointError: a cause and a fix, a line each, naming what is at fault."""
    with pytest.raises(CheckpointError) as caught:
        weights(folder)
    cause, fix = str(caught.value).split("\n")
    assert cause
    assert cause.isprintable()
    assert fix
    for word in mentioned:
        assert word in cause


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Load the tensors of the one file, change the dict, write it back."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


# ── what loads ──────────────────────────────────────────────────────────────────────────────


def test_shards_load_like_a_single_file(tmp_path: Path):
    """Six shards or more, with the index transformers writes: bit for bit the same weights."""
    model = tiny_model()
    whole = weights(save(model, tmp_path / "whole"))
    shards = save(model, tmp_path / "shards", max_shard_size="50KB")
    assert len(list(shards.glob("*.safetensors"))) >= 6
    assert not (shards / FILE).exists()
    sharded = weights(shards)
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_a_tied_head_may_be_stored_and_rotary_buffers_are_passed_over(tmp_path: Path):
    """Old exports hold `lm_head.weight` beside a tied embedding, and `rotary_emb.inv_freq`."""
    folder = save(tiny_model(tie_word_embeddings=True), tmp_path)
    before = weights(folder)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(folder, add)
    after = weights(folder)
    assert all(torch.equal(before[name], after[name]) for name in before)


# ── what does not ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"]
)
def test_a_missing_tensor_is_named(folder: Path, name: str):
    """One weight less."""
    rewrite(folder, lambda tensors: tensors.pop(name))
    refused(folder, name, "missing")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "two\nlines\x1b[2J"])
def test_a_left_over_tensor_is_named(folder: Path, name: str):
    """One layer more than config.json says; a name cannot write on the user's terminal."""
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(52, 64)}))
    refused(folder, name[:3], "left over")


@pytest.mark.parametrize("shape", [(52, 63), (64, 52), (1, 64), (64,), ()])
def test_a_wrong_shape_is_named(folder: Path, shape: tuple[int, ...]):
    """Also shapes that would broadcast."""
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))
    refused(folder, name, "[52, 64]", str(list(shape)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int64])
def test_quantized_weights_are_refused_by_type(folder: Path, dtype: torch.dtype):
    """int8 weights are never read as if they were numbers of their own."""
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(52, 64).to(dtype)}))
    refused(folder, name, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, 0.5, -1])
def test_a_truncated_file_is_named(folder: Path, keep: float):
    """Cut anywhere: empty, within the header, within the weights, one byte short."""
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[: int(keep * len(data)) if keep == 0.5 else keep])
    refused(folder, FILE)


def test_bytes_after_the_end_are_refused(folder: Path):
    """A file longer than its header says is not the file that was published."""
    (folder / FILE).write_bytes((folder / FILE).read_bytes() + b"\0")
    refused(folder, FILE)


def test_garbage_is_refused(folder: Path):
    """Random bytes, text, and a pickle's first bytes."""
    for garbage in (random.Random(0).randbytes(5000), b"version https://git-lfs\n" * 9, b"\x80\4"):
        (folder / FILE).write_bytes(garbage)
        refused(folder, FILE)


@pytest.mark.parametrize("claimed", [2**60, 2**64 - 1, 100_000_001, 2**31])
def test_a_header_that_claims_to_be_huge_is_refused_at_once(folder: Path, claimed: int):
    """Nothing is allocated for it."""
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(struct.pack("<Q", claimed) + data[8:])
    started = time.perf_counter()
    refused(folder, FILE, str(claimed))
    assert time.perf_counter() - started < SLOWEST_S


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/passwd", "sub/evil.safetensors", "..", ".", "", "a\0b"]
)
def test_an_index_cannot_name_a_file_elsewhere(folder: Path, name: str):
    """The file exists, so that only the name can be what is refused."""
    shutil.copy(folder / FILE, folder.parent / "evil.safetensors")
    (folder / "sub").mkdir()
    shutil.copy(folder / FILE, folder / "sub" / "evil.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    refused(folder, name.partition("\0")[0])


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "a" * 5000])
def test_an_index_that_names_a_missing_shard_says_which(folder: Path, name: str):
    """As after an interrupted download."""
    names = {"lm_head.weight": FILE, "model.norm.weight": name}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    refused(folder, name[:20])


@pytest.mark.parametrize(
    "weight_map", [None, {}, [], "x", {"a": ["x"]}, {"a": {"b": 1}}, {"a": None}, {"a": 3}]
)
def test_an_index_without_sense_is_refused(folder: Path, weight_map: object):
    """Anything but names of files."""
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(folder)


def test_a_folder_in_place_of_a_file_is_refused(folder: Path):
    """As a broken unpacking leaves it."""
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    refused(folder, FILE)


def test_a_folder_with_a_pickle_only_says_that_it_is_never_opened(folder: Path):
    """pytorch_model.bin is not an alternative."""
    (folder / FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\4.")
    refused(folder, "pytorch_model.bin", "pickle")


# ── mutated headers ─────────────────────────────────────────────────────────────────────────


def refusal(folder: Path) -> HeadwayError | None:
    """Why `folder` does not load, or None when it does."""
    try:
        weights(folder)
    except HeadwayError as error:
        return error
    return None


def test_mutated_headers_load_or_are_refused_and_nothing_else(folder: Path):
    """400 damaged headers: success or HeadwayError, never another exception, each quickly."""
    original = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", original[:8])
    header, data = json.loads(original[8 : 8 + length]), original[8 + length :]
    rng = random.Random(77)
    refusals = 0
    for _ in range(400):
        (folder / FILE).write_bytes(mutated(rng, header, data))
        started = time.perf_counter()
        error = refusal(folder)
        refusals += error is not None
        assert error is None or len(str(error).splitlines()) == 2, str(error)
        assert time.perf_counter() - started < SLOWEST_S
    assert refusals > 300


@pytest.mark.parametrize(
    "text",
    [b"[]", b"{}", b"null", b"1", b'"x"', b"[" * 100_000, b"{" * 9, b"\xff\xfe{}", b"9" * 10_000,
     b'{"a":{"data_offsets":[]}}', b'{"a":{"data_offsets":[0,1e999]}}', b'{"a":{"data_offsets":7}}',
     b'{"a":{"data_offsets":[0,NaN]}}', b'{"a":{"data_offsets":{"1":0}}}'],
    ids=lambda text: text[:30].decode("latin-1"),
)  # fmt: skip
def test_headers_without_sense_are_refused(folder: Path, text: bytes):
    """Valid JSON of another kind, deep nesting, other encodings, numbers that are none."""
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text)
    refused(folder)


def test_tensors_are_streamed_in_the_order_of_the_files(tmp_path: Path):
    """Each name once, over all shards."""
    folder = save(tiny_model(), tmp_path, max_shard_size="50KB")
    names = [name for name, _ in stream_tensors(find_files(folder))]
    listed = json.loads((folder / INDEX).read_text())["weight_map"]
    assert sorted(names) == sorted(listed)
