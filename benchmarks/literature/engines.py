"""Engines over one executor in this process: what a model does without HTTP, set up in many ways.

Time is what this process has computed, with one thread unless a claim varies threads: so other
work on the machine counts little. Prompts are drawn token by token.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.assemble import make_executor
from headway.config.resolve import Settings
from headway.core.plan import Executor
from headway.core.request import Request, SamplingParams
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.llm import make_options
from headway.planning import plan_settings
from headway.spec import ModelSpec

Lengths = Sequence[tuple[int, int]]
"""(prompt, answer) tokens of each request."""


@dataclass(slots=True)
class Played:
    """What a queue that was full at once came to: seconds of computing, tokens and steps, and after
    how many seconds each request had its last token."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    ends_s: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Answer tokens a second."""
        return self.tokens / self.seconds


@dataclass(slots=True, kw_only=True)
class EngineFactory:
    """Makes engines over one executor, with the settings that it was made for."""

    executor: Executor
    settings: Settings
    spec: ModelSpec
    _number: int = 0

    @classmethod
    def of(cls, folder: Path, **options: Any) -> "EngineFactory":
        """The model of a folder; options as of the engine."""
        wanted = make_options({"device": "cpu", "threads": 1, **options})
        spec, settings, _, machine = plan_settings(folder, wanted)
        executor = make_executor(folder, wanted, spec, settings, machine, None)
        return cls(executor=executor, settings=settings, spec=spec)

    @classmethod
    def of_shape(cls, config: dict[str, Any], **options: Any) -> "EngineFactory":
        """A model of these sizes with random weights."""
        with tempfile.TemporaryDirectory(prefix="headway-claims-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            return cls.of(Path(folder), load_format="dummy", skip_tokenizer_init=True, **options)

    def engine(self, batching: str = "continuous") -> Engine:
        """A new engine by this rule; it finds nothing that another has computed."""
        settings = replace(
            self.settings,
            cache=replace(self.settings.cache, prefix_cache=""),
            scheduler=replace(self.settings.scheduler, batching=batching),
        )
        return build_engine(
            self.executor, settings, vocab_size=self.spec.vocab_size, eos_token_ids=()
        )

    def add(self, engine: Engine, lengths: Lengths, seed: int) -> None:
        """Requests of these lengths, their prompts drawn by the seed."""
        draw = np.random.default_rng(seed)
        for prompt, answer in lengths:
            self._number += 1
            sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            ids = draw.integers(3, self.spec.vocab_size, prompt).tolist()
            engine.add(Request(self._number, ids, sampling))
        engine.flush()

    def play(self, engine: Engine, lengths: Lengths, seed: int) -> Played:
        """All of them at once, to the last token."""
        self.add(engine, lengths, seed)
        played, began_s = Played(), time.process_time()
        while engine.has_work:
            updates, record = engine.step()
            played.tokens += sum(len(update.token_ids) for update in updates)
            if record.num_tokens:
                played.steps += 1
            ended = sum(update.finish_reason is not None for update in updates)
            played.ends_s += [time.process_time() - began_s] * ended
        played.seconds = time.process_time() - began_s
        return played

    def step_s(
        self, prompt: int, rows: int, count: int, now_s: Callable[[], float] = time.process_time
    ) -> tuple[float, float]:
        """(a prompt of so many tokens alone, the median decode step behind it), by the clock.

        Decodes are `rows` at once, `count` steps of them.
        """
        engine = self.engine()
        self.add(engine, [(prompt, 1)], seed=self._number)
        prefill_s = 0.0
        while engine.has_work:
            began_s = now_s()
            engine.step()
            prefill_s += now_s() - began_s
        self.add(engine, [(prompt, count + 2)] * rows, seed=self._number + 1)
        steps: list[float] = []
        while engine.has_work:
            began_s = now_s()
            _, record = engine.step()
            if record.num_tokens == record.num_sampled == rows:
                steps.append(now_s() - began_s)
        return prefill_s, float(np.median(steps))
