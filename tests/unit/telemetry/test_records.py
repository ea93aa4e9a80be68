"""What a step read and computed: counted quickly, equal to counting token by token."""

from hypothesis import given
from hypothesis import strategies as st

from headway.core.plan import ScheduledSequence
from headway.telemetry.records import count_work
from telemetry_cases import step

rows = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 40), st.booleans()), min_size=1, max_size=20
)


def advance(number, start, length, sample, drafts=0):
    return ScheduledSequence(number, start, [0] * length, [[]], sample, drafts)


def test_the_worked_example():
    record = step()
    count_work(record, [advance(1, 99, 1, True), advance(2, 8, 4, False)], (0,))
    assert (record.num_tokens, record.num_decode_tokens, record.num_prefill_tokens) == (5, 1, 4)
    assert record.attended_tokens == 142 and record.kv_tokens_read == [112]


@given(rows, st.integers(1, 64))
def test_it_is_the_slow_count(drawn, window):
    plan = [advance(i, *row) for i, row in enumerate(drawn)]
    record = step()
    count_work(record, plan, (0, window))
    attended, full, seen = 0, 0, 0
    for row in plan:
        end = row.start + len(row.token_ids)
        attended += sum(position + 1 for position in range(row.start, end))
        full += end
        seen += len(
            {k for p in range(row.start, end) for k in range(max(0, p - window + 1), p + 1)}
        )
    assert record.attended_tokens == attended
    assert record.kv_tokens_read == [full, seen]
    assert record.num_tokens == sum(len(row.token_ids) for row in plan)
    assert record.num_decode_tokens == sum(r.sample and len(r.token_ids) == 1 for r in plan)


def test_drafts_to_verify_are_decodes():
    record = step()
    count_work(record, [advance(1, 10, 4, True, drafts=3), advance(2, 0, 4, True)], (0,))
    assert (record.num_decode_tokens, record.num_prefill_tokens) == (4, 4)


def test_a_step_that_only_tells():
    record = step()
    count_work(record, [], (0, 16))
    assert record.num_tokens == 0 and record.kv_tokens_read == [0, 0]


def test_another_path_decodes_as_well():
    """What it computes again is no prompt."""
    record = step()
    path = ScheduledSequence(1, 10, [0] * 3, [[]], False, 2, path=1)
    count_work(record, [advance(1, 10, 4, True, drafts=3), path], (0,))
    assert (record.num_decode_tokens, record.num_prefill_tokens) == (7, 0)
    assert record.kv_tokens_read == [14 + 13]
