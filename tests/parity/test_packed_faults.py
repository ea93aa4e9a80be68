"""What is wrong with a compressed-tensors folder, and with one whose shards are not all there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.core.errors import CheckpointError
from parity.quantized_folders import FILE, Tensors, make_grid, packed_tensors, write_quantized
from parity.quantized_models import executor_of, plain_weights
from parity.tiny import edit_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    "ignore": ["lm_head"],
}
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
Change = Callable[[dict[str, Tensor]], object]


def packed(name: str, weight: Tensor) -> tuple[Tensors, Tensor] | None:
    grid = make_grid(weight, symmetric=True)
    return None if name == "lm_head" else (packed_tensors(grid), grid.weight)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good folder; tests copy it."""
    folder = tmp_path_factory.mktemp("packed")
    write_quantized(tiny_model("qwen2", intermediate_size=96), folder, PACKED, packed)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def rewrite(folder: Path, change: Change) -> None:
    """Load the tensors of the one file, change the dict, write it back."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def edit_weights(folder: Path, targets: list[str], **changes: Any) -> None:
    """The one group of the config, with other targets or another kind of weights."""
    group = {"targets": targets, "weights": INT4 | changes}
    edit_config(folder, quantization_config=PACKED | {"config_groups": {"group_0": group}})


def refused(folder: Path, *words: str) -> None:
    """Loading raises CheckpointError: a cause with these words and a fix, a line each."""
    with pytest.raises(CheckpointError) as caught:
        executor_of(folder)
    cause, _ = str(caught.value).split("\n")
    assert all(word in cause for word in words), cause


def set_to(name: str, place: tuple[int, ...], value: float) -> Change:
    return lambda tensors: tensors[name].__setitem__(place, value)


def replaced(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(name, tensor)


FAULTS: list[tuple[Change, tuple[str, ...]]] = [
    (lambda t: t.pop(f"{QUERY}.weight_packed"), (f"{QUERY}.weight_packed", "missing")),
    (lambda t: t.pop(f"{QUERY}.weight_shape"), (f"{QUERY}.weight_shape", "missing")),
    (
        replaced(f"{DOWN}.weight_shape", torch.tensor([64, 104])),
        (f"{DOWN}.weight_packed", "[64, 12]", "[64, 13]"),
    ),
    (replaced(f"{DOWN}.weight_shape", torch.tensor([-64, 96])), (DOWN, "shape")),
    (set_to(f"{DOWN}.weight_scale", (3, 1), float("nan")), (f"{DOWN}.weight_scale", "NaN")),
    (set_to(f"{DOWN}.weight_scale", (3, 1), float("inf")), (f"{DOWN}.weight_scale", "infinite")),
    (set_to(f"{DOWN}.weight_scale", (3, 1), 0.0), (f"{DOWN}.weight_scale", "0", "output 3")),
    (replaced(f"{DOWN}.weight_scale", torch.ones(64, 2)), (f"{DOWN}.weight_scale", "[64, 2]")),
    (
        replaced(f"{DOWN}.weight_zero_point", torch.zeros(63, 3, dtype=torch.int8)),
        (f"{DOWN}.weight_zero_point", "[63, 3]"),
    ),
    (replaced(f"{DOWN}.weight_g_idx", torch.zeros(96).int()), (f"{DOWN}.weight_g_idx",)),
]


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_a_fault_is_named(folder: Path, fault: int):
    change, words = FAULTS[fault]
    rewrite(folder, change)
    refused(folder, *words)


def test_a_config_that_names_what_is_not_there_is_refused(folder: Path):
    """A layer too many, zeros that no file has, a group that does not divide 96 inputs."""
    edit_weights(folder, ["Linear", "model.layers.7.mlp.down_proj"])
    refused(folder, "model.layers.7.mlp.down_proj", "no linear layer")
    edit_weights(folder, ["Linear"], symmetric=False)
    refused(folder, "weight_zero_point", "missing")
    edit_weights(folder, ["Linear"], group_size=64)
    refused(folder, "weight_scale has shape [64, 2]")


def test_scales_of_either_sign_are_read_where_the_format_has_them(folder: Path):
    exact = plain_weights(executor_of(folder, kernels="torch"))[DOWN]
    rewrite(folder, lambda tensors: tensors[f"{DOWN}.weight_scale"].neg_())
    assert torch.equal(plain_weights(executor_of(folder, kernels="torch"))[DOWN], -exact)


def test_a_folder_half_written_is_refused(folder: Path):
    """The index names both shards, and the second has not come; then it is cut within a tensor."""
    tensors = load_file(folder / FILE)
    names, index = sorted(tensors), folder / "model.safetensors.index.json"
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    (folder / FILE).unlink()
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index.write_text(json.dumps({"weight_map": weight_map}))
    executor_of(folder)
    last = folder / "model-2.safetensors"
    last.write_bytes(last.read_bytes()[:-100])
    refused(folder, last.name)
    last.unlink()
    refused(folder, last.name)
    index.unlink()
    refused(folder, "missing")
