"""The share of a prompt that is kept: what options say, what it counts, what memory it plans."""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.config.kv_keep import (
    FEWEST,
    blocks_dropped,
    count_kept_tokens,
    keep_limits,
    keep_share,
)
from headway.config.memory_plan import share_among, share_blocks
from headway.config.options import EngineOptions
from headway.config.served_spec import as_served
from headway.core.errors import UsageError
from headway.planning import plan_settings
from headway.spec import KVGroupSpec, read_model_spec
from headway.spec.embedded import model_folder

FOLDER = model_folder(None)


def test_the_worked_example():
    assert blocks_dropped(0.25, 1000, 16) == 46
    assert count_kept_tokens(0.25, 1000, 16) == 264
    assert keep_limits(1000, 0.25, 16, [True, False]) == [(0, 264), (0, 0)]


@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("share", [0.01, 0.25, 0.9, 1.0])
def test_whole_blocks_are_given_up_and_never_too_many(share: float, size: int):
    for count in range(0, 700, 7):
        kept = count_kept_tokens(share, count, size)
        assert kept >= min(count, max(FEWEST, share * count)) and (count - kept) % size == 0
        assert kept < max(FEWEST, share * count) + 1 + size or kept == count


@pytest.mark.parametrize("text", ["0.25", "25%"])
def test_a_share_is_a_number_or_percent(text: str, tmp_path: Path):
    assert keep_share(text) == 0.25
    settings = planned(tmp_path, kv_keep=text)[1]
    assert (settings.cache.keep, settings.cache.choosing) == (0.25, (0,))
    assert settings.to_stats()["kv_keep"] == "0.25"
    assert planned(tmp_path, kv_keep="")[1].to_stats()["kv_keep"] == "1"


@pytest.mark.parametrize("text", ["25%:keydiff", "25%:snapkv", "25%:h2o", "25%:best"])
def test_a_method_is_refused_with_the_share_alone(text: str):
    with pytest.raises(UsageError, match="KeyDiff alone chooses") as refused:
        keep_share(text)
    assert refused.value.fix == "Give a share alone, 25%."


@pytest.mark.parametrize(
    "text",
    ["0", "101%", "a quarter", "-1", "25%:", ":snapkv", "25%:h2o:h2o", "snapkv:25%"],
)
def test_what_is_no_share_is_refused(text: str):
    with pytest.raises(UsageError, match="--kv-keep is"):
        keep_share(text)


def planned(tmp_path: Path, layers: str = "", **options: object):
    """(the model as served, its settings) of headway-tiny that keeps a quarter."""
    path = tmp_path / "kv.yaml"
    path.write_text(f"layers: {{{layers}}}")
    told = {"kv_keep": "25%", "device": "cpu", "attention_backend": "reference", **options}
    told["kv_layers"] = str(path) if layers else ""
    engine = EngineOptions(**told)  # type: ignore[arg-type]
    return as_served(read_model_spec(FOLDER), engine), plan_settings(FOLDER, engine)[1]


def test_layers_that_choose_are_a_group(tmp_path: Path):
    """Whole layers, windows and those that choose are three; guesses are off."""
    spec, settings = planned(tmp_path, "0: whole, 2: {window: 64}")
    assert [layer.chooses for layer in spec.layers] == [False, True, False, True, True, True]
    assert [group.layers for group in spec.kv_groups] == [(0,), (1, 3, 4, 5), (2,)]
    cache = settings.cache
    assert (cache.choosing, cache.keep) == ((1,), 0.25)
    assert cache.chooses == (False, True, False, True, True, True)
    assert settings.speculation.sources == ()


def test_without_the_option_nothing_changes():
    spec = read_model_spec(FOLDER)
    assert as_served(spec, EngineOptions()) == spec
    cache = plan_settings(FOLDER, EngineOptions(device="cpu"))[1].cache
    assert (cache.chooses, cache.choosing, cache.keep) == ((), (), 1.0)


def test_memory_goes_to_what_keeps_all(tmp_path: Path):
    """24 MB, contexts of 2,048: the group that chooses has room for a whole prompt twice, and 11/32
    of what the others hold, in no more bytes than are given."""
    spec, settings = planned(tmp_path, "0-1: whole", kv_memory=24 * 2**20, max_model_len=2048)
    whole, chooses = settings.cache.num_blocks
    sizes = [group.bytes_per_token("bfloat16") * 16 for group in spec.kv_groups]
    assert whole * sizes[0] + chooses * sizes[1] <= 24 * 2**20
    assert whole * sizes[0] + chooses * sizes[1] >= 0.98 * 24 * 2**20
    assert chooses - 1 == 256 + int((1 / 8 + 7 / 8 / 4) * (whole - 1))
    exact = plan_settings(
        FOLDER, EngineOptions(device="cpu", kv_memory=24 * 2**20, max_model_len=2048)
    )[1].cache.num_blocks[0]
    assert whole > 1.3 * exact


def test_a_prompt_is_whole_once_beside_what_is_kept():
    """The worked example, and nothing changes where nobody chooses."""
    whole = KVGroupSpec(layers=(0,), num_kv_heads=1, head_dim=2)
    groups = replace(whole, chooses=True), whole
    options = EngineOptions(kv_keep="25%")
    assert share_among(options, groups, 10_000, [9999] * 2, [10, 10], 100) == [395, 570]
    alike = share_among(options, (whole, whole), 10_000, [9999] * 2, [10, 10], 100)
    assert alike == share_blocks(10_000, [9999] * 2, [10, 10]) == [499, 499]


def test_little_memory_holds_shorter_contexts(tmp_path: Path):
    """One that is whole and chosen at once fits: half of what the group has."""
    _, settings = planned(tmp_path, kv_memory=2 * 2**20)
    assert settings.max_model_len <= (settings.cache.num_blocks[0] - 1) // 2 * 16


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"attention_backend": "sdpa"}, "sdpa attention reads whole contexts"),
        ({"kv_cache_dtype": "int4"}, "int4 rounds tokens that follow"),
        ({"kv_read": "25%"}, "--kv-read 25% reads blocks"),
        ({"speculative_method": "ngram"}, "draft tokens .--speculative-method"),
        ({"kv_keep": "0"}, "--kv-keep is '0'"),
    ],
)
def test_what_cannot_choose_is_refused_by_name(tmp_path: Path, options: dict, word: str):
    with pytest.raises(UsageError, match=word):
        planned(tmp_path, **options)


def test_a_model_without_a_layer_that_chooses_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="every layer has a window or is whole"):
        planned(tmp_path, "0-2: whole, 3-5: {window: 64}")
