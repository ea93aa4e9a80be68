"""`headway quantize … --gate` → a folder → `headway serve` → `headway eval --against --gate`.

On the embedded model, with a calibration small enough for a test. What is spoiled on purpose is
refused on the way in and on the way out.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conftest import StartServer
from headway.cli.common import GATE_FAILED
from headway.cli.main import main
from headway.cli.quantize import write_rows
from headway.compress.partial import Partial
from headway.config.options import QuantizeOptions
from headway.runtime.checkpoint import checkpoint_formats
from headway.spec import read_model_spec
from headway.spec.embedded import model_folder
from headway.spec.formats import PLAIN
from headway.whole_model import FolderModel

SMALL = ("--rows=6", "--row-length=256", "--threads=1")
SKILLS = ("--skills=arithmetic,copy,lookup", "--levels=1", "--questions=8")
QUESTION = {
    "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    "temperature": 0,
    "max_tokens": 16,
}
TEXT = "Once upon a time there was a little girl who liked to play with her friends. " * 12


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """headway-tiny by the recommended recipe, judged on a question of each skill and level."""
    out = tmp_path_factory.mktemp("quantized") / "small"
    gate = ("--gate", "--questions=1", "--tolerance=0.05")
    assert main(["quantize", "headway-tiny", str(out), *SMALL, *gate]) == 0
    return out


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder of a few hundred words."""
    lines = [{"text": f"they found a big red ball under the {word}"} for word in ("tree", "sea")]
    files = {
        "text/val.txt": TEXT,
        "eval/wikitext-2/test.txt": TEXT[:600],
        "eval/lambada/lambada_test.jsonl": "\n".join(map(json.dumps, lines)),
    }
    for name, text in files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path / "data"


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors"))


# ── the chain ───────────────────────────────────────────────────────────────────────────────


def test_what_was_quantized_is_served_and_passes_the_gate(
    quantized: Path, start_server: StartServer
):
    """int4 panels as they are in the files, with the answer of the model before."""
    assert not quantized.with_name("small.partial").exists()
    live = start_server(folder=quantized)
    live.wait_ready()
    status, answer = live.post("/v1/chat/completions", {"model": "small", **QUESTION})
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == "2 + 3 = 5."
    against = ["--against", "headway-tiny", "--gate", "--tolerance=0.05"]
    assert main(["eval", str(quantized), *against, *SKILLS, "--kv-memory=64MiB"]) == 0


def test_a_folder_that_is_spoiled_is_refused(
    quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The scales of one layer doubled: it loads, it answers, and the gate says 5."""
    spoiled = Path(shutil.copytree(quantized, tmp_path / "spoiled"))
    index = json.loads((spoiled / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        if name.startswith("model.layers.2.mlp") and name.endswith("weight_scale"):
            tensors = load_file(spoiled / file)
            tensors[name] = -2 * tensors[name]
            save_file(tensors, spoiled / file, {"format": "pt"})
    against = ["--against", "headway-tiny", "--gate"]
    assert main(["eval", str(spoiled), *against, *SKILLS, "--kv-memory=64MiB"]) == GATE_FAILED
    assert "worse" in capsys.readouterr().out


def test_a_gate_that_fails_leaves_no_folder(tmp_path: Path, data: Path):
    """No divergence at all is let pass: the work stays under its temporary name."""
    out = tmp_path / "out"
    gate = ("--gate", "--eval-data", str(data), "--questions=1", "--kl-tolerance=0")
    rows = ("--rows=1", "--row-length=64", "--method=nearest", "--threads=1")
    assert main(["quantize", "headway-tiny", str(out), *rows, *gate]) == GATE_FAILED
    assert not out.exists()
    assert "worse" in (tmp_path / "out.partial" / "README.md").read_text()


def test_card_and_json_tell_what_was_done(quantized: Path):
    card = (quantized / "README.md").read_text()
    formats = "int4 in groups of 64 or int4 in groups of 32 or int8"
    assert f"rotate, gptq, {formats}, head int8" in card
    assert "6 rows of self" in card
    assert "## Beside `headway-tiny`" in card
    told = json.loads((quantized / "quantize.json").read_text())
    assert 4.25 < told["bits"] < 6.2
    assert told["search"]["predicted_kl"] == pytest.approx(told["search"]["kl"], rel=0.5)
    assert len(told["modules"]) == 7 * read_model_spec(model_folder(None)).num_layers
    assert all(0 < module["loss"] < 0.05 for module in told["modules"])
    assert size(quantized) < 0.75 * size(model_folder(None))


# ── a kill in between ───────────────────────────────────────────────────────────────────────


def test_after_a_kill_the_work_goes_on(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Three layers, then none: the second run makes the other three, and the same bytes."""
    out = tmp_path / "small"
    saved: list[str] = []
    save = Partial.save

    def killed(self: Partial, name: str, rounded: Any) -> None:
        if len(saved) == 3:
            raise KeyboardInterrupt
        saved.append(name)
        save(self, name, rounded)

    monkeypatch.setattr(Partial, "save", killed)
    assert main(["quantize", "headway-tiny", str(out), *SMALL]) == 130
    assert saved == ["layer-0", "layer-1", "layer-2"]
    assert not out.exists()

    def counted(self: Partial, name: str, rounded: Any) -> None:
        saved.append(name)
        save(self, name, rounded)

    monkeypatch.setattr(Partial, "save", counted)
    assert main(["quantize", "headway-tiny", str(out), *SMALL]) == 0
    assert saved == [*(f"layer-{index}" for index in range(6)), "head"]
    for path in quantized.glob("model*"):
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_other_wishes_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was begun with another seed is thrown away; a folder that exists is not touched."""
    partial = Partial(tmp_path / "out", "one")
    (partial.work / "layer-0.safetensors").write_text("")
    assert Partial(tmp_path / "out", "one").has("layer-0")
    assert not Partial(tmp_path / "out", "other").has("layer-0")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("")
    assert main(["quantize", "headway-tiny", str(tmp_path / "out"), *SMALL]) == 2
    assert (tmp_path / "out" / "kept").exists()


# ── every kind of file is read ──────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def distributions() -> Callable[[Path], Any]:
    """What a folder expects of a text."""

    def of(folder: Path) -> Any:
        model = FolderModel(folder, kv_memory="32MiB", dtype="bfloat16")
        return model.distributions(model.encode(TEXT)[:200])

    return of


@pytest.mark.parametrize(
    "asked",
    [
        ("--format=int8",),
        ("--format=int8", "--transform=smooth"),
        ("--format=int8", "--transform=rotate"),
        ("--format=int4", "--group=32", "--head=int4", "--transform=awq"),
        ("--max-bits=5",),
        ("--format=int4", "--transform=none"),
        ("--readable-by=vllm",),
        ("--format=int4", "--file-format=gptq"),
        ("--ignore=re:.*[01].mlp.down_proj", "--ignore=lm_head"),
    ],
    ids=lambda asked: " ".join(asked),
)
def test_every_kind_of_file_is_read(
    asked: tuple[str, ...], tmp_path: Path, distributions: Callable[[Path], Any]
):
    """Each in the formats that config.json names, near the model that it was made of."""
    out = tmp_path / "out"
    rows = ("--rows=3", "--row-length=128", "--threads=1")
    assert main(["quantize", "headway-tiny", str(out), *rows, *asked]) == 0
    p, q = distributions(model_folder(None)), distributions(out)
    kl = float((abs(p) < 1e9).all() and (2.718281828**p * (p - q)).sum(-1).mean())
    assert 0 < kl < (0.01 if "--format=int8" in asked else 0.2)


STORY = (
    "Tom found a small key in the garden. It was old and red with rust. He ran to his sister and "
    'said, "Look what I have! Do you think it opens the box in the attic?" Anna took the key and '
    "held it up to the light. They climbed the stairs, as quiet as two mice, for grandfather slept "
    "in his chair. The box was heavy, and the lock did not turn at first. When it opened at last, "
    "there was a map in it, a broken watch, and a letter that nobody had read for fifty years."
)


@pytest.mark.parametrize(
    "asked",
    [(), ("--format=int4", "--transform=none"), ("--format=int8", "--transform=none")],
    ids=" ".join,
)
def test_transformers_loads_it_and_says_the_same(asked: tuple[str, ...], tmp_path: Path):
    """The same numbers there, inputs of int4 in bf16; another order of a word would say noise."""
    pytest.importorskip("compressed_tensors", reason="transformers reads the format through it")
    out = tmp_path / "out"
    rows = ("--rows=3", "--row-length=128", "--threads=1")
    assert main(["quantize", "headway-tiny", str(out), *rows, *asked]) == 0
    ours = FolderModel(out, kv_memory="32MiB", dtype="bfloat16")
    tokens = ours.encode(STORY)
    q = torch.from_numpy(ours.distributions(tokens))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    with torch.no_grad():
        p = theirs(torch.tensor([tokens])).logits[0, : len(q)].double().log_softmax(-1)
    assert float((p.exp() * (p - q)).sum(-1).mean()) < (
        0.004 if "--format=int8" in asked else 0.002
    )


def test_what_is_ignored_stays_in_16_bits(tmp_path: Path):
    """Its numbers, its name in config.json, its format as the engine reads it, its row in none."""
    out, source = tmp_path / "out", model_folder(None)
    ignored = "--ignore=re:.*layers\\.[01]\\.mlp\\.down_proj"
    asked = (ignored, "--rows=1", "--row-length=64", "--format=int4", "--transform=none")
    assert main(["quantize", "headway-tiny", str(out), *asked, "--threads=1"]) == 0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["re:.*layers\\.(0|1)\\.mlp\\.down_proj$"]
    held: dict[str, Any] = {}
    for path in out.glob("model-*.safetensors"):
        held |= load_file(path)
    name = "model.layers.{}.mlp.down_proj"
    for path in source.glob("model*.safetensors"):
        for layer in (0, 1):
            weight = load_file(path).get(f"{name.format(layer)}.weight")
            assert weight is None or weight.equal(held[f"{name.format(layer)}.weight"])
    assert f"{name.format(1)}.weight" in held and f"{name.format(2)}.weight_packed" in held
    formats = dict(checkpoint_formats(out, read_model_spec(out)))
    assert formats.get("layers.0.mlp.down", PLAIN) == PLAIN
    assert str(formats["layers.2.mlp.down"]) == "int4 in groups of 64"
    told = json.loads((out / "quantize.json").read_text())
    modules = {row["module"] for row in told["modules"]}
    assert name.format(0) not in modules and name.format(2) in modules
    assert told["bits"] > 5


# ── before anything is done ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "length", [2, 5000], ids=["shorter than a beginning", "beyond the context"]
)
def test_rows_that_a_model_writes_fit_its_context(length: int, tmp_path: Path):
    begins = [[5, 6, 7], [8]]
    rows = write_rows(model_folder(None), QuantizeOptions(threads=1), begins, length)
    context = read_model_spec(model_folder(None)).max_len
    assert [len(row) for row in rows] == [min(length, context)] * 2
    assert rows[0][:1] == [5] and rows[1][:1] == [8]


def test_a_dry_run_says_bytes_time_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["quantize", "headway-tiny", str(tmp_path / "out"), "--dry-run"]) == 0
    told = capsys.readouterr().out
    for word in ("4.25 bits", "MiB", "time", "memory"):
        assert word in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--group=48",), "--group 48"),
        (("--group=128",), "does not divide 192 inputs"),
        (("--format=int4", "--max-bits=5"), "goes with --format mixed"),
        (("--max-bits=5", "--max-step=1ms"), "Give one of"),
        (("--max-bits=4.1", *SMALL), "budget is"),
        (("--transform=awq",), "go with --format int4"),
        (("--format=int8", "--file-format=gptq"), "gptq holds"),
        (("--calibrate=nowhere.txt",), "there is no file"),
        (("--ignore=down_proj",), "fits no matrix of headway-tiny"),
        (("--ignore=re:.*q_proj",), "Name all of them"),
        (("--format=int4", "--ignore=lm_head", "--file-format=gptq"), "holds one format"),
    ],
)
def test_what_does_not_go_together_is_refused(
    asked: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["quantize", "headway-tiny", str(tmp_path / "out"), *asked]) == 2
    assert told in capsys.readouterr().err
