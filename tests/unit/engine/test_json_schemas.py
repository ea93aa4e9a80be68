"""JSON Schema, as promised: what is generated validates, and what is not supported is refused.

Real schemas run through the engine with an executor that draws anything the masks allow; the JSON
Schema test suite's instances are put to the grammar one by one. No invalid instance may pass; the
valid ones that do not are listed here with the reason.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from byte_tokenizer import EOS, write_tokenizer
from headway.config.speculation_config import SpeculationConfig
from headway.core import grammar as grammars
from headway.core.errors import RequestError
from headway.engine.engine import Engine
from headway.engine.grammar.compiler import compile_grammar
from headway.engine.grammar.vocabulary import VocabularySource, load_vocabulary
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.backoff import NoBackoff
from headway.frontend.text import Tokenizer
from headway.perf.model import Prior, StepModel
from random_schemas import Generator
from schema_runs import Outcome, Walker, generate, real_schemas, walking_engine

MAX_TOKENS = 4000
REFUSED = {
    "not": 30,
    "oneOf": 7,
    "dependencies": 4,
    "contains": 2,
    "format": 3,
    "dependencies, not": 1,
}
"""Of the 300 real schemas: how many are refused, by keyword."""
DRAFTS = {"draft2020-12": None, "draft7": "http://json-schema.org/draft-07/schema#"}
DEPARTURES = {
    "the order of properties is the schema's": {
        ("allOf.json", "allOf"),
        ("allOf.json", "valid"),
        ("const.json", "same object with different property order is valid"),
    },
    "a whole number is written without a fraction": {
        ("const.json", "float zero is valid"),
        ("const.json", "float one is valid"),
        ("const.json", "float -2.0 is valid"),
        ("const.json", "float is valid"),
        ("enum.json", "float zero is valid"),
        ("enum.json", "[0.0] is valid"),
        ("enum.json", "float one is valid"),
        ("enum.json", "[1.0] is valid"),
        ("type.json", "a float with zero fractional part is an integer"),
    },
    "keywords beside $ref count in every draft": {("ref.json", "ref valid, maxItems ignored")},
    "format is held to": {
        ("format.json", f"invalid {name} string is only an annotation by default")
        for name in "email ipv4 ipv6 hostname date date-time time uri uuid duration".split()
    },
}
"""Valid instances that are not generated, by reason; docs/structured-output.md has them too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def walker(folder: Path, tokenizer: Tokenizer) -> Iterator[Engine]:
    engine = walking_engine(folder, tokenizer, MAX_TOKENS + 8)
    yield engine
    assert engine.grammars is not None
    engine.grammars.close()


def faults(schema: Any, text: str) -> list[str]:
    """What jsonschema has against `text`."""
    text = text.replace('"0000-', '"2000-')  # a year of RFC 3339 that Python's dates do not have
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    return [error.message for error in validator.iter_errors(json.loads(text))]


def check(rows: list[dict[str, Any]], outcomes: list[Outcome]) -> Counter[str]:
    """Assert that every document validates; returns the refusals by keyword."""
    refused: Counter[str] = Counter()
    for row, outcome in zip(rows, outcomes, strict=True):
        if outcome.refused:
            assert outcome.code == "unsupported_keyword", outcome.refused
            keyword = outcome.refused.removeprefix("The schema keyword ").partition(" is not")[0]
            refused[keyword.partition(" '")[0]] += 1
            continue
        assert outcome.finish_reason == "stop", (row["id"], "cut off", outcome.text[:200])
        assert faults(row["data"]["schema"], outcome.text) == [], (row["id"], outcome.text)
    return refused


def test_every_document_of_300_real_schemas_validates(
    shared: Path, walker: Engine, tokenizer: Tokenizer
):
    rows = real_schemas(shared)
    schemas = [row["data"]["schema"] for row in rows]
    assert check(rows, generate(walker, tokenizer, schemas, MAX_TOKENS)) == REFUSED
    walker.check_integrity()


def check_guesses(walker: Engine, tokenizer: Tokenizer, schemas: list[Any]) -> None:
    """With guesses each document is the same, and takes fewer steps."""
    plain = generate(walker, tokenizer, schemas, MAX_TOKENS, first=2 * 10**6)
    before = walker.scheduler.next_step()
    config = SpeculationConfig(sources=("forced", "lookup", "suffixes"))
    guesses_pay = Prior(weights_s=1.0, token_s=1e-9, sampled_s=1e-9, read_s=1e-9)
    speculation = AdaptiveSpeculator(config, StepModel(guesses_pay))
    speculation.backoff = NoBackoff()
    walker.scheduler.drafts.speculator = speculation
    guessed = generate(walker, tokenizer, schemas, MAX_TOKENS, first=2 * 10**6)
    walker.scheduler.drafts.speculator = None
    assert guessed == plain
    print(f"{walker.scheduler.next_step() - before} steps, {speculation.counts}")
    assert isinstance(walker.executor, Walker)
    assert walker.executor.num_forced > 10 * len(schemas)
    walker.check_integrity()


def test_guesses_change_no_document(shared: Path, walker: Engine, tokenizer: Tokenizer):
    check_guesses(walker, tokenizer, [row["data"]["schema"] for row in real_schemas(shared)[::6]])


@pytest.mark.hardening
def test_guesses_change_none_of_300_documents(shared: Path, walker: Engine, tokenizer: Tokenizer):
    check_guesses(walker, tokenizer, [row["data"]["schema"] for row in real_schemas(shared)])


@pytest.mark.hardening
def test_every_document_of_300_real_schemas_validates_ten_times(
    shared: Path, walker: Engine, tokenizer: Tokenizer
):
    rows = real_schemas(shared)
    schemas = [row["data"]["schema"] for row in rows]
    for round_number in range(1, 11):
        outcomes = generate(walker, tokenizer, schemas, MAX_TOKENS, first=1000 * round_number)
        assert check(rows, outcomes) == REFUSED


def test_real_instances_are_told_apart(shared: Path, folder: Path):
    """The 300 schemas' own instances: valid ones accepted, invalid ones rejected."""
    vocabulary = load_vocabulary(VocabularySource(str(folder), 320, (EOS,)))
    told: Counter[tuple[bool, bool]] = Counter()
    for row in real_schemas(shared):
        try:
            rule = grammars.json_schema(row["data"]["schema"], "schema")
            matcher, _ = compile_grammar(vocabulary, rule)
        except RequestError:
            continue
        for test in row["data"]["tests"]:
            told[test["valid"], accepts(vocabulary, matcher, test["data"])] += 1
    assert told == {(True, True): 288, (False, False): 386}


def accepts(vocabulary: Any, matcher: Any, instance: Any) -> bool:
    """Whether the grammar generates `instance`, written without spaces."""
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    tokens = vocabulary.tokenize_str(text)
    copy = matcher.deep_copy()
    return bool(copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting())


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_json_schema_test_suite(shared: Path, folder: Path, draft: str):
    vocabulary = load_vocabulary(VocabularySource(str(folder), 320, (EOS,)))
    told: Counter[str] = Counter()
    known = set().union(*DEPARTURES.values())
    for path in sorted((shared / "eval/json-schema-test-suite/tests" / draft).glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            schema = group["schema"]
            if isinstance(schema, bool):
                continue
            if DRAFTS[draft]:
                schema.setdefault("$schema", DRAFTS[draft])
            try:
                rule = grammars.json_schema(schema, "schema")
                matcher, _ = compile_grammar(vocabulary, rule)
            except RequestError as error:
                told[error.code or ""] += 1
                continue
            for test in group["tests"]:
                passes = accepts(vocabulary, matcher, test["data"])
                where = (path.name, test["description"])
                assert not (passes and not test["valid"]), (where, schema, test["data"])
                assert passes or not test["valid"] or where in known, (where, schema)
                told["valid" if test["valid"] else "invalid"] += 1
    assert told["valid"] >= 313 and told["invalid"] >= 237, told
    assert told["invalid_value"] <= 13, "schemas refused without a keyword"
    assert told.keys() == {"valid", "invalid", "invalid_value", "unsupported_keyword"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"exclusiveMinimum": 2, "maximum": 2.5}, ["2.5", "2.001"], ["2", "2.0", "1.99"]),
        ({"minimum": -2.5, "exclusiveMaximum": -2}, ["-2.5", "-2.001"], ["-2", "-2.0"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.1}, ["0.05"], ["0", "0.0", "0.1"]),
        ({"exclusiveMinimum": 2, "exclusiveMaximum": 4}, ["3", "2.1"], ["2", "4", "4.0"]),
    ],
)
def test_exclusive_bounds_exclude(folder: Path, schema: dict[str, Any], good: Any, bad: Any):
    vocabulary = load_vocabulary(VocabularySource(str(folder), 320, (EOS,)))
    rule = grammars.json_schema({"type": "number", **schema}, "schema")
    matcher, _ = compile_grammar(vocabulary, rule)

    def takes(text: str) -> bool:
        copy, tokens = matcher.deep_copy(), vocabulary.tokenize_str(text)
        return bool(copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting())

    assert [text for text in [*good, *bad] if takes(text)] == good


def check_random(walker: Engine, tokenizer: Tokenizer, count: int, seed: int) -> None:
    """The documents of `count` schemas of `seed` validate; a refusal says what is at fault."""
    source = Generator(seed)
    schemas = [source.whole() for _ in range(count)]
    told: Counter[str] = Counter()
    outcomes = generate(walker, tokenizer, schemas, MAX_TOKENS, first=10**6)
    for schema, outcome in zip(schemas, outcomes, strict=True):
        if outcome.refused:
            assert outcome.code in ("unsupported_keyword", "invalid_value"), outcome.refused
            named = "keyword" in outcome.refused or "satisf" in outcome.refused
            assert named or "intersection" in outcome.refused, (schema, outcome.refused)
            told[outcome.code] += 1
            continue
        if outcome.finish_reason == "length":  # lists of at least two lists of at least two …
            told["cut off"] += 1
            continue
        assert faults(schema, outcome.text) == [], (schema, outcome.text)
        told["valid"] += 1
    print(f"seed {seed}: {dict(told)}")
    assert told["valid"] > 0.7 * count and told["cut off"] <= count / 100, told
    walker.check_integrity()


def test_documents_of_schemas_nobody_has_seen_validate(walker: Engine, tokenizer: Tokenizer):
    check_random(walker, tokenizer, 60, 20_261_123)


@pytest.mark.hardening
def test_documents_of_many_schemas_nobody_has_seen_validate(walker: Engine, tokenizer: Tokenizer):
    """HEADWAY_SCHEMAS=300:7 for 300 schemas of seed 7."""
    count, _, seed = os.environ.get("HEADWAY_SCHEMAS", "").partition(":")
    check_random(walker, tokenizer, int(count or 3000), int(seed or random.randrange(2**32)))


def test_whitespace_is_bounded(folder: Path):
    """One space, or a line break and up to 32 spaces or 8 tabs; what json.dumps writes fits."""
    vocabulary = load_vocabulary(VocabularySource(str(folder), 320, (EOS,)))
    matcher, _ = compile_grammar(vocabulary, grammars.json_object("p"))
    value = {"a": [1, 2, {"b": {"c": []}}], "d": {}}
    texts = [json.dumps(value), *(json.dumps(value, indent=i) for i in (0, 2, 4, "\t"))]
    texts += ['{\r\n  "a": 1\r\n}', '{ "a" : 1 }']
    for text in texts:
        tokens = vocabulary.tokenize_str(text)
        assert matcher.deep_copy().try_consume_tokens(tokens) == len(tokens), text
    for text in ('{  "a": 1}', '{\n\n"a": 1}', "{\n" + " " * 33 + '"a": 1}', " {}", "{} "):
        tokens = vocabulary.tokenize_str(text)
        assert matcher.deep_copy().try_consume_tokens(tokens) < len(tokens), text
