"""The table of how small keys and values become: bytes by hand, and as docs/attention.md has it."""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.spec import read_model_spec
from headway.spec.embedded import model_folder
from literature.lean import Means, held, lean, table

ROOT = Path(__file__).resolve().parents[3]

SPEC = read_model_spec(model_folder(None))


def test_bytes_are_those_counted_by_hand():
    """6 layers of 3 heads of 64 in bf16; one head; in int8; windows of 64 hold 5 blocks of 16."""
    context, head = 2048, 2 * 64 * 2
    shape = {"kv_heads": 1, "windows": (64, 0, 64, 64, 64, 64), "name": ""}
    assert held(lean(SPEC, Means(name="", kv_heads=3)), "bfloat16", context) == 6 * 3 * head * 2048
    assert held(lean(SPEC, Means(name="", kv_heads=1)), "int8", context) == 6 * 136 * 2048
    narrow = lean(SPEC, Means(**shape))
    assert held(narrow, "bfloat16", context) == head * (2048 + 5 * 80)
    sinks = lean(SPEC, Means(**shape, sinks=4))
    assert held(sinks, "bfloat16", context) == head * (2048 + 5 * 96)


def test_of_neighbours_that_share_one_holds():
    """0 | 1 | 2 3 | 4 5: layers 3 and 5 read, and a third in a row would hold its own again."""
    shared = lean(SPEC, Means(name="", kv_heads=1, windows=(64, 0, 64, 64, 64, 64), shared=True))
    assert [layer.kv_from for layer in shared.layers] == [None, None, None, 2, None, 4]
    assert sum(len(group.layers) for group in shared.kv_groups) == 4
    every = lean(SPEC, Means(name="", kv_heads=1, shared=True))
    assert held(every, "bfloat16", 2048) * 2 == held(
        lean(SPEC, Means(name="", kv_heads=1)), "bfloat16", 2048
    )


def test_a_model_of_another_shape_has_no_windows_of_headway_tiny():
    other = replace(SPEC, num_kv_heads=3)
    assert not any("by layer" in means.name for means, _, _ in table(other, 2048))
    assert table(other, 2048)[1][0].trained


def test_twenty_times_are_reached_with_the_weights_that_there_are():
    found = {means.name: (times, means.trained) for means, _, times in table(SPEC, 2048)}
    assert [trained for times, trained in found.values() if times > 20].count(False) == 1
    assert max(found.values())[0] > 30


@pytest.mark.parametrize("context", [2048])
def test_the_table_of_the_page_is_this_one(context: int):
    page = (ROOT / "docs/attention.md").read_text()
    for means, count, times in table(SPEC, context):
        trained = "yes" if means.trained else "no"
        row = f"| {means.name} | {count / 1024:,.1f} | {times:.1f} | {trained} |"
        assert row in page, row
