"""The share of its context that a generated token reads: what options say, and what it counts."""

from pathlib import Path

import pytest

from headway.config.kv_read import FEWEST, blocks_read, read_share, tokens_read
from headway.config.options import EngineOptions
from headway.config.served_spec import as_served
from headway.core.errors import UsageError
from headway.planning import plan_settings
from headway.spec import read_model_spec
from headway.spec.embedded import model_folder


def test_a_share_is_written_as_percent_or_as_a_number():
    assert [read_share(text) for text in ("25%", "0.25", "100%", "12.5%", "")] == [
        0.25, 0.25, 1.0, 0.125, 1.0,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["0", "0%", "101%", "1.5", "-25%", "a quarter", "25 %%", "nan"])
def test_what_is_no_share_is_refused(text: str):
    with pytest.raises(UsageError, match="--kv-read"):
        read_share(text)


def test_blocks_are_rounded_up_and_never_fewer_than_the_fewest():
    assert [blocks_read(0.25, count) for count in (1, 8, 32, 33, 63)] == [1, 8, 8, 9, 16]
    assert blocks_read(0.01, 100) == FEWEST


def test_tokens_read_are_a_mean_over_the_layers():
    """One layer chooses 16 of 63 blocks, one has a window of 100, two read all of 1,000."""
    assert tokens_read(1000, 0.25, 16, [-1, 100, 0, 0]) == round((256 + 100 + 2000) / 4)
    assert tokens_read(10, 0.25, 16, [-1, 100]) == 10


def spec_of(tmp_path: Path, layers: str, **options: str):
    path = tmp_path / "kv.yaml"
    path.write_text(f"layers: {{{layers}}}")
    engine = EngineOptions(kv_layers=str(path), device="cpu", **options)  # type: ignore[arg-type]
    return as_served(read_model_spec(model_folder(None)), engine), engine


def test_layers_with_a_window_and_whole_ones_keep_no_bounds(tmp_path: Path):
    """Whole layers, windows and those that choose are three groups; bounds take 6% of bf16."""
    spec, engine = spec_of(tmp_path, "0: whole, 2: {window: 64}", kv_read="25%")
    assert [layer.bounds for layer in spec.layers] == [0, 16, 0, 16, 16, 16]
    assert [group.layers for group in spec.kv_groups] == [(0,), (1, 3, 4, 5), (2,)]
    each = [group.bytes_per_token("bfloat16") / len(group.layers) for group in spec.kv_groups]
    assert each[0] == each[2] and each[1] == each[0] * 17 / 16
    settings = plan_settings(model_folder(None), engine)[1]
    assert settings.cache.read == 0.25
    assert settings.cache.bounded == (False, True, False, True, True, True)


def test_without_the_option_nothing_changes():
    spec = read_model_spec(model_folder(None))
    assert as_served(spec, EngineOptions()) == spec
    settings = plan_settings(model_folder(None), EngineOptions(device="cpu"))[1]
    assert settings.cache.bounded == () and settings.cache.read == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"attention_backend": "sdpa"}, "sdpa attention reads everything"),
        ({"kv_cache_dtype": "int4", "attention_backend": "native"}, "no bounds of keys"),
        ({"kv_read": "0"}, "--kv-read is '0'"),
    ],
)
def test_what_cannot_choose_is_refused_by_name(options: dict[str, str], word: str):
    with pytest.raises(UsageError, match=word):
        plan_settings(
            model_folder(None),
            EngineOptions(**{"device": "cpu", "kv_read": "25%", **options}),  # type: ignore[arg-type]
        )


def test_a_model_without_a_layer_that_chooses_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="every layer has a window or is whole"):
        spec_of(tmp_path, "0-2: whole, 3-5: {window: 64}", kv_read="25%")
