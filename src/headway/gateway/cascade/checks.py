"""Checks that decide whether a cheap answer is good enough; a higher score is better.

fits     valid JSON, matches the schema, calls known tools; not cut off, not empty
margin   smallest gap in nats between an answer token and the next likeliest token
agree    similarity to a second, sampled answer, 0 … 1
scorer   POST to a URL of the operator: {"task", "request", "answer"} → {"score"}
judge    mark of another model by a rubric, 0 … 1
"""

import difflib
from typing import Any

import msgspec

from headway.edge.conforms import misfit
from headway.gateway.answers import AnswerContent, last_text

MAX_COMPARED = 2000
RUBRIC = (
    "You mark answers. Given a question and an answer, say how sure you are that the answer is "
    'right, from 0 (wrong) to 10 (right), as JSON: {"mark": 7}.'
)
MARK_SCHEMA = {
    "type": "object",
    "properties": {"mark": {"type": "integer", "minimum": 0, "maximum": 10}},
    "required": ["mark"],
    "additionalProperties": False,
}


def fits(raw: dict[str, Any], answer: AnswerContent) -> bool:
    """Return whether an answer is complete and in the requested form."""
    return answer.is_whole and not violates_format(raw, answer)


def violates_format(raw: dict[str, Any], answer: AnswerContent) -> bool:
    """Return whether the text violates `response_format`, or `text.format` of a response."""
    text = raw.get("text")
    response_format = raw.get("response_format") or (
        text.get("format") if isinstance(text, dict) else None
    )
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in ("json_object", "json_schema") or answer.calls:
        return False
    try:
        value = msgspec.json.decode(answer.text)
    except (msgspec.MsgspecError, RecursionError):
        return True
    assert isinstance(response_format, dict)
    if kind == "json_object":
        return not isinstance(value, dict)
    schema = response_format.get("json_schema")
    schema = schema.get("schema") if isinstance(schema, dict) else response_format.get("schema")
    return misfit(value, schema) is not None


def similarity(first: str, second: str) -> float:
    """Return the similarity of two answers by words; 1 for equal answers."""
    a, b = (text.strip()[:MAX_COMPARED].split() for text in (first, second))
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def judge_body(raw: dict[str, Any], answer: str) -> dict[str, Any]:
    """Return the chat that asks a judge for its mark."""
    question = f"Question:\n{last_text(raw)}\n\nAnswer:\n{answer}"
    return {
        "messages": [{"role": "system", "content": RUBRIC}, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 16,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "mark", "schema": MARK_SCHEMA, "strict": True},
        },
    }


def mark_of(text: str) -> float | None:
    """Return the judge's mark as a fraction; None if it gave none."""
    try:
        mark = msgspec.json.decode(text, type=dict[str, int])["mark"]
    except (msgspec.MsgspecError, KeyError):
        return None
    return mark / 10 if 0 <= mark <= 10 else None
