"""What `--fallback-model FOLDER` starts its engine with, beside options of the first model."""

from pathlib import Path
from typing import Any

import pytest

from headway.cli.build_server import fallback_engine_options
from headway.config.options import Bytes, EngineOptions
from headway.planning import plan_settings
from headway.spec.embedded import model_folder

TINY, DRAFT = model_folder("headway-tiny"), model_folder("headway-draft")
FOUR = "layers:\n  0: {window: 64, sinks: 4}\n  2-5: {window: 64, sinks: 4}\n"


@pytest.mark.parametrize(
    "given",
    [
        {"speculative_method": "medusa,ngram"},
        {"speculative_method": "draft", "draft_model": "headway-draft"},
        {"kv_layers": FOUR, "kv_read": "25%"},
        {"kv_keep": "25%"},
        {"kv_cache_dtype": "int4", "kv_cache_dtype_skip_layers": "4,5"},
        {"tensor_parallel_size": 3, "sum_parts": 3},
        {"pipeline_parallel_size": 6},
    ],
    ids=lambda given: ",".join(given),
)
def test_options_of_the_first_model_alone_are_not_the_seconds(
    given: dict[str, Any], tmp_path: Path
):
    """headway-tiny: six layers of three heads, and heads that guess; headway-draft: two of two."""
    if "kv_layers" in given:
        file = tmp_path / "layers.yaml"
        file.write_text(FOUR)
        given = {**given, "kv_layers": str(file)}
    first = EngineOptions(kv_memory=Bytes(32 * 2**20), threads=1, seed=7, **given)
    plan_settings(TINY, first)
    second = fallback_engine_options(first)
    spec, settings, _, _ = plan_settings(DRAFT, second)
    assert spec.num_layers == 2 and settings.parallel.num_ranks == 1
    assert (settings.cache.read, settings.cache.keep, settings.cache.narrowed) == (1, 1, ())
    assert settings.seed == 7 and second.kv_cache_dtype == first.kv_cache_dtype
    expected = ("lookup",) if "ngram" in (first.speculative_method or "") else ()
    assert settings.speculation.sources == expected
