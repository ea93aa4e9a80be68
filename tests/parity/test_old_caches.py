"""Caches on disk that 0.2 wrote are not read: weights were rounded and inputs scaled otherwise."""

import threading
from pathlib import Path

import pytest

from drive import engine_for, finish
from headway.config import resolve
from headway.config.options import EngineOptions
from headway.config.resolve import Settings
from headway.core.request import Request, SamplingParams
from headway.planning import plan_settings
from headway.runtime import weight_key
from headway.runtime.kvstore import open as kv_open
from headway.runtime.kvstore.open import open_disk
from headway.runtime.native.available import best_instruction_set
from headway.runtime.weight_cache import look_up_weights
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
LAYOUT_OF_0_2, FORMAT_OF_0_2 = 1, 1
REQUEST = Request(0, [5, 9, 40, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model small enough for a test, kept in a cache folder of the test's own all the same."""
    monkeypatch.setattr(resolve, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save(tiny_model("qwen2"), tmp_path / "model")


def answer(folder: Path, **options: object) -> list[int]:
    """Tokens of an engine in int8, whose packed weights are on disk when it returns."""
    found = finish(engine_for(folder, quantization="int8", max_model_len=64, **options), [REQUEST])
    for thread in threading.enumerate():
        if thread.name == "weight cache writer":
            thread.join()
    return found[0, 0].token_ids


def is_cached(folder: Path, settings: Settings) -> bool:
    lookup = look_up_weights(folder, settings)
    assert lookup is not None
    return lookup.result() is not None


@pytest.mark.skipif(not best_instruction_set()[0], reason="without kernels no weights are packed")
def test_packed_weights_of_0_2_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    options = EngineOptions(
        device="cpu", kv_memory=64 * 2**20, threads=1, quantization="int8", max_model_len=64
    )
    settings = plan_settings(folder, options)[1]
    with monkeypatch.context() as old:
        old.setattr(weight_key, "LAYOUT_VERSION", LAYOUT_OF_0_2)
        answer(folder)
        assert is_cached(folder, settings)
    assert not is_cached(folder, settings)
    assert answer(folder) == answer(folder, weight_cache=0)
    assert is_cached(folder, settings)


def test_kv_blocks_of_0_2_are_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = EngineOptions(kv_disk=f"{tmp_path / 'kv'}:100MB", max_model_len=64)
    spec, settings, _, _ = plan_settings(folder, options)
    folders = []
    for format in (FORMAT_OF_0_2, kv_open.FORMAT):
        monkeypatch.setattr(kv_open, "FORMAT", format)
        disk = open_disk(folder, spec, settings, [])
        assert disk is not None
        folders.append(disk.store.folder)
        disk.store.close()
    assert folders[0] != folders[1]
