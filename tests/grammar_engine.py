"""An engine with grammars over the fake runtime: made, asked, run to the end, its texts read."""

import json
import re
from dataclasses import dataclass, field

from byte_tokenizer import EOS
from fakes import FakeExecutor, make_settings
from headway.core.grammar import Grammar
from headway.core.request import Request, SamplingParams, SequenceUpdate
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.engine.grammar.grammars import Grammars
from headway.frontend.text import Tokenizer
from late_world import LateExecutor

TOKENS, VOCAB = 320, 325
"""The logits are a little wider than the vocabulary, as many models' are."""


@dataclass
class Gained:
    """What one sequence received."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    incomplete: bool = False
    last: SequenceUpdate | None = None


def engine_of(made: Grammars | None, *, num_blocks: int = 400, **more: object) -> Engine:
    """An engine over the checking fake; where it plans ahead, over one that holds steps."""
    shape = {"max_model_len": 400, "max_num_seqs": 6, "budget": 32, "num_blocks": (num_blocks,)}
    settings = make_settings(**{**shape, **more})
    fake = FakeExecutor(4, (num_blocks,), VOCAB)
    executor = LateExecutor(fake) if settings.scheduler.overlap else fake
    return build_engine(executor, settings, vocab_size=VOCAB, eos_token_ids=(EOS,), grammars=made)


def ask(grammar: Grammar | None, number: int = 1, max_tokens: int = 200, **more: object) -> Request:
    sampling = SamplingParams(grammar=grammar, max_tokens=max_tokens, seed=number, **more)
    return Request(number, [5 + number % 7, 6, 7, 8, 9], sampling)


def finish(engine: Engine, *requests: Request) -> dict[tuple[int, int], Gained]:
    """Run `requests` to their ends, checking the engine after every step."""
    for request in requests:
        engine.add(request)
    gained = {(r.request_id, i): Gained() for r in requests for i in range(r.sampling.n)}
    while engine.wait_for_work():
        updates, _ = engine.step()
        for update in updates:
            one = gained[update.request_id, update.index]
            assert one.finish_reason is None
            one.tokens += update.token_ids
            one.finish_reason, one.incomplete = update.finish_reason, update.incomplete
            one.last = update
        engine.check_integrity()
    return gained


def text_of(tokenizer: Tokenizer, one: Gained) -> str:
    return b"".join(
        tokenizer.piece(t) for t in one.tokens if t not in tokenizer.special_ids
    ).decode()


def follows(grammar: Grammar, text: str) -> bool:
    """Whether `text` is what `RULES` ask for."""
    match grammar.kind:
        case "json":
            return json.loads(text).keys() == {"found"}
        case "regex":
            return re.fullmatch(grammar.text, text) is not None
        case "choice":
            return text in json.loads(grammar.text)
        case "lark":
            return re.fullmatch("<[a-z]{1,9}>", text) is not None
        case _:
            return text in ("true", "false")
