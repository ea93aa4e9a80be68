"""Tokens after a restore are equal to those before, in every format, layout and window.

What lies in host memory, or on a disk for the next engine, must be the bytes that computing it
again would give: a scale, an open block or a sink that was left behind would show in a token.
"""

from pathlib import Path

import pytest

from drive import engine_for, finish, greedy
from headway.engine.calibration import warm_up
from headway.engine.engine import Engine
from parity.tiny import TWO_LAYERS, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 70,
}
MODELS = {"full": ("llama", {}), "window": ("qwen3", WINDOWS)}
KINDS = {
    "own": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"kv_cache_dtype": "int8"},
    "int4": {"kv_cache_dtype": "int4"},
    "int8/int4": {"kv_cache_dtype": "int8/int4"},
    "int4/int8": {"kv_cache_dtype": "int4/int8"},
    "int4, first layer exact": {"kv_cache_dtype": "int4", "kv_cache_dtype_skip_layers": "0"},
    "sdpa": {"attention_backend": "sdpa"},
    "kept": {"kv_keep": "40%", "kv_cache_dtype": "int8"},
    "sinks": {"kv_layers": "layers: {0: {window: 40, sinks: 3}}"},
}
PROMPT = [3 + number * 7 % 50 for number in range(300)]
OTHERS = [[5 + (number * 11 + other) % 50 for number in range(300)] for other in range(2)]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, more = MODELS[request.param]
    return save(tiny_model(family, **TWO_LAYERS | more), tmp_path_factory.mktemp("restored"))


def made(folder: Path, tmp_path: Path, kind: str, **more: object) -> Engine:
    how = dict(KINDS[kind])
    if "kv_layers" in how:
        (tmp_path / "layers.yaml").write_text(str(how["kv_layers"]))
        how["kv_layers"] = str(tmp_path / "layers.yaml")
    sizes = {"max_num_batched_tokens": 96, "max_num_seqs": 2}
    return engine_for(folder, **{**sizes, **how, **more})


def answer(engine: Engine, number: int, prompt: list[int]) -> tuple[list[int], int]:
    gained = finish(engine, [greedy(number, list(prompt), 40)])[number, 0]
    return gained.token_ids, gained.num_cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_engine_restores_from_the_disk_and_gives_equal_tokens(folder, tmp_path, kind):
    disk = {"kv_disk": f"{tmp_path / 'kv'}:50MB", "kv_disk_write": "through"}
    first = made(folder, tmp_path, kind, **disk)
    expected, found = answer(first, 0, PROMPT)
    assert found == 0
    first.executor.transfers.disk.store.close()
    second = made(folder, tmp_path, kind, **disk)
    warm_up(second)
    second.kv.tiers.recompute_s = lambda end, start: 60.0
    again, found = answer(second, 0, PROMPT)
    assert again == expected and found >= 256
    second.executor.transfers.disk.store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_evicted_comes_back_from_host_memory_with_equal_tokens(folder, tmp_path, kind):
    """Memory for one and a half contexts; the prompt's blocks have left when it comes again."""
    host = {"kv_host_memory": 16 * 2**20, "max_model_len": 384}
    whole = made(folder, tmp_path, kind, **host)
    size = whole.settings.cache.block_size
    few = made(folder, tmp_path, kind, **host, num_blocks=576 // size)
    for engine in (whole, few):
        engine.kv.tiers.host.is_expensive = lambda group: True
        engine.kv.tiers.recompute_s = lambda end, start: 60.0
    expected, _ = answer(whole, 0, PROMPT)
    assert answer(few, 0, PROMPT) == (expected, 0)
    for number, other in enumerate(OTHERS, 1):
        assert answer(few, number, other) == answer(whole, number, other)
    again, found = answer(few, 9, PROMPT)
    assert again == expected and found >= 256
