"""The search for windows by layer: its knapsack against all combinations, losses, the file."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cli.narrow import as_yaml
from headway.core.embedded import model_folder
from headway.core.errors import UsageError
from headway.core.kv_layers import narrowed
from headway.core.model_spec import read_model_spec
from headway.core.scoring import Score
from headway.evals.narrowing import (
    Layers,
    Losses,
    Lost,
    Row,
    cheapest,
    judged_length,
    losses,
    search,
)


def layers(*seen: int, candidates: tuple[int, ...] = (20, 50), sinks: int = 0) -> Layers:
    return Layers(seen=seen, sinks=sinks, candidates=candidates, judged=max(seen))


def test_the_example_of_the_page():
    """100 of 200 tokens: layer 0 whole leaves layer 1 none, so both see 50."""
    alone = [{0: 0.0, 20: 0.9, 50: 0.7}, {0: 0.0, 20: 0.1, 50: 0.0}]
    assert cheapest(layers(100, 100), alone, 0.5) == (50, 50)
    assert cheapest(layers(100, 100), alone, 0.6) == (0, 20)
    assert cheapest(layers(100, 100), alone, 0.2) == (20, 20)


LOSSES = st.lists(st.integers(0, 9), min_size=3, max_size=3)


@given(tables=st.lists(LOSSES, min_size=1, max_size=5), most=st.floats(0.1, 0.99))
def test_nothing_within_the_share_loses_less(tables: list[list[int]], most: float):
    """Against every combination; of equal losses it holds the fewest tokens."""
    found = layers(*[100] * len(tables), candidates=(6, 30, 70), sinks=4)
    alone = [{0: 0.0, **dict(zip((6, 30, 70), map(float, row)))} for row in tables]
    fit = [each for each in itertools.product(*alone) if found.share(each) <= most]

    def order(windows: tuple[int, ...]) -> tuple[float, float]:
        lost = sum(row[window] for row, window in zip(alone, windows))
        return lost, found.share(windows)

    assert order(cheapest(found, alone, most)) == min(map(order, fit))


def test_each_layer_is_tried_alone_then_all_together():
    """Layer 1 needs 50, layer 0 nothing wider than 20: no wider one is measured there."""
    asked = []

    def measure(windows: tuple[int, ...]) -> Losses:
        asked.append(windows)
        nats = {0: 0.0, 20: 0.5, 50: 0.01}[windows[1]]
        return Losses(kinds={"copy": Lost(nats, 0, 1), "sort": Lost(-0.2, 0, 1)})

    found = search(layers(100, 100), 0.5, 0.02, measure)
    assert asked == [(20, 0), (0, 20), (0, 50), (20, 50)]
    assert found.windows == (20, 50) and found.lost.worst == 0.01
    assert found.lost.worst_kind == "copy" and found.alone[0] == {0: 0.0, 20: 0.0}


def test_a_share_below_the_narrowest_windows_and_rows_too_short_are_refused():
    with pytest.raises(UsageError, match=r"leave 0\.200 of the KV, above --share 0\.1"):
        search(layers(100, 100), 0.1, 0.02, lambda windows: Losses(kinds={}))
    short = Layers(seen=(100, 100), sinks=0, candidates=(20, 50), judged=15)
    with pytest.raises(UsageError, match="too few questions right"):
        search(short, 0.9, 0.02, lambda windows: Losses(kinds={}))


def test_windows_that_no_answer_looks_beyond_are_not_tried():
    """Six rows: two are of 70 tokens or more. A window of 66 and 4 sinks shows nothing there."""
    rows = [Row("copy", [0] * length, 1) for length in (90, 70, 20, 10, 10, 10)]
    assert judged_length(rows, 2) == 70 and judged_length(rows, 7) == 0
    tried = Layers(seen=(100,), sinks=4, candidates=(64, 65, 66, 96), judged=70)
    assert tried.choices(0) == [64, 65]


def scored(*logprobs: float, likeliest: tuple[int, ...] = (7, 8, 9)) -> Score:
    top = [{token: 0.0} for token in likeliest]
    return Score(token_ids=[7, 8, 9], logprobs=[None, *logprobs], top=[{}, *top[1:]])


def test_losses_are_nats_a_token_by_kind_and_answers_that_change():
    """Only the answer counts: row b begins at its last token."""
    rows = [Row("a", [7, 8, 9], 1), Row("b", [7, 8, 9], 2), Row("b", [7, 8, 9], 2)]
    whole = [scored(-1.0, -1.0)] * 3
    narrow = [
        scored(-1.5, -2.0),
        scored(-9.0, -0.5, likeliest=(7, 3, 9)),
        scored(-1.0, -1.0, likeliest=(7, 8, 3)),
    ]
    assert losses(rows, whole, narrow).kinds == {"a": Lost(0.75, 0, 1), "b": Lost(-0.25, 1, 2)}


@pytest.mark.parametrize("windows", [(64, 0, 128, 64, 64, 64), (0, 64, 64, 0, 0, 96)])
def test_what_is_written_is_what_kv_layers_reads(windows: tuple[int, ...], tmp_path: Path):
    path = tmp_path / "kv.yaml"
    path.write_text("# a comment\n" + as_yaml(windows, 4))
    spec = narrowed(read_model_spec(model_folder(None)), str(path))
    assert tuple(layer.window for layer in spec.layers) == windows
    assert {layer.sinks for layer in spec.layers if layer.window} == {4}
