"""What the scripts of the claims share: who is asked, how often, and how a claim is told.

The claims themselves are `literature`, as `claims_page.py` asks them; a script asks one,
or those that share a run, with more repeats, of a larger model or of a running server.
"""

import argparse
import contextlib
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import write_json
from headway.cli.common import engine_arguments, model_folder
from headway.config.options import EngineOptions, read_options
from headway.evals.questions import Item
from headway.evals.questions import ask as questions_to
from headway.evals.skills.suite import TEST_SEED
from headway.evals.statistics import mcnemar_worse, wilson
from headway.whole_model import FolderModel
from literature.claim import Claim
from literature.shapes import HALF_B
from literature.subject import Subject
from literature.table import CLAIMS, run, words_of

SHAPE = {"load_format": "dummy", "quantization": "int4"}


def ask(*keys: str, more: tuple[Claim, ...] = ()) -> None:
    """Ask these claims, and `more` of a script's own, and print what came of each."""
    parser = options(keys[0] if keys else more[0].key)
    given = parser.parse_args()
    claims = [claim for claim in CLAIMS if claim.key in keys] + list(more)
    with subject_of(given) as subject:
        report = run(subject, claims)
    for row in report.rows:
        print(words_of(row))
    write_json(given.json, msgspec.to_builtins(report))


def options(key: str) -> argparse.ArgumentParser:
    """What all scripts take."""
    parser = argparse.ArgumentParser(description=f"The claim {key}, measured.")
    parser.add_argument("asked", nargs="?", help="a folder or a URL; else headway-tiny")
    parser.add_argument("--runs", type=int, default=9, help="how often what is timed is repeated")
    parser.add_argument("--flags", default="", help="of the engine: '--quantization int4'")
    parser.add_argument(
        "--shape", action="store_true", help="Qwen2.5-0.5B's layers, random, in int4, 32k context"
    )
    parser.add_argument("--json", type=Path)
    return parser


@contextlib.contextmanager
def subject_of(given: argparse.Namespace) -> Iterator[Subject]:
    """Whom the command line names."""
    tables, _, _ = read_options([EngineOptions], shlex.split(given.flags), {})
    chosen = engine_arguments(tables[EngineOptions])
    with contextlib.ExitStack() as stack:
        if given.shape:
            folder = stack.enter_context(shape_folder())
            chosen = SHAPE | chosen
        elif given.asked and given.asked.startswith("http"):
            yield stack.enter_context(Subject(url=given.asked, repeats=given.runs, watch=say))
            return
        else:
            folder = model_folder(given.asked)
        yield stack.enter_context(
            Subject(folder=folder, repeats=given.runs, options=chosen, watch=say)
        )


@contextlib.contextmanager
def shape_folder() -> Iterator[Path]:
    """The 0.5B shape with headway-tiny's tokenizer and vocabulary, so that it can be asked."""
    own = model_folder(None)
    vocabulary = json.loads((own / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="headway-claims-") as name:
        folder = Path(name) / "half-b"
        folder.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(own / file, folder)
        config = {**HALF_B, "vocab_size": vocabulary}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


def answered(folder: Path, questions: int, **options: Any) -> list[Item]:
    """The held-out questions of all skills at all levels, answered by a folder's model."""
    model = FolderModel(folder, kv_memory="256MiB", dtype="bfloat16", **options)
    return questions_to(model, questions=questions, seed=TEST_SEED).items


def beside(before: Sequence[Item], after: Sequence[Item]) -> tuple[float, float, float, float]:
    """Of the same questions: the share right `after` with Wilson's 95%, and the probability by
    exact McNemar that it is no worse than `before`."""
    pairs = [(old.right, new.right) for old, new in zip(before, after, strict=True)]
    right = sum(new for _, new in pairs)
    worse = mcnemar_worse(pairs.count((True, False)), pairs.count((False, True)))
    return (right / len(pairs), *wilson(right, len(pairs)), worse)


def say(text: str) -> None:
    """Progress, beside what is printed."""
    print(text, file=sys.stderr, flush=True)
