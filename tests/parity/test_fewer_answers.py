"""What a quarter of the keys answers: as the whole model, where the layers that look up and copy
are whole, and not where another is whole in place of the one that copies."""

from pathlib import Path

import pytest

from headway.evals.questions import ask
from headway.spec.embedded import model_folder
from headway.whole_model import FolderModel

QUESTIONS = 8
SEED = 11


def right(**options: str) -> int:
    """Right answers to questions that copy from a text into JSON, with 2 to 5 fields."""
    model = FolderModel(model_folder(None), kv_memory="64MiB", **options)
    asked = ask(model, skills=("extract",), questions=QUESTIONS, seed=SEED)
    share = asked.find("extract", 0)
    assert share is not None and share.total == 3 * QUESTIONS
    return share.right


@pytest.fixture(scope="module")
def of_the_whole() -> int:
    found = right()
    assert found > 2 * QUESTIONS
    return found


def layers(tmp_path: Path, whole: str) -> str:
    path = tmp_path / "layers.yaml"
    path.write_text(f"layers: {{{whole}: whole}}")
    return str(path)


@pytest.mark.parametrize("less", [{"kv_read": "25%"}, {"kv_keep": "25%"}], ids=str)
def test_a_quarter_answers_as_the_whole(tmp_path: Path, of_the_whole: int, less: dict[str, str]):
    assert right(kv_layers=layers(tmp_path, "1-2"), **less) >= of_the_whole - 1


def test_the_layer_that_copies_has_to_be_whole(tmp_path: Path, of_the_whole: int):
    """Layer 0 in its place: lookups and texts lose nothing by that, copies do."""
    assert right(kv_layers=layers(tmp_path, "0-1"), kv_keep="25%") <= of_the_whole - 3
