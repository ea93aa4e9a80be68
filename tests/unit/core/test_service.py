"""Service classes: what a file may say, what replaces what, and what a request carries of it."""

from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import service
from headway.core.errors import UsageError
from headway.core.service import (
    KeyLimits,
    UnloadedTimes,
    read_classes,
    service_classes,
    with_reachable_objectives,
)
from headway.core.slo import Slo

EXAMPLE = """
interactive: {slo: "ttft=1s", weight: 4, priority: -2}
gold:
  slo: ttft=1.5s,tpot=120ms
  ttft_per_token: 2ms
  free_tokens: 100
  price: 3
  limits: {max_prompt_tokens: 500, requests_at_once: 2, queue_seconds: 0.5}
nightly: {idle_only: true}
"""


def class_file(folder: Path, text: str) -> Path:
    path = folder / "classes.yaml"
    path.write_text(text)
    return path


def test_a_file_replaces_and_adds(tmp_path):
    classes = service_classes(file=class_file(tmp_path, EXAMPLE))
    assert set(classes) == {"interactive", "standard", "batch", "gold", "nightly", "default"}
    first, gold = classes["interactive"], classes["gold"]
    assert (first.slo, first.ttft_per_token_s, first.weight) == (Slo(ttft_s=1.0), 0, 4)
    assert gold.objectives(600).ttft_s == pytest.approx(2.5)
    assert gold.limits == KeyLimits(max_prompt_tokens=500, requests_at_once=2, queue_seconds=0.5)
    assert (gold.price, classes["nightly"].idle_only, classes["batch"].idle_only) == (3, True, True)
    assert classes["default"].slo == classes["interactive"].slo
    own = service_classes(["standard:tpot=1s"])
    assert own["default"].slo == own["standard"].slo, "somebody says what standard is"


def test_objectives_of_the_command_line_leave_the_rest_of_a_class(tmp_path):
    classes = service_classes(["gold:e2e=9s", "ttft=3s"], class_file(tmp_path, EXAMPLE))
    assert classes["gold"].slo == Slo(e2e_s=9)
    assert (classes["gold"].price, classes["gold"].limits.max_prompt_tokens) == (3, 500)
    assert classes["default"].slo == Slo(ttft_s=3)
    assert service_classes(["batch:e2e=60s"])["batch"].idle_only


def test_the_example_of_the_docstring_can_be_read(tmp_path):
    text = service.__doc__.partition("left out:\n")[2]
    classes = read_classes(class_file(tmp_path, text))
    assert (classes["interactive"].weight, classes["nightly"].price) == (2, 0.3)


@pytest.mark.parametrize(
    ("text", "cause", "fix"),
    [
        ("[1]", "no classes by name", "A row is"),
        ("a: [", "is not YAML", "A row is"),
        ("'a b': {}", "'a b' is no name", "letters"),
        ("gold: 5", "class gold: Expected `object`", "A row is"),
        ("gold: {wieght: 2}", "class gold: Object contains unknown field `wieght`", "weight?"),
        (
            "gold: {limits: {queue_second: 2}}",
            "unknown field `queue_second` - at `$.limits`",
            "queue_seconds?",
        ),
        ("gold: {limits: {requests_at_once: 0}}", "requests_at_once must be at least 1", "A row"),
        ("gold: {limits: {queue_seconds: .nan}}", "queue_seconds must be at least 0", "A row"),
        (
            "gold: {limits: {tokens_per_minute: 9999999999999999}}",
            "at most 1000000000000000",
            "A row",
        ),
        ("gold: {slo: 'ttft=1.5'}", "class gold: slo: ", "Write 500ms"),
        ("gold: {slo: 'ttft=1s', ttft_per_token: 2}", "Expected `str`, got `int`", "A row is"),
        ("gold: {ttft_per_token: fast}", "ttft_per_token: 'fast'", "Write 500ms"),
        ("gold: {weight: 0}", "weight must be between 0.001 and 1000", "A row is"),
        ("gold: {weight: .nan}", "weight must be between", "A row is"),
    ],
)
def test_what_a_class_file_may_not_say(tmp_path, text, cause, fix):
    with pytest.raises(UsageError) as refused:
        read_classes(class_file(tmp_path, text))
    assert "classes.yaml" in refused.value.cause
    assert cause in refused.value.cause
    assert fix in refused.value.fix


def test_a_missing_class_file(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_classes(tmp_path / "none.yaml")


def test_a_request_carries_its_class():
    terms = service_classes()["interactive"].terms()
    assert (terms.service_class, terms.ttft_s, terms.tpot_s) == ("interactive", 1.5, 0.12)
    assert terms.first_token_s(1500) == pytest.approx(3.5), "the example of core/terms.py"
    batch = service_classes()["batch"].terms()
    assert batch.idle_only and batch.first_token_s(0) == inf


@given(
    slo=st.none() | st.builds(Slo, ttft_s=st.none() | st.floats(0.001, 100)),
    weight=st.none() | st.floats(0.001, 1000),
    priority=st.none() | st.integers(-(2**31), 2**31),
    uncached=st.integers(0, 5000),
)
def test_terms_and_objectives_agree(slo, weight, priority, uncached):
    """What the scheduler aims at is what the request is judged by."""
    for row in service_classes().values():
        terms = row.terms(slo, weight, priority)
        judged = (slo or row.objectives(uncached)).ttft_s
        assert terms.first_token_s(uncached) == pytest.approx(inf if judged is None else judged)
        assert terms.weight == (row.weight if weight is None else weight)
        assert terms.priority == (row.priority if priority is None else priority)


@given(st.builds(KeyLimits, requests_at_once=st.none() | st.integers(1, 9)), st.integers(1, 9))
def test_a_keys_own_limit_goes_before_its_class(own, given_by_class):
    merged = own.over(KeyLimits(requests_at_once=given_by_class, max_prompt_tokens=7))
    assert merged.requests_at_once == (own.requests_at_once or given_by_class)
    assert merged.max_prompt_tokens == 7


# ── what this machine can keep ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("alone", "ttft_s", "per_token_s", "tpot_s", "why"),
    [
        (UnloadedTimes(), 1.5, 0.002, 0.12, "as interactive"),
        (UnloadedTimes(500, 0.2, 0.0004, 0.02), 1.5, 0.002, 0.12, "which this machine can keep"),
        (UnloadedTimes(500, 2.12, 0.0041, 0.03), 4.2, 0.0082, 0.12, "2.12 s for 500 prompt tokens"),
        (UnloadedTimes(500, 1.4, 0.001, 0.25), 1.5, 0.002, 0.5, "250 ms for a token of the answer"),
        (UnloadedTimes(1000, 2.4, 0.002, 0.1), 1.5, 0.002, 0.12, "which this machine can keep"),
    ],
)
def test_the_default_is_raised_where_one_request_alone_cannot_make_it(
    alone, ttft_s, per_token_s, tpot_s, why
):
    """Twice what it takes alone, and only where that is longer than what interactive promises."""
    row = with_reachable_objectives(service_classes()["default"], alone)
    assert (row.slo.ttft_s, row.ttft_per_token_s, row.slo.tpot_s) == (ttft_s, per_token_s, tpot_s)
    assert why in row.why
    assert (
        with_reachable_objectives(row, UnloadedTimes(500, 99.0, 9.0, 9.0)).slo == row.slo
        or not alone.num_tokens
    )


@pytest.mark.parametrize(
    ("first", "later", "best"),
    [
        (UnloadedTimes(), UnloadedTimes(500, 2.0, 0.004, 0.1), UnloadedTimes(500, 2.0, 0.004, 0.1)),
        (UnloadedTimes(500, 2.0, 0.004, 0.1), UnloadedTimes(), UnloadedTimes(500, 2.0, 0.004, 0.1)),
        (
            UnloadedTimes(500, 2.0, 0.001, 0.1),
            UnloadedTimes(500, 1.0, 0.004, 0.2),
            UnloadedTimes(500, 1.0, 0.001, 0.1),
        ),
        (
            UnloadedTimes(500, 2.0, 0.001, 0.1),
            UnloadedTimes(300, 3.0, 0.004, 0.2),
            UnloadedTimes(300, 3.0, 0.004, 0.2),
        ),
    ],
)
def test_the_shorter_times_of_two_measurements_stand(first, later, best):
    assert first.at_best(later) == best


@pytest.mark.parametrize("name", ["interactive", "standard", "batch", "default"])
def test_what_somebody_said_is_never_raised(name):
    classes = service_classes(["ttft=300ms"])
    row = classes[name]
    assert with_reachable_objectives(row, UnloadedTimes(500, 99.0, 9.0, 9.0)) == row
