"""The YAML of --kv-layers: which layers it narrows, and what it refuses."""

import dataclasses
from pathlib import Path

import pytest

from headway.config.kv_layers import narrowed, with_exact_layers
from headway.config.memory_plan import with_open_blocks
from headway.config.options import EngineOptions
from headway.config.resolve import resolve
from headway.core.errors import UsageError
from headway.spec import read_model_spec
from headway.spec.embedded import model_folder
from resolve_cases import machine

SPEC = read_model_spec(model_folder(None))


def written(folder: Path, text: str) -> str:
    path = folder / "kv.yaml"
    path.write_text(text)
    return str(path)


def test_all_but_one_layer_hold_a_fifth(tmp_path: Path):
    """Layer 1 sees everything, five a window of 64 and 4 sinks: 2,388 of 12,288 layer-tokens."""
    rows = "layers: {0: {window: 64, sinks: 4}, 2-5: {window: 64, sinks: 4}}"
    spec = narrowed(SPEC, written(tmp_path, rows))
    assert [(g.layers, g.window, g.sinks) for g in spec.kv_groups] == [
        ((0, 2, 3, 4, 5), 64, 4),
        ((1,), 0, 0),
    ]
    held = sum(len(group.layers) * group.attended_tokens(2048) for group in spec.kv_groups)
    assert held == 2388 and held / (6 * 2048) < 0.2
    assert narrowed(SPEC, "") is SPEC


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("window: 3", "layers"),
        ("layers: []", "layers"),
        ("layers: {6: {window: 64}}", "no layer 6"),
        ("layers: {x: {window: 64}}", "'x'"),
        ("layers: {true: {window: 64}}", "True"),
        ("layers: {0-2: {window: 64}, 1: {window: 32}}", "layer 1 is there twice"),
        ("layers: {0: {sinks: 4}}", "layer 0"),
        ("layers: {0: {window: 0}}", "window"),
        ("layers: {0: {window: 99999}}", "window"),
        ("layers: {0: {window: 64, sinks: -1}}", "sinks"),
        ("layers: {0: {window: true}}", "window"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, named: str):
    with pytest.raises(UsageError, match=named):
        narrowed(SPEC, written(tmp_path, text))


def test_layers_are_skipped_by_the_format():
    """Layers 0, 4 and 5 in bf16 are a group of their own, and have no open blocks."""
    spec = with_exact_layers(SPEC, "0, 4-5", "int4", "bfloat16")
    exact, rounded = spec.kv_groups
    assert (exact.layers, exact.kv_dtype) == ((0, 4, 5), "bfloat16")
    assert (rounded.layers, rounded.kv_dtype) == ((1, 2, 3), "")
    assert spec.kv_bytes_per_token("int4") == 3 * 256 + 3 * 76
    *_, still_open = with_open_blocks(spec.kv_groups, spec, "bfloat16", "int4")
    assert still_open.layers == (1, 2, 3) and still_open.kind == "open"
    assert with_exact_layers(SPEC, "", "auto", "bfloat16") is SPEC


@pytest.mark.parametrize(
    ("given", "kv_dtype", "named"),
    [
        ("0", "auto", "with --kv-cache-dtype auto every layer"),
        ("6", "int4", "no layer 6"),
        ("last", "int8", "'last' names no layer"),
        ("0,,1", "int8", "'' names no layer"),
        ("0-5", "int4", "these are all layers"),
    ],
)
def test_layers_that_cannot_be_skipped_are_named(given: str, kv_dtype: str, named: str):
    with pytest.raises(UsageError, match=named):
        with_exact_layers(SPEC, given, kv_dtype, "bfloat16")


def test_int4_kv_refuses_sinks(tmp_path: Path):
    """int8 serves a file with sinks; int4, whose newest block lies elsewhere, does not."""
    native = dataclasses.replace(machine(), native="avx2", native_why="compiled for avx2")
    file = written(tmp_path, "layers: {2: {window: 64, sinks: 4}}")
    options = EngineOptions(kv_layers=file, kv_cache_dtype="int8")
    settings, _ = resolve(options, native, narrowed(SPEC, file))
    assert (settings.cache.windows, settings.cache.sinks) == ((0, 64), (0, 4))
    with pytest.raises(UsageError, match="sinks") as refused:
        resolve(dataclasses.replace(options, kv_cache_dtype="int4"), native, narrowed(SPEC, file))
    assert "int8" in str(refused.value.fix)
