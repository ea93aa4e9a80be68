"""IFEval: prompts with instructions that a program can check (Zhou et al., 2023).

The checks are those of the paper's strict mode, with two differences: a sentence ends at . ! or ?
before a space (the paper uses a trained splitter), and prompts that require a language are skipped
(31 of 541), because no language detector is at hand.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headway.evals.tasks.task import EvalTask, TaskQuestion
from headway.evals.text import read_data, spread

FILE = "eval/ifeval/input_data.jsonl"
MAX_TOKENS = 512
LANGUAGE_INSTRUCTION = "language:response_language"
SENTENCE = re.compile(r"[.!?]+(?=\s|$)")
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
Check = Callable[..., bool]


def read(data: Path, limit: int) -> EvalTask:
    """Read `limit` prompts, evenly spread."""
    rows = [json.loads(line) for line in read_data(data / FILE).splitlines()]
    supported = [row for row in rows if LANGUAGE_INSTRUCTION not in row["instruction_id_list"]]
    return EvalTask("ifeval", [question(row) for row in spread(supported, limit)], (), MAX_TOKENS)


def question(row: dict[str, Any]) -> TaskQuestion:
    """Return a prompt; a reply is right if it follows all instructions."""
    checks = [
        partial(CHECKS[name], **{key: value for key, value in given.items() if value is not None})
        for name, given in zip(row["instruction_id_list"], row["kwargs"], strict=True)
    ]
    return TaskQuestion(
        [{"role": "user", "content": row["prompt"]}],
        ", ".join(row["instruction_id_list"]),
        lambda reply: bool(reply.strip()) and all(check(reply) for check in checks),
    )


def related(count: int, relation: str, limit: int) -> bool:
    """Whether a count is "less than" or "at least" the limit."""
    return count < limit if relation == "less than" else count >= limit


def count_of(pattern: str, text: str, flags: int = 0) -> int:
    """Count the matches of a pattern."""
    return len(re.findall(pattern, text, flags))


def existence(text: str, keywords: list[str]) -> bool:
    return all(re.search(word, text, re.IGNORECASE) for word in keywords)


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)


def frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return related(count_of(keyword, text, re.IGNORECASE), relation, frequency)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return related(text.lower().count(letter.lower()), let_relation, let_frequency)


def number_words(text: str, num_words: int, relation: str) -> bool:
    return related(count_of(r"\w+", text), relation, num_words)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    sentences = [each for each in SENTENCE.split(text) if each.strip()]
    return related(len(sentences), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Divided by ***; only the first and the last may be empty, and do not count."""
    parts = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(parts) == num_paragraphs


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    parts = text.split("\n\n")
    if sum(bool(part.strip()) for part in parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    words = parts[nth_paragraph - 1].split()
    begin = re.match(r"[^.,?!'\"]*", words[0].lstrip("'\"")) if words else None
    return begin is not None and begin[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return count_of(r"\[.*?\]", text) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    marker = known.get(postscript_marker, re.escape(postscript_marker.lower()))
    return count_of(rf"\s*{marker}.*$", text.lower(), re.MULTILINE) > 0


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    stars = count_of(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return stars + count_of(r"^\s*-.*$", text, re.MULTILINE) == num_bullets


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    sections = re.findall(r"\*[^\n\*]*\*", text) + re.findall(r"\*\*[^\n\*]*\*\*", text)
    return sum(bool(each.strip("*").strip()) for each in sections) >= num_highlights


def multiple_sections(text: str, num_sections: int, section_spliter: str) -> bool:
    return count_of(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text) >= num_sections


def json_format(text: str) -> bool:
    bare = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(bare)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    return any(each.strip("<> ") for each in re.findall(r"<<[^\n]+>>", text))


def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    capitals = sum(word.isupper() for word in re.findall(r"[\w'-]+", text))
    return related(capitals, capital_relation, capital_frequency)


def quotation(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


CHECKS: dict[str, Check] = {
    "keywords:existence": existence,
    "keywords:forbidden_words": forbidden_words,
    "keywords:frequency": frequency,
    "keywords:letter_frequency": letter_frequency,
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": lambda text: any(o in text for o in OPTIONS),
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
"""Instruction → its check, given the reply and the row's arguments."""
