"""Every struct of the seam survives the wire: msgpack there and back gives an equal struct."""

import inspect
import types
import typing
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core import plan, request
from headway.core.grammar import KINDS, Grammar
from headway.core.plan import NewSequence, ScheduledSequence, StepPlan, sampled_in
from headway.core.request import Request, SamplingParams, SequenceUpdate, TokenLogprobs

STRUCTS = sorted(
    {
        value
        for module in (plan, request)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, msgspec.Struct)
    },
    key=lambda struct: struct.__name__,
)

small = st.integers(1, 128)
grammars = st.builds(
    Grammar, kind=st.sampled_from(KINDS), text=st.text(max_size=8), param=st.text(max_size=8)
)
samplings = st.builds(
    SamplingParams,
    n=small,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(-1, 100),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(5, 2**31 - 1),
    min_tokens=st.integers(0, 5),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
)


def values_of(hint: typing.Any) -> st.SearchStrategy:
    """Values of a field's type, nested structs included."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is SamplingParams:
        return samplings
    if origin in (types.UnionType, typing.Union):
        return st.one_of([values_of(part) for part in parts])
    if origin in (list, Sequence):
        return st.lists(values_of(parts[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values_of(parts[0]), values_of(parts[1]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values_of, parts))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return structs(hint)
    return {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        bool: st.booleans(),
        type(None): st.none(),
    }[hint]


def structs(struct: type) -> st.SearchStrategy:
    """Instances of `struct` with every field drawn."""
    if struct is SamplingParams:
        return samplings
    if struct is Grammar:
        return grammars
    hints = typing.get_type_hints(struct)
    return st.builds(struct, **{name: values_of(hints[name]) for name in struct.__struct_fields__})


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_msgpack_round_trip(struct, data):
    value = data.draw(structs(struct))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=struct)
    assert again == value
    assert type(again) is struct


def test_structs_were_found():
    names = {struct.__name__ for struct in STRUCTS}
    assert {"StepPlan", "StepResult", "ScheduledSequence", "Request", "SequenceUpdate"} <= names
    assert len(names) >= 16


def test_placeholders_of_samples_are_negative_and_distinct():
    assert [sampled_in(step) for step in range(4)] == [-1, -2, -3, -4]


def test_num_tokens_counts_all_rows():
    rows = [
        ScheduledSequence(1, 5, [9], [[]], True),
        ScheduledSequence(2, 0, [1, 2, 3], [[4]], False),
    ]
    assert StepPlan(0, [], rows, []).num_tokens == 4


def test_plans_are_small_on_the_wire():
    """A decode row of the seam costs about ten bytes: arrays, no field names."""
    row = ScheduledSequence(7, 100, [42], [[]], True)
    assert len(msgspec.msgpack.encode(row)) <= 16


def test_defaults_are_not_shared():
    """An empty list of one struct is not the list of the next."""
    first = NewSequence(0, 0, [1], 1, SamplingParams(), 0)
    first.stop_ids.append(3)
    assert NewSequence(0, 0, [1], 1, SamplingParams(), 0).stop_ids == []
    update = SequenceUpdate(0, 0, [])
    update.token_ids.append(1)
    assert TokenLogprobs(0, 0.0, 1).top_ids == []


def test_wrong_types_on_the_wire_are_refused():
    frame = msgspec.msgpack.encode([0, ["not a token"], {}])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(frame, type=Request)
