"""What a step read and computed: counted quickly, equal to counting token by token."""

from hypothesis import given
from hypothesis import strategies as st

from headway.core.plan import ScheduledSequence
from headway.core.records import RowCounts, count_rows

rows = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 40), st.booleans()), min_size=1, max_size=20
)
mixed = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 4), st.booleans()), max_size=9)


def advance(number, start, length, sample, drafts=0):
    return ScheduledSequence(number, start, [0] * length, [[]], sample, drafts)


def num_prefill(found: RowCounts) -> int:
    return found.num_tokens - found.num_decode_tokens


def test_the_worked_example():
    found = count_rows([advance(1, 99, 1, True), advance(2, 8, 4, False)], (0,))
    assert (found.num_tokens, found.num_decode_tokens, num_prefill(found)) == (5, 1, 4)
    assert found.attended_tokens == 142 and found.kv_tokens_read == [112]


@given(rows, st.integers(1, 64))
def test_it_is_the_slow_count(drawn, window):
    plan = [advance(i, *row) for i, row in enumerate(drawn)]
    found = count_rows(plan, (0, window))
    attended, full, seen = 0, 0, 0
    for row in plan:
        end = row.start + len(row.token_ids)
        attended += sum(position + 1 for position in range(row.start, end))
        full += end
        seen += len(
            {k for p in range(row.start, end) for k in range(max(0, p - window + 1), p + 1)}
        )
    assert found.attended_tokens == attended
    assert found.kv_tokens_read == [full, seen]
    assert found.num_tokens == sum(len(row.token_ids) for row in plan)
    assert found.num_sampled == sum(row.sample for row in plan)
    assert found.num_decode_tokens == sum(r.sample and len(r.token_ids) == 1 for r in plan)


@given(mixed)
def test_guesses_and_forced_tokens_are_counted_row_by_row(drawn):
    """Rows of a known token, guesses behind it, or forced tokens before it, beside plain ones."""
    plan = [advance(0, 7, 1, True), advance(1, 5, 2, False)]
    for number, (start, length, guesses) in enumerate(drawn, 2):
        row = advance(number, start, length, True, length - 1 if guesses else 0)
        row.num_forced = 0 if guesses else length - 1
        plan.append(row)
    found = count_rows(plan, (0,))
    assert found.num_sampled == sum(row.sample + row.num_drafts for row in plan)
    assert found.num_forced_rows == sum(row.num_forced for row in plan)
    behind = sum(len(row.token_ids) - 1 for row in plan if row.num_drafts)
    assert found.num_drafts == behind
    decoding = [r for r in plan if r.num_drafts or r.num_forced or r.sample]
    assert found.num_decode_tokens == sum(len(row.token_ids) for row in decoding)


def test_drafts_to_verify_are_decodes():
    found = count_rows([advance(1, 10, 4, True, drafts=3), advance(2, 0, 4, True)], (0,))
    assert (found.num_decode_tokens, num_prefill(found)) == (4, 4)


def test_a_step_that_only_tells():
    found = count_rows([], (0, 16))
    assert found.num_tokens == 0 and found.kv_tokens_read == [0, 0]
