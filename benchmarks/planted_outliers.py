"""Outliers planted into a model, and what brings it back: `python benchmarks/planted_outliers.py`.

Channels of the stream: some weights of each norm grow 64 times and what reads them shrinks as much,
which changes no answer and spoils int8; the model is written plain, smoothed and rotated, each in
int8, and judged beside itself in fp32. Single weights: some grow 30 times, which makes another
model, and spoils int4 by groups; it is judged layer by layer, with and without the largest kept.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from common import heading  # noqa: E402
from headway.cli.common import model_folder  # noqa: E402
from headway.cli.main import main as headway  # noqa: E402
from headway.compress.calibration import HeldOut, parse_sources, read_calibration  # noqa: E402
from headway.compress.divergence import Judge, put  # noqa: E402
from headway.compress.folds import layer_folds  # noqa: E402
from headway.compress.grid import GridRule  # noqa: E402
from headway.compress.matrices import layer_matrices  # noqa: E402
from headway.compress.outliers import keep_outliers  # noqa: E402
from headway.compress.partial import Rounded  # noqa: E402
from headway.compress.quantize import groups_of  # noqa: E402
from headway.compress.rows import RowModel  # noqa: E402
from headway.compress.statistics import counting  # noqa: E402
from headway.evals.divergence import compare  # noqa: E402
from headway.evals.text import read_text, windows  # noqa: E402
from headway.frontend.text.tokenizer import Tokenizer  # noqa: E402
from headway.spec.formats import Format  # noqa: E402
from headway.whole_model import FolderModel  # noqa: E402
from sensitivity import MEMORY  # noqa: E402

DATA = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"
GROWTH, EVERY = 64.0, 48
SINGLE_GROWTH, SINGLE_SHARE, KEPT_SHARE = 30.0, 0.0001, 0.005
FORMAT = Format("int4", 64)


def plant_channels(folder: Path, out: Path) -> Path:
    """Every EVERY-th channel of each norm of the layers · GROWTH, its readers ÷ GROWTH."""
    model = RowModel(folder)
    changes = {name: model.tensors.read(name) for name in model.tensors}
    for index in range(model.spec.num_layers):
        for fold in layer_folds(model.architecture, model.spec, model.skeleton(index), index):
            if fold.norm is None:
                continue
            scale = torch.ones(model.spec.hidden_size)
            scale[index % EVERY :: EVERY] = GROWTH
            changes[fold.norm] = (changes[fold.norm] * scale).to(changes[fold.norm].dtype)
            for matrix in fold.readers:
                weight = changes[matrix.weight]
                changes[matrix.weight] = (weight / scale).to(weight.dtype)
    return rewritten(folder, out, changes)


def plant_weights(folder: Path, out: Path) -> Path:
    """SINGLE_SHARE of the weights of each matrix of the layers · SINGLE_GROWTH."""
    model = RowModel(folder)
    changes = {name: model.tensors.read(name) for name in model.tensors}
    draw = torch.Generator().manual_seed(0)
    for name, tensor in changes.items():
        if ".layers." in name and tensor.dim() == 2:
            chosen = torch.rand(tensor.shape, generator=draw) < SINGLE_SHARE
            changes[name] = torch.where(chosen, tensor * SINGLE_GROWTH, tensor)
    return rewritten(folder, out, changes)


def rewritten(folder: Path, out: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """`folder` with other numbers."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert load_file(out / "model.safetensors").keys() == tensors.keys()
    return out


def channels(folder: Path, scratch: Path, cut: list, sources: list[str]) -> None:
    """KL of int8, to the nearest, of the model, the planted one, and each transform of that."""
    planted = plant_channels(folder, scratch / "planted")
    print(heading(["int8, to the nearest", "KL from fp32, nats a token"]))
    for name, source, transform in (
        ("as it is", folder, "none"),
        ("planted", planted, "none"),
        ("planted, smooth", planted, "smooth"),
        ("planted, rotated", planted, "rotate"),
    ):
        out = scratch / ("int8-" + name.replace(", ", "-").replace(" ", "-"))
        words = ["quantize", str(source), str(out), "--format=int8", "--method=nearest"]
        stdout, sys.stdout = sys.stdout, sys.stderr
        try:
            assert headway([*words, f"--transform={transform}", *sources]) == 0
        finally:
            sys.stdout = stdout
        reference = FolderModel(source, name="fp32", kv_memory=MEMORY, dtype="float32")
        model = FolderModel(out, name=name, kv_memory=MEMORY)
        print(f"| {name} | {compare(reference, model, cut).kl:.5f} |", flush=True)


def singles(folder: Path, scratch: Path, text_rows: list[list[int]], rows: list) -> None:
    """KL of int4 by 64, GPTQ, with and without kept weights, judged layer by layer in fp32."""
    planted = plant_weights(folder, scratch / "planted-weights")
    print("\n" + heading(["int4 by 64, GPTQ", "KL from fp32, nats a token"]))
    for name, source, share, format in (
        ("as it is", folder, 0.0, FORMAT),
        (f"as it is, {KEPT_SHARE:.1%} kept", folder, KEPT_SHARE, FORMAT),
        ("planted", planted, 0.0, FORMAT),
        (f"planted, {KEPT_SHARE:.1%} kept", planted, KEPT_SHARE, FORMAT),
        ("planted, by 32", planted, 0.0, Format("int4", 32)),
    ):
        print(f"| {name} | {kept_kl(source, text_rows, rows, share, format):.5f} |", flush=True)


def searched(folder: Path, scratch: Path, cut: list, sources: list[str]) -> None:
    """KL of folders as they are served: what a search under 5 bits a weight does about them."""
    print("\n" + heading(["folders, served", "KL from fp32, nats a token"]))
    for source in (folder, scratch / "planted-weights"):
        reference = FolderModel(source, name="fp32", kv_memory=MEMORY, dtype="float32")
        for asked in (["--format=int4"], ["--format=int4", "--group=32"], ["--max-bits=5"]):
            out = scratch / f"{source.name}{'-'.join(asked)}"
            stdout, sys.stdout = sys.stdout, sys.stderr
            try:
                assert (
                    headway(
                        ["quantize", str(source), str(out), "--transform=none", *asked, *sources]
                    )
                    == 0
                )
            finally:
                sys.stdout = stdout
            kl = compare(reference, FolderModel(out, name=out.name, kv_memory=MEMORY), cut).kl
            print(f"| {source.name}, {' '.join(asked)} | {kl:.5f} |", flush=True)


def kept_kl(
    folder: Path, text_rows: list[list[int]], rows: list, share: float, format: Format
) -> float:
    """Each layer calibrated on `rows`, rounded with `share` of its weights kept."""
    model = RowModel(folder)
    x, lens = model.embed(rows), [len(row) for row in rows]
    layers = {}
    for index in range(model.spec.num_layers):
        layer = model.layer(index)
        with counting(layer) as seen:
            x = model.run(layer, x, lens)
        layers[index] = Rounded()
        for group in groups_of(layer_matrices(model.architecture, layer, index)):
            hessian = seen[group.place].hessian()
            for matrix in group.matrices:
                weight = model.tensors.read(matrix.weight)
                rule = GridRule(searched=True)
                kept = keep_outliers(weight, hessian, format, rule, share)
                layers[index].matrices[matrix.name, format] = kept  # type: ignore[assignment]
    judge = Judge(model, text_rows, None)  # type: ignore[arg-type]
    x = judge.embedded
    for index in range(model.spec.num_layers):
        layer = model.layer(index)
        names = [matrix.name for matrix in layer_matrices(model.architecture, layer, index)]
        put(model, layer, index, layers[index], dict.fromkeys(names, format))
        x = model.run(layer, x, judge.lens)
    return judge._kl(x)


def main() -> None:
    """Plant, quantize, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=None)
    parser.add_argument("--data", type=Path, default=DATA, help="folder that holds eval/ and text/")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--only", choices=("channels", "weights"), default=None)
    chosen = parser.parse_args()
    folder = model_folder(chosen.folder)
    cut = windows(read_text(chosen.data, "books"), limit=chosen.windows)
    texts = [str(chosen.data / "text" / "train-000.txt"), "skills"]
    with tempfile.TemporaryDirectory() as scratch:
        words = [f"--calibrate={text}" for text in texts] + [f"--rows={chosen.rows}"]
        if chosen.only != "weights":
            channels(folder, Path(scratch), cut, words)
        if chosen.only != "channels":
            tokenizer = Tokenizer(folder)
            rows = read_calibration(
                parse_sources(texts),
                tokenizer,
                rows=chosen.rows,
                length=512,
                seed=0,
                tested=HeldOut(),
            ).rows
            judged = [tokenizer.encode(each.context + each.target) for each in cut]
            singles(folder, Path(scratch), judged, rows)
            searched(folder, Path(scratch), cut, words)


if __name__ == "__main__":
    main()
