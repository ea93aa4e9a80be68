"""What shorter prompts and answers would save: rows of the doctor's table by this traffic."""

from typing import Any

import msgspec
import pytest

from doctor_cases import HEALTHY, LONG, varied
from headway.advise.diagnosis import diagnose
from headway.advise.reading import Reading
from headway.advise.shorter import Saving, savings, unknown
from headway.telemetry.documents import DocumentUse, Place
from headway.telemetry.examples import ExampleUse
from headway.telemetry.wasted import AnswerWaste, IdleTool, PromptWaste

PRICED = {
    "spend.price_per_hour": 2.0,
    "spend.usd_per_million_input": 1.0,
    "spend.usd_per_million_output": 5.0,
}
ANSWERS = AnswerWaste(
    answers=100,
    tokens=10_000,
    cap=180,
    above_cap=1_400,
    unbounded=40,
    structured=20,
    structured_tokens=400,
    prose=80,
    prose_tokens=9_600,
    looped_tokens=300,
)


def row(reading: Reading, word: str) -> Saving:
    [found] = [each for each in savings(reading) if word in each.what]
    return found


def with_answers(**changes: Any) -> Reading:
    fields = {name: getattr(ANSWERS, name) for name in ANSWERS.__struct_fields__} | changes
    return varied(HEALTHY, PRICED, {"waste.answers": AnswerWaste(**fields)})


def test_a_cap_saves_what_lies_behind_it():
    found = row(with_answers(), "max_tokens 180")
    assert found.seconds == pytest.approx(0.14 * HEALTHY.decode_s)
    assert found.usd_per_hour == pytest.approx(5e-6 * 101 * 0.14 * 5.0 * 3600)
    assert "40 of 100 requests named no limit" in found.note and not found.measured


def test_prose_at_the_length_of_structured_answers():
    found = row(with_answers(), "schemas in place of prose (20 tokens, not 120)")
    assert found.seconds == pytest.approx(0.80 * HEALTHY.decode_s)
    assert found.measured and "no length can tell" in found.note


def test_a_stop_rule_saves_what_repeats():
    found = row(with_answers(), "a stop rule")
    assert found.seconds == pytest.approx(0.03 * HEALTHY.decode_s) and "3%" in found.what


def test_what_is_little_is_not_told():
    little = with_answers(above_cap=10, looped_tokens=10, structured=0, structured_tokens=0)
    assert [each.what for each in savings(little) if each.measured] == []
    assert "too few answers were structured" in next(unknown(little))
    assert any("schemas in place of prose" in text for text in diagnose(little).not_known)


def test_what_stands_twice_and_what_nobody_called():
    tools = [IdleTool(name="search", requests=30, num_bytes=3200)]
    prompts = PromptWaste(prompts=32, tokens=60_000, twice_tokens=15_000, tools=tools)
    reading = varied(HEALTHY, LONG, PRICED, {"waste.prompts": prompts})
    twice, idle = row(reading, "stands twice"), row(reading, "no answer called: search")
    assert twice.seconds == pytest.approx(8.0 * 0.25) and "25%" in twice.what
    assert idle.seconds == pytest.approx(8.0 * 800 / 4000) and "about 800 tokens" in idle.note
    assert twice.usd_per_hour > idle.usd_per_hour > 0


def test_documents_that_were_not_used_and_examples():
    """4,000 tokens of unused documents in half of the prompts, which have 4,000 tokens in the mean;
    1,200 of examples in a third of them, which are no waste by themselves."""
    places = [Place(shown=10, used=9), Place(shown=10, used=1)]
    documents = DocumentUse(
        answers=10, requests=30, shown=20, used=10, tokens=60_000, unused_tokens=40_000, idle=2,
        places=places,
    )  # fmt: skip
    examples = ExampleUse(chats=40, requests=20, pairs=4, tokens=1200, share=0.1)
    prompts = PromptWaste(
        prompts=10, tokens=40_000, documents=documents, examples=examples, seen=60
    )
    reading = varied(HEALTHY, LONG, PRICED, {"waste.prompts": prompts})
    unused, given = row(reading, "documents that"), row(reading, "examples, were none needed")
    assert unused.seconds == pytest.approx(8.0 * 0.5) and "(10 of 20)" in unused.what
    assert "the 2th" not in unused.note and "place 2 was used in 10%" in unused.note
    assert "2 were never used" in unused.note and unused.measured
    assert given.seconds == pytest.approx(8.0 * 0.1) and not given.measured
    assert unused.usd_per_hour == pytest.approx(5 * given.usd_per_hour)
    few = msgspec.structs.replace(documents, unused_tokens=10)
    little = varied(
        HEALTHY, LONG, {"waste.prompts": PromptWaste(prompts=10, tokens=9, documents=few)}
    )
    assert not [each for each in savings(little) if "documents that" in each.what]
