"""A folder as evaluations ask it: chats answered, texts scored, every probability at hand.

`FolderModel` is the `core.scoring.WholeModel` of an offline engine. What it tells is computed by
the engine, the executor and the kernels that serve, so that a change to any of them is judged.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headway.core.plan import Description, Executor, GrammarMasks, StepPlan, StepResult
from headway.core.request import SamplingParams
from headway.core.scoring import STOP, Score, transcript
from headway.llm import LLM, RequestOutput
from headway.spec import DTYPE_BYTES
from headway.spec.gguf.header import is_gguf
from headway.spec.quantization import bytes_per_weight


class Telling(Executor, Protocol):
    """An executor that can tell all probabilities of the step it was given."""

    def distributions(self) -> list[np.ndarray]:
        """fp32 log-probabilities, (tokens, vocabulary), for each row of the submitted plan."""
        ...


class Tap:
    """An executor over another; while `kept` is a list, all distributions are added to it."""

    def __init__(self, executor: Telling) -> None:
        self._executor = executor
        self.kept: list[np.ndarray] | None = None

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(plan)
        if self.kept is not None:
            self.kept += self._executor.distributions()

    def sample(self, step: int, masks: GrammarMasks) -> None:
        self._executor.sample(step, masks)

    def collect(self) -> StepResult:
        return self._executor.collect()

    def describe(self) -> Description:
        return self._executor.describe()

    def probe(self, budget_s: float) -> None:
        self._executor.probe(budget_s)


class FolderModel:
    """The model of a folder; keyword arguments are the engine's options, as of `headway.LLM`."""

    def __init__(self, folder: str | Path, *, name: str = "", **options: Any) -> None:
        self.name = name or Path(folder).name
        self._folder = Path(folder)
        self.llm = LLM(folder, **options)
        self.tokenizer = self.llm.needs_tokenizer()
        self._tap = Tap(self.llm.engine.executor)  # type: ignore[arg-type]
        self.llm.engine.executor = self._tap

    @property
    def max_model_len(self) -> int:
        """The context: the longest prompt with its answer, in tokens."""
        return self.llm.settings.max_model_len

    @property
    def bits(self) -> float:
        """Bits a weight of the matrices, in the mean; a GGUF file's are those of the whole file."""
        spec, settings = self.llm.spec, self.llm.settings
        if is_gguf(self._folder):
            return 8 * self._folder.stat().st_size / spec.num_parameters
        rounded = bytes_per_weight(settings.quantization, spec, settings.dtype)
        return 8 * (rounded or DTYPE_BYTES[settings.dtype])

    def generate(
        self, chats: Sequence[list[dict[str, str]]], *, max_tokens: int
    ) -> list[str | None]:
        """Greedy answers; None where a chat and `max_tokens` exceed the context, as served.

        A model without a chat template is given a transcript to continue.
        """
        template = self.tokenizer.template is not None
        prompts = [
            self.tokenizer.chat_ids(chat) if template else self.encode(transcript(chat))
            for chat in chats
        ]
        fits = [len(ids) + max_tokens <= self.max_model_len for ids in prompts]
        outputs = iter(
            self.llm.generate(
                [{"prompt_token_ids": ids} for ids, fit in zip(prompts, fits) if fit],
                SamplingParams(
                    temperature=0, max_tokens=max_tokens, stop=[] if template else [STOP]
                ),
                use_tqdm=False,
            )
        )
        return [next(outputs).outputs[0].text if fit else None for fit in fits]

    def score(self, texts: Sequence[str], *, top: int = 0) -> list[Score]:
        """The log-probability of every token of these texts, in their order."""
        outputs = self.llm.generate(list(texts), scoring(top), use_tqdm=False)
        return [score_of(output, top) for output in outputs]

    def score_ids(self, rows: Sequence[list[int]], *, top: int = 0) -> list[Score]:
        """The same of token ids."""
        prompts = [{"prompt_token_ids": ids} for ids in rows]
        outputs = self.llm.generate(prompts, scoring(top), use_tqdm=False)
        return [score_of(output, top) for output in outputs]

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the model's tokenizer adds."""
        return self.tokenizer.encode(text)

    def distributions(self, token_ids: list[int]) -> np.ndarray:
        """float32 [T, V]: the log-probabilities of the token after each of the T positions.

        Raises RequestError when T is not less than the context.
        """
        kept: list[np.ndarray] = []
        self._tap.kept = kept
        try:
            self.llm.generate({"prompt_token_ids": token_ids}, scoring(0), use_tqdm=False)
        finally:
            self._tap.kept = None
        return np.concatenate(kept)


def scoring(top: int) -> SamplingParams:
    """Ask for the prompt's log-probabilities; the one token that is generated is dropped."""
    return SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=top)


def score_of(output: RequestOutput, top: int) -> Score:
    """What the engine said of a prompt; alternatives beyond `top` are left out."""
    ids = output.prompt_token_ids
    told = output.prompt_logprobs or [None] * len(ids)
    return Score(
        token_ids=ids,
        logprobs=[entry[i].logprob if entry else None for i, entry in zip(ids, told)],
        top=[
            {i: each.logprob for i, each in entry.items() if each.rank <= top} if entry else {}
            for entry in told
        ],
    )
