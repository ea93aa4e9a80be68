"""How far answers are from fp32's on published weights, in Headway and in its peers.

    python benchmarks/fidelity.py [smollm2 | gemma3-270m | FOLDER] [--only TEXT,…] \\
        [--also NAME=PATH …] [--llama PYTHON SOURCE] [--openvino PYTHON] [--json OUT.json]

The reference is transformers in fp32 on the model's folder in 16 bits. Of each row the table has
the KL divergence to it in nats a token, the share of the same likeliest token and the ratio of
perplexities, over windows of 512 tokens of wikitext-2's test set; and of 30 prompts of 64 tokens,
how many greedy answers of 64 tokens are the reference's, and how many leave it where its two best
tokens were more than 0.3 nats apart, which rounding should not.

Rows: Headway with its formats of weights and of KV; `--also`: a folder of `headway quantize` or a
GGUF file; the model's own GGUF file and others made of the folder, in Headway, by default and in
float16, and in llama.cpp, with the KL divergence to the file's own weights in fp32 beside that to
the folder's; OpenVINO's int8 and int4. PYTHON of `--llama` has llama-cpp-python and what
llama.cpp's converter wants, SOURCE is a built tree of llama.cpp with llama-quantize; PYTHON of
`--openvino` has openvino and optimum-intel. What is missing is skipped with a reason. Bits are
those that are held (Headway), or of the file, over the number of weights.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import markdown, write_json
from peer_models import ROOT, PeerError, gguf_file, openvino_folder, place_of

sys.path.insert(0, str(ROOT / "tests"))

from headway import SamplingParams
from headway.core.errors import HeadwayError
from headway.evals.text import read_text
from headway.frontend.text import Tokenizer
from headway.whole_model import FolderModel
from published_weights import MODELS, created_once, fetch, folder_of, load_gguf

DATA = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"
WINDOW, PROMPT, MAX_TOKENS, PROMPTS = 512, 64, 64, 30
WIDE = 0.3
"""Nats between the reference's two best tokens, from where on another answer is a fault."""
ROWS_AT_ONCE = 64
MEMORY = "256MiB"
FORMATS: dict[str, dict[str, Any]] = {
    "Headway fp32": {"dtype": "float32"},
    "Headway bf16": {},
    "Headway int8": {"quantization": "int8"},
    "Headway int4": {"quantization": "int4"},
    "Headway int4 by 64": {"quantization": "int4", "quantization_group": 64},
    "Headway int4 by 32": {"quantization": "int4", "quantization_group": 32},
    "Headway KV int8": {"kv_cache_dtype": "int8"},
    "Headway KV int4": {"kv_cache_dtype": "int4"},
}
TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K_M", "Q5_K_M", "Q6_K")

Windows = Iterator[np.ndarray]
"""fp32 log-probabilities (tokens, vocabulary) of each window."""


# ── what is asked, and of whom ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Token ids: of each window one more than are read, the last being expected alone."""

    windows: list[list[int]]
    prompts: list[list[int]]
    threads: int

    def request(self) -> str:
        """As the scripts of the peers read it."""
        windows = [window[:-1] for window in self.windows]
        return json.dumps(
            {"windows": windows, "prompts": self.prompts, "max_tokens": MAX_TOKENS}
            | {"threads": self.threads}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What an engine expects of the windows, one at a time, and says to the prompts."""

    windows: Windows
    greedy: Callable[[], list[list[int]]]
    num_bytes: int


def task_of(folder: Path, num_windows: int, threads: int) -> Task:
    """Windows and prompts, evenly spread over the text; each begins as the tokenizer begins."""
    tokenizer = Tokenizer(folder)
    text = read_text(DATA, "wikitext-2")
    ids = tokenizer.encode(text, add_special_tokens=False)
    begin = tokenizer.encode("a")[: -len(tokenizer.encode("a", add_special_tokens=False))]

    def spread(count: int, length: int) -> list[list[int]]:
        length -= len(begin)
        starts = [i * (len(ids) - length) // count for i in range(count)]
        return [begin + ids[start : start + length] for start in starts]

    return Task(
        windows=spread(num_windows, WINDOW + 1), prompts=spread(PROMPTS, PROMPT), threads=threads
    )


def by_headway(model: Path, task: Task, **options: Any) -> Answers:
    """Headway on a folder or a GGUF file."""
    found = FolderModel(model, kv_memory=MEMORY, max_model_len=WINDOW * 2, **options)

    def greedy() -> list[list[int]]:
        asked = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in task.prompts]
        outputs = found.llm.generate(prompts, asked, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return Answers(
        windows=(found.distributions(window[:-1]) for window in task.windows),
        greedy=greedy,
        num_bytes=found.llm.engine.executor.describe().weight_bytes,
    )


def by_peer(python: str, script: str, model: Path, task: Task, place: Path) -> Answers:
    """A peer's script on a model of its own; raises PeerError."""
    place.mkdir()
    (place / "request.json").write_text(task.request())
    program = Path(__file__).with_name(script)
    try:
        found = subprocess.run(
            [python, str(program), str(model), str(place / "request.json"), str(place)],
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise PeerError(f"{python}: {error.strerror}") from error
    if found.returncode:
        lines = found.stderr.strip().splitlines() or ["it said nothing"]
        raise PeerError(f"{script} ended with {found.returncode}: {lines[-1][:300]}")

    def windows() -> Windows:
        for number in range(len(task.windows)):
            file = place / f"window-{number}.npy"
            yield torch.from_numpy(np.load(file)).log_softmax(-1).numpy()
            file.unlink()

    files = [model] if model.is_file() else list(model.glob("*.bin"))
    return Answers(
        windows=windows(),
        greedy=lambda: json.loads((place / "answers.json").read_text()),
        num_bytes=sum(file.stat().st_size for file in files),
    )


# ── the reference ───────────────────────────────────────────────────────────────────────────


class Reference:
    """What transformers expects in fp32, on disk in a folder, for all rows.

    `answers` and `gaps` are its greedy answers, and the nats between the two best tokens of each.
    """

    def __init__(self, place: Path, task: Task) -> None:
        self._files = [place / f"{number}.npy" for number in range(len(task.windows))]
        found = json.loads((place / "answers.json").read_text())
        self.answers, self.gaps = found["answers"], found["gaps"]
        self.num_weights: int = found["num_weights"]

    def windows(self) -> Windows:
        """Mapped from the disk."""
        return (np.load(file, mmap_mode="r") for file in self._files)


@torch.inference_mode()
def write_reference(model: Any, task: Task, place: Path, greedy: bool) -> None:
    """Compute what a `Reference` reads."""
    for number, window in enumerate(task.windows):
        logits = model(torch.tensor([window[:-1]])).logits[0].float()
        np.save(place / f"{number}.npy", logits.log_softmax(-1).numpy())
    answers, gaps = answers_of(model, task.prompts) if greedy else ([], [])
    num_weights = sum(weight.numel() for weight in model.parameters())
    found = {"answers": answers, "gaps": gaps, "num_weights": num_weights}
    (place / "answers.json").write_text(json.dumps(found))


def reference_of(folder: Path, task: Task) -> Reference:
    """That of a folder, kept in the cache."""
    from transformers import AutoModelForCausalLM

    asked = hashlib.sha256(json.dumps([task.windows, task.prompts]).encode()).hexdigest()[:12]
    target = place_of(folder) / f"reference-{asked}"
    with created_once(target) as unfinished:
        if unfinished is not None:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            write_reference(model, task, unfinished, greedy=True)
    return Reference(target, task)


def answers_of(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy answers, and the nats between the two best tokens at each place of them."""
    tokens, past = torch.tensor(prompts), None
    answers: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    for _ in range(MAX_TOKENS):
        found = model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
        best, past = found.logits[:, -1].float().topk(2), found.past_key_values
        for i, (values, indices) in enumerate(zip(best.values, best.indices, strict=True)):
            answers[i].append(int(indices[0]))
            gaps[i].append(float(values[0] - values[1]))
        tokens = best.indices[:, :1]
    return answers, gaps


# ── comparing ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine and format. `own_kl` is to the weights of its GGUF file; None elsewhere.

    `by_window` has the KL divergence of each window; `perplexity` is a ratio; `wide` counts answers
    that leave the reference where it was sure.
    """

    name: str
    kl: float
    same: float
    perplexity: float
    by_window: list[float] = field(default_factory=list)
    own_kl: float | None = None
    identical: int = 0
    wide: int = 0
    num_bytes: int = 0
    bits: float = 0.0


@dataclass(slots=True)
class Sums:
    """Of one reference: the KL divergence of each window, tokens alike, more nats of the text."""

    kl: list[float] = field(default_factory=list)
    same: int = 0
    more: float = 0.0


def compare(references: Sequence[Windows], windows: Windows, task: Task) -> list[Sums]:
    """The same windows beside each reference."""
    sums = [Sums() for _ in references]
    for *references_TV, q_TV, window in zip(*references, windows, task.windows, strict=True):
        for each, p_TV in zip(sums, references_TV, strict=True):
            add_window(each, p_TV, q_TV, window[1:])
    return sums


def add_window(sums: Sums, p_TV: np.ndarray, q_TV: np.ndarray, following: list[int]) -> None:
    """KL(p ‖ q) as `evals.divergence.compare_rows` has it, some rows at a time."""
    total = 0.0
    for at in range(0, len(p_TV), ROWS_AT_ONCE):
        p, q = (torch.from_numpy(np.array(each[at : at + ROWS_AT_ONCE])) for each in (p_TV, q_TV))
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        sums.same += int((p.argmax(-1) == q.argmax(-1)).sum())
        tokens = torch.tensor(following[at : at + len(p)])[:, None]
        sums.more += float((p - q).gather(1, tokens).sum(dtype=torch.float64))
    sums.kl.append(total / len(p_TV))


def agreement(reference: Reference, answers: list[list[int]]) -> tuple[int, int]:
    """(answers that are the reference's, those that leave it at a gap of more than `WIDE`)."""
    identical = wide = 0
    for mine, theirs, gaps in zip(answers, reference.answers, reference.gaps, strict=True):
        place = next((i for i, pair in enumerate(zip(mine, theirs)) if pair[0] != pair[1]), None)
        identical += place is None
        wide += place is not None and gaps[place] > WIDE
    return identical, wide


class Table:
    """Rows as they come: each is written at once."""

    def __init__(self, reference: Reference, task: Task, chosen: argparse.Namespace) -> None:
        self.reference, self.task = reference, task
        self.rows: list[Row] = []
        self.skipped: dict[str, str] = {}
        self._only = list(filter(None, chosen.only.split(",")))
        self._json = chosen.json

    def wants(self, name: str) -> bool:
        """Whether the row was asked for: its name, or a text that it has."""
        return not self._only or any(each in name for each in self._only)

    def add(self, name: str, make: Callable[[], Answers], own: Reference | None = None) -> None:
        """Measure and print one row, or say why not; `own` is of a GGUF file's own weights."""
        if not self.wants(name):
            return
        try:
            row = self._row(name, make(), own)
        except (PeerError, HeadwayError) as error:
            self.skipped[name] = str(error)
            print(f"{name}: not measured, {error}", file=sys.stderr)
            return
        self.rows.append(row)
        figures = {"rows": [asdict(each) for each in self.rows], "skipped": self.skipped}
        write_json(self._json, figures, indent=2)
        print(f"{name}: KL {row.kl:z.4f}", file=sys.stderr, flush=True)

    def _row(self, name: str, answers: Answers, own: Reference | None) -> Row:
        references = [each.windows() for each in (self.reference, own) if each is not None]
        sums, *of_own = compare(references, answers.windows, self.task)
        count = sum(len(window) - 1 for window in self.task.windows)
        identical, wide = agreement(self.reference, answers.greedy())
        return Row(
            name=name,
            kl=float(np.mean(sums.kl)),
            same=sums.same / count,
            perplexity=float(np.exp(sums.more / count)),
            by_window=sums.kl,
            own_kl=float(np.mean(of_own[0].kl)) if of_own else None,
            identical=identical,
            wide=wide,
            num_bytes=answers.num_bytes,
            bits=8 * answers.num_bytes / self.reference.num_weights,
        )

    def markdown(self) -> str:
        """As the docs have it."""
        columns = ["", "KL", "KL to the file's weights", "same top token", "perplexity ×"]
        columns += [f"identical of {PROMPTS}", f"left at > {WIDE} nats", "MB", "bits a weight"]
        return markdown(
            columns,
            [
                (
                    *(row.name, f"{row.kl:z.4f}"),
                    "" if row.own_kl is None else f"{row.own_kl:.4f}",
                    *(f"{row.same:.1%}", f"{row.perplexity:.3f}", row.identical, row.wide),
                    *(f"{row.num_bytes / 1e6:.0f}", f"{row.bits:.2f}"),
                )
                for row in self.rows
            ],
        )


# ── rows ────────────────────────────────────────────────────────────────────────────────────


def add_headway(table: Table, folder: Path, also: list[str]) -> None:
    """Headway's formats, and folders of the user's."""
    for name, options in FORMATS.items():
        table.add(name, lambda options=options: by_headway(folder, table.task, **options))
    for given in also:
        name, _, path = given.rpartition("=")
        table.add(f"Headway {name}", lambda path=path: by_headway(Path(path), table.task))


def add_file(table: Table, name: str, file: Path, folder: Path, python: str, place: Path) -> None:
    """A GGUF file of this folder in Headway and in llama.cpp."""
    if not any(table.wants(f"{engine} {name}") for engine in ("Headway", "llama.cpp")):
        return
    there = place / f"own {name}"
    there.mkdir()
    write_reference(load_gguf(file, like=folder), table.task, there, greedy=False)
    own = Reference(there, table.task)
    table.add(f"Headway {name}", lambda: by_headway(file, table.task), own)
    table.add(
        f"Headway {name} in float16", lambda: by_headway(file, table.task, dtype="float16"), own
    )
    if python:

        def answers() -> Answers:
            return by_peer(python, "llama_logits.py", file, table.task, place / name)

        table.add(f"llama.cpp {name}", answers, own)
    shutil.rmtree(there)


def add_files(table: Table, folder: Path, chosen: argparse.Namespace, place: Path) -> None:
    """The model's own GGUF file, and those that llama.cpp makes of the folder."""
    python, source = chosen.llama or ("", "")
    model = MODELS.get(chosen.model)
    published = fetch(model) if model is not None and model.is_gguf else None
    if published is not None:
        name = f"the published {published.stem.rpartition('.')[2]}"
        add_file(table, name, published, folder, python, place)
    for kind in chosen.types.split(",") if source else ():
        try:
            file = gguf_file(folder, kind, python, Path(source), published)
        except PeerError as error:
            table.skipped[kind] = str(error)
            continue
        add_file(table, kind, file, folder, python, place)


def add_openvino(table: Table, folder: Path, python: str, place: Path) -> None:
    """OpenVINO's formats."""
    for kind in ("int8", "int4"):

        def answers(kind: str = kind) -> Answers:
            exported = openvino_folder(folder, kind, python)
            there = place / f"openvino-{kind}"
            return by_peer(python, "openvino_logits.py", exported, table.task, there)

        table.add(f"OpenVINO {kind}", answers)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--windows", type=int, default=6, help=f"of {WINDOW} tokens")
    parser.add_argument("--only", default="", help="rows whose name has one of these texts")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--llama", nargs=2, metavar=("PYTHON", "SOURCE"))
    parser.add_argument("--types", default=",".join(TYPES), help="GGUF files to make")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the peers")
    parser.add_argument("--json", type=Path, help="file for the figures")
    chosen = parser.parse_args()
    folder = folder_of(MODELS[chosen.model]) if chosen.model in MODELS else Path(chosen.model)
    task = task_of(folder, chosen.windows, chosen.threads)
    table = Table(reference_of(folder, task), task, chosen)
    with tempfile.TemporaryDirectory() as name:
        add_headway(table, folder, chosen.also)
        add_files(table, folder, chosen, Path(name))
        if chosen.openvino:
            add_openvino(table, folder, chosen.openvino, Path(name))
    print(f"{folder.name}, {chosen.windows} × {WINDOW} tokens of wikitext-2\n")
    print(table.markdown())
    for what, why in table.skipped.items():
        print(f"\n{what}: not measured, {why}")


if __name__ == "__main__":
    main()
