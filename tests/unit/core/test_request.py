"""Sampling parameters are checked once, when made: each refusal names the field and has a code."""

import math
from itertools import product

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.core.errors import HeadwayError, RequestError
from headway.core.request import (
    GREEDY_TEMPERATURE,
    MAX_LOGIT_BIAS,
    MAX_STOPS,
    Request,
    SamplingParams,
)

INTEGERS = {
    "n": (1, 128),
    "top_k": (0, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, None),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
DECIMALS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}
NUMBERS = {**INTEGERS, **DECIMALS}


def refusal(**fields) -> RequestError:
    """The error that these parameters raise."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds_are_accepted(name):
    low, high = NUMBERS[name]
    assert getattr(SamplingParams(**{name: low}), name) == low
    if high is not None:
        assert getattr(SamplingParams(**{name: high}), name) == high


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_beyond_the_bounds(name):
    low, high = INTEGERS[name]
    below = -2 if name == "top_k" else low - 1
    error = refusal(**{name: below})
    assert (error.param, error.code) == (name, "integer_below_min_value")
    assert str(below) in str(error)
    if high is not None:
        error = refusal(**{name: high + 1})
        assert (error.param, error.code) == (name, "integer_above_max_value")


@pytest.mark.parametrize("name", DECIMALS)
@pytest.mark.parametrize("step", [0.001, 1, 1e300])
def test_decimals_beyond_the_bounds(name, step):
    """The code speaks of decimals also when the client wrote an integer."""
    low, high = DECIMALS[name]
    error = refusal(**{name: low - step})
    assert (error.param, error.code) == (name, "decimal_below_min_value")
    for value in (high + step, 10**400):
        error = refusal(**{name: value})
        assert (error.param, error.code) == (name, "decimal_above_max_value")


def not_refused(names, values, code):
    """Those of `values` for which a field is not refused by its name with `code`, and what came."""
    faults = []
    for name, value in product(names, values):
        try:
            error = refusal(**{name: value})
            found = error.param, error.code
        except (Exception, pytest.fail.Exception) as other:
            found = repr(other)
        if found != (name, code):
            faults.append((name, value, found))
    return faults


def test_decimals_are_finite():
    assert not_refused(DECIMALS, [math.nan, math.inf, -math.inf], "invalid_value") == []


def test_what_is_not_a_number():
    values = [True, False, "1", [1], {}, b"1", 1j, object()]
    assert not_refused(NUMBERS, values, "invalid_type") == []


def test_integers_are_no_decimals():
    """n = 1.5 would pass a check of bounds and fail in the engine."""
    assert not_refused(INTEGERS, [1.0, 1.5, math.nan, math.inf], "invalid_type") == []


@pytest.mark.parametrize("name", NUMBERS)
def test_null_stands_for_unset_where_there_is_an_unset(name):
    if name in OPTIONAL:
        assert getattr(SamplingParams(**{name: None}), name) is None
    else:
        assert refusal(**{name: None}).param == name


def test_defaults_are_valid():
    sampling = SamplingParams()
    assert (sampling.n, sampling.temperature, sampling.max_tokens) == (1, 1.0, 16)
    assert not sampling.greedy


def test_top_k_minus_one_keeps_all():
    assert SamplingParams(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("temperature", "greedy"),
    [(0, True), (0.0, True), (GREEDY_TEMPERATURE / 2, True), (GREEDY_TEMPERATURE, False)],
)
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_min_tokens_within_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    error = refusal(min_tokens=6, max_tokens=5)
    assert (error.param, error.code) == ("min_tokens", "invalid_value")
    assert "6" in str(error)
    assert "5" in str(error)


def test_stop_strings():
    assert SamplingParams(stop="END").stop == ["END"]
    assert len(SamplingParams(stop=["x"] * MAX_STOPS).stop) == MAX_STOPS
    error = refusal(stop=["x"] * (MAX_STOPS + 1))
    assert (error.param, error.code) == ("stop", "array_above_max_length")


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [None], [5], [["a"]]])
def test_stop_strings_are_not_empty(stop):
    error = refusal(stop=stop)
    assert (error.param, error.code) == ("stop", "invalid_value")


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("value", [None, 5, True, {1}])
def test_what_is_not_a_list(name, value):
    error = refusal(**{name: value})
    assert (error.param, error.code) == (name, "invalid_type")


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize(
    ("value", "code"),
    [
        ([True], "invalid_type"),
        (["5"], "invalid_type"),
        ([1.5], "invalid_type"),
        ([None], "invalid_type"),
        ([-1], "integer_below_min_value"),
        ([2**64], "integer_above_max_value"),
    ],
)
def test_token_ids(name, value, code):
    error = refusal(**{name: value})
    assert (error.param, error.code) == (name, code)


@pytest.mark.parametrize(
    ("bias", "code"),
    [
        ({5: 101}, "decimal_above_max_value"),
        ({5: -100.5}, "decimal_below_min_value"),
        ({5: math.nan}, "invalid_value"),
        ({5: True}, "invalid_type"),
        ({5: None}, "invalid_type"),
        ({"5": 1}, "invalid_type"),
        ({-5: 1}, "integer_below_min_value"),
    ],
)
def test_logit_bias(bias, code):
    error = refusal(logit_bias=bias)
    assert (error.param, error.code) == ("logit_bias", code)


def test_logit_bias_has_a_cap():
    assert SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 100.0))
    error = refusal(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0))
    assert (error.param, error.code) == ("logit_bias", "object_above_max_properties")


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_ids_within_the_vocabulary(name):
    def made(token_id):
        return SamplingParams(**{name: {token_id: 1.0} if name == "logit_bias" else [token_id]})

    made(99).check_vocabulary(100)
    with pytest.raises(RequestError, match="token 100; ids run from 0 to 99") as caught:
        made(100).check_vocabulary(100)
    assert (caught.value.param, caught.value.code) == (name, "invalid_value")


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(), inner, max_size=3)
    ),
    max_leaves=4,
)
FIELDS = [
    name
    for name in SamplingParams.__struct_fields__
    if name not in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
]


@given(st.dictionaries(st.sampled_from(FIELDS), anything, max_size=3))
@example({"grammar": []})
def test_what_is_accepted_can_cross_to_the_engine(fields):
    """Anything at all is either refused with a RequestError or survives the wire as it is."""
    try:
        sampling = SamplingParams(**fields)
    except RequestError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.param in fields and refused.code
        return
    frame = msgspec.msgpack.encode(Request(1, [1], sampling))
    assert msgspec.msgpack.decode(frame, type=Request).sampling == sampling
    assert isinstance(sampling.greedy, bool)


def test_request_errors_are_user_errors():
    error = refusal(n=0)
    assert isinstance(error, HeadwayError)
    assert str(error) == "n is 0; the minimum is 1."
