"""Every verb that is given a model takes a GGUF file, or names the verbs that do."""

from pathlib import Path

import pytest

import gguf_file
from headway.cli.main import VERBS, main

TAKES = {
    "serve": ["--dry-run"],
    "eval": ["--suite=skills", "--dry-run"],
    "doctor": ["--probe-seconds=0"],
    "simulate": ["--dry-run"],
    "run": ["a prompt", "--dry-run"],
    "chat": ["--dry-run"],
    "bench": ["--num-requests=2", "--dry-run"],
}
REFUSES = {
    "quantize": ["OUT", "--dry-run"],
    "prune": ["OUT", "--neurons=0.5", "--dry-run"],
    "distill": ["FILE", "OUT", "--data=skills", "--dry-run"],
}
MEASURES = {"plan", "tune", "batch", "gateway rollout"}
"""Verbs that resolve the model by the same function, and need traffic, a file or a gateway."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A Llama of one layer with zeros for weights."""
    folder = Path(__file__).resolve().parents[3] / "src/headway/embedded/headway-tiny"
    vocabulary = gguf_file.vocabulary_of(folder, whole=True)
    return gguf_file.write(
        tmp_path / "small.gguf",
        {**gguf_file.LLAMA, **vocabulary, "llama.vocab_size": 8, "llama.context_length": 2048},
        gguf_file.llama_tensors("F16"),
    )


def call(verb: str, words: list[str], file: Path) -> int:
    named = {"OUT": file.with_name("out"), "OUT.yaml": file.with_name("out.yaml"), "FILE": file}
    return main([verb, str(file), *(str(named.get(word, word)) for word in words)])


def test_no_verb_is_left_out():
    given = {
        name for name, verb in VERBS.items() if "FOLDER" in verb.usage or "MODEL" in verb.usage
    }
    assert given - {"plan --place"} <= TAKES.keys() | REFUSES.keys() | MEASURES


@pytest.mark.parametrize("verb", TAKES)
def test_a_gguf_file_is_accepted(verb: str, file: Path, capsys: pytest.CaptureFixture[str]):
    status = call(verb, TAKES[verb], file)
    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize("verb", REFUSES)
def test_a_gguf_file_is_refused_by_name(verb: str, file: Path, capsys: pytest.CaptureFixture[str]):
    assert call(verb, REFUSES[verb], file) == 2
    said = capsys.readouterr().err
    assert f"small.gguf is a GGUF file; headway {verb} reads the safetensors" in said
    assert "serve, run, chat, batch, bench, eval and doctor take the file" in said
