"""What says whether a cheap answer may be given: scores, the higher the better.

fits     valid JSON, the schema, calls of the tools that are there; come to its end, not empty
margin   the least gap of an answer token to the next likeliest, in nats
agree    how alike a second, sampled answer is, 0 … 1
scorer   POST to a URL of the user's own: {"task", "request", "answer"} → {"score"}
judge    another model's mark by a rubric, 0 … 1
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
MARKS = {
    "type": "object",
    "properties": {"mark": {"type": "integer", "minimum": 0, "maximum": 10}},
    "required": ["mark"],
    "additionalProperties": False,
}


def fits(raw: dict[str, Any], answer: AnswerContent) -> bool:
    """Whether an answer is whole and in the form that was asked for, as far as that can be told."""
    return answer.is_whole and not is_misfit(raw, answer)


def is_misfit(raw: dict[str, Any], answer: AnswerContent) -> bool:
    """Whether the answer's text breaks `response_format`, or `text.format` of a response."""
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


def alike(first: str, second: str) -> float:
    """How alike two answers are by words, 1 for the same."""
    a, b = (text.strip()[:MAX_COMPARED].split() for text in (first, second))
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def judge_body(raw: dict[str, Any], answer: str) -> dict[str, Any]:
    """The chat that asks a judge for its mark."""
    question = f"Question:\n{last_text(raw)}\n\nAnswer:\n{answer}"
    return {
        "messages": [{"role": "system", "content": RUBRIC}, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 16,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "mark", "schema": MARKS, "strict": True},
        },
    }


def mark_of(text: str) -> float | None:
    """The judge's mark as a share, None where it gives none."""
    try:
        mark = msgspec.json.decode(text, type=dict[str, int])["mark"]
    except (msgspec.MsgspecError, KeyError):
        return None
    return mark / 10 if 0 <= mark <= 10 else None
