"""Documents for JSON schemas: the engine with an executor that draws anything its masks allow.

`Walker` stands in for a model: each token is drawn at random from the mask, with a liking for what
closes strings, lists and objects, so that documents come to an end. `generate` runs many schemas
through one engine and says for each what came of it.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fakes import make_settings
from headway.core import grammar as grammars
from headway.core.plan import Description, GrammarMasks, Sample, StepPlan, StepResult
from headway.core.request import Request, SamplingParams
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.engine.grammar.grammars import Grammars
from headway.engine.grammar.vocabulary import VocabularySource
from headway.frontend.text import Tokenizer

BLOCK = 64
CLOSERS = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b"]}", b'":', b'",', b"true", b"1", b"0")
LIKING = 0.3
"""How often a closing token is taken where one is allowed."""


class Walker:
    """An executor that draws from masks, by (seed, position), so that runs repeat."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._closers = np.array([piece in CLOSERS for piece in pieces])
        self._seeds: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self.num_forced = 0

    def submit(self, plan: StepPlan) -> None:
        for new in plan.new:
            self._seeds[new.sequence_id] = new.seed
            self._lengths[new.sequence_id] = len(new.token_ids)
        for row in plan.scheduled:
            self._lengths[row.sequence_id] += row.num_forced
            self.num_forced += row.num_forced
        self._plan = plan

    def sample(self, step: int, masks: GrammarMasks) -> None:
        self._masks = masks

    def collect(self) -> StepResult:
        samples = []
        for row in self._plan.scheduled:
            if row.sample:
                kept = [self._draw(row.sequence_id, 0)]
                while len(kept) <= row.num_drafts and kept == row.drafts[: len(kept)]:
                    if len(kept) == len(self._masks.by_sequence[row.sequence_id]):
                        break
                    token = self._draw(row.sequence_id, len(kept))
                    if token < 0:
                        break
                    kept.append(token)
                self._lengths[row.sequence_id] += len(kept)
                samples.append(Sample(row.sequence_id, kept))
        return StepResult(self._plan.step, samples)

    def _draw(self, sequence_id: int, ahead: int) -> int:
        """The token behind `ahead` drafts; -1 where its mask allows none."""
        at = self._lengths[sequence_id] + ahead
        rng = random.Random(self._seeds[sequence_id] * 65536 + at)
        packed = np.frombuffer(self._masks.by_sequence[sequence_id][ahead], np.uint8)
        allowed = np.unpackbits(packed, bitorder="little").view(np.bool_)
        closing = np.nonzero(allowed[: len(self._closers)] & self._closers)[0]
        likes = len(closing) and rng.random() < LIKING
        ids = closing if likes else np.nonzero(allowed)[0]
        if ahead and not len(ids):
            return -1
        return int(ids[rng.randrange(len(ids))])

    def describe(self) -> Description:
        return Description(device="walker")

    def probe(self, budget_s: float) -> None:
        pass


@dataclass(slots=True)
class Outcome:
    """What came of one schema: its document and how it ended, or the refusal."""

    text: str = ""
    finish_reason: str = ""
    refused: str = ""
    code: str = ""


def walking_engine(folder: Path, tokenizer: Tokenizer, max_len: int, seats: int = 16) -> Engine:
    """An engine over a `Walker` with the vocabulary of `folder`."""
    width = tokenizer.vocab_size
    blocks = seats * (max_len // BLOCK + 2)
    settings = make_settings(
        max_model_len=max_len,
        max_num_seqs=seats,
        budget=1024,
        block_size=BLOCK,
        num_blocks=(blocks,),
    )
    ends = tuple(sorted(tokenizer.special_ids))[:1]
    return build_engine(
        Walker([tokenizer.piece(i) for i in range(width)]),
        settings,
        vocab_size=width,
        eos_token_ids=ends,
        grammars=Grammars(VocabularySource(str(folder), width, ends)),
    )


def generate(
    engine: Engine, tokenizer: Tokenizer, schemas: list[Any], max_tokens: int, first: int = 1
) -> list[Outcome]:
    """One document for each of `schemas`; requests and seeds are numbered from `first`."""
    outcomes = [Outcome() for _ in schemas]
    tokens: list[list[int]] = [[] for _ in schemas]
    for number, schema in enumerate(schemas, first):
        rule = grammars.json_schema(schema, "schema")
        sampling = SamplingParams(grammar=rule, seed=number, max_tokens=max_tokens)
        engine.add(Request(number, [1], sampling))
    while engine.wait_for_work():
        updates, _ = engine.step()
        for update in updates:
            tokens[update.request_id - first] += update.token_ids
            outcomes[update.request_id - first].finish_reason = update.finish_reason or ""
        for request_id, error in engine.drain_refusals():
            outcomes[request_id - first].refused = error.cause
            outcomes[request_id - first].code = error.code or ""
    for outcome, ids in zip(outcomes, tokens, strict=True):
        plain = [i for i in ids if i not in tokenizer.special_ids]
        outcome.text = b"".join(map(tokenizer.piece, plain)).decode("utf-8", "replace")
    return outcomes


def real_schemas(shared: Path) -> list[dict[str, Any]]:
    """The 300 schemas with their instances: {"id", "data": {"schema", "tests"}}."""
    path = shared / "eval" / "jsonschema" / "schemas_dev_300.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
