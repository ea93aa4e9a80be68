"""headway-tiny as wide as Qwen2.5-1.5B, cut over ranks in every way: the tokens of one rank."""

from pathlib import Path
from typing import Any

import pytest

from drive import engine_for, finish
from headway.core.request import Request
from headway.spec.embedded import model_folder
from ranked import leader_of, ranks, requests
from widening import find_shape, widen

pytestmark = [pytest.mark.hardening, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 query heads and 2 KV heads: on 4 ranks two have the same KV head."""
    out = tmp_path_factory.mktemp("wide") / "model"
    widen(model_folder("headway-tiny"), find_shape("qwen2.5-1.5b"), out)
    return out


def asked() -> list[Request]:
    """Four that are greedy, and four at temperature 1."""
    return requests(0, 4) + requests(1.0)[4:]


@pytest.mark.parametrize(
    ("cut", "share"),
    [
        ({"tensor_parallel_size": 2, "sum_parts": 4}, 1 / 2),
        ({"tensor_parallel_size": 4, "sum_parts": 4}, 1 / 4),
        ({"pipeline_parallel_size": 2}, 1 / 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sum_parts": 4}, 1 / 4),
        ({"decode_context_parallel_size": 2}, 1),
    ],
    ids=["TP 2", "TP 4", "PP 2", "TP 2 by PP 2", "CP 2"],
)
def test_a_cut_model_says_what_one_rank_says(folder: Path, cut: dict[str, Any], share: float):
    """And a rank holds its share of the weights, but for a tenth of it at most."""
    options = {"dtype": "bfloat16", "max_model_len": 128}
    parts = {"sum_parts": cut["sum_parts"]} if "sum_parts" in cut else {}
    whole = engine_for(folder, **options, **parts)
    one, held = finish(whole, asked()), whole.executor.describe().weight_bytes
    del whole
    with ranks(folder, **options, **cut) as engine:
        many = finish(engine, asked())
        assert max(leader_of(engine).weight_bytes) <= 1.1 * share * held
    assert {key: each.token_ids for key, each in many.items()} == {
        key: each.token_ids for key, each in one.items()
    }
