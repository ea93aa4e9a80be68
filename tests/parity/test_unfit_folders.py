"""Folders that contradict themselves: named before anything is computed, by every verb."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from headway.cli.main import main
from headway.spec.embedded import EMBEDDED, model_folder

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder(EMBEDDED), tmp_path / "model"))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(folder: Path, capsys, number: float):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[NAME][3, 5] = number
    save_file(tensors, file, metadata={"format": "pt"})
    verbs = {
        "run": ["run", str(folder), "hi"],
        "quantize": ["quantize", str(folder), str(folder.with_name("out"))],
        "prune": ["prune", str(folder), str(folder.with_name("out")), "--neurons=0.375"],
    }
    for name, words in verbs.items():
        assert main(words) == 3, name
        told = capsys.readouterr().err
        assert f"{NAME} holds numbers that are not finite" in told, name
    assert not folder.with_name("out").exists()


def test_a_folder_that_says_it_is_quantized_is_not_quantized_again(folder: Path, capsys):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": -4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["quantize", str(folder), str(folder.with_name("out"))]) == 3
    assert "quantized already (gptq)" in capsys.readouterr().err


def test_sampling_is_as_the_model_s_config_says(folder: Path):
    """`do_sample: false` is greedy; a request may still say otherwise."""
    from headway import LLM

    for do_sample, temperature in ((False, 0.0), (True, 1.0)):
        (folder / "generation_config.json").write_text(json.dumps({"do_sample": do_sample}))
        llm = LLM(folder, load_format="dummy", max_model_len=64)
        assert llm.get_default_sampling_params().temperature == temperature


@pytest.mark.parametrize("fault", ["is a FIFO", "is a pickle", NAME])
def test_weights_that_do_not_fit_are_an_error_before_texts_are_read(folder, capsys, fault):
    """The last has another shape than its config.json says. The text, which is not there, is no
    error before that."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    if fault == "is a FIFO":
        os.mkfifo(file)
    elif fault == "is a pickle":
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    else:
        save_file(tensors | {NAME: tensors[NAME][:, 1:].contiguous()}, file, {"format": "pt"})
    good, out = str(model_folder(EMBEDDED)), str(folder.with_name("out"))
    for words in (
        ["prune", str(folder), out, "--neurons=0.375", "--calibrate=nowhere.txt"],
        ["distill", good, str(folder), out, "--data=nowhere.txt", "--steps=1"],
        ["distill", str(folder), good, out, "--data=nowhere.txt", "--steps=1"],
    ):
        assert main(words) == 3
        assert fault in capsys.readouterr().err
