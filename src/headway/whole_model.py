"""A folder's model for evaluations: answers to chats, scores of texts, all probabilities.

`FolderModel` is the `core.scoring.WholeModel` of an offline engine. It uses the engine, executor
and kernels that serve, so that evaluations cover changes in any of them.
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
from headway.spec.gguf.header import is_gguf, split_files
from headway.spec.quantization import bytes_per_weight


class DistributionExecutor(Executor, Protocol):
    """An executor that can return all probabilities of its last step."""

    def distributions(self) -> list[np.ndarray]:
        """Return fp32 log-probabilities, (tokens, vocabulary), for each row of the submitted
        plan."""
        ...


class RecordingExecutor:
    """Wraps an executor; while `recorded` is a list, it collects all distributions."""

    def __init__(self, executor: DistributionExecutor) -> None:
        self._executor = executor
        self.recorded: list[np.ndarray] | None = None

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(plan)
        if self.recorded is not None:
            self.recorded += self._executor.distributions()

    def sample(self, step: int, masks: GrammarMasks) -> None:
        self._executor.sample(step, masks)

    def collect(self) -> StepResult:
        return self._executor.collect()

    def describe(self) -> Description:
        return self._executor.describe()

    def probe(self, budget_s: float) -> None:
        self._executor.probe(budget_s)


class FolderModel:
    """The model of a folder; keyword arguments are the engine's options, as in `headway.LLM`."""

    def __init__(self, folder: str | Path, *, name: str = "", **options: Any) -> None:
        self.name = name or Path(folder).name
        self._folder = Path(folder)
        self.llm = LLM(folder, **options)
        self.tokenizer = self.llm.needs_tokenizer()
        self._recorder = RecordingExecutor(self.llm.engine.executor)  # type: ignore[arg-type]
        self.llm.engine.executor = self._recorder

    @property
    def max_model_len(self) -> int:
        """The context: the longest prompt with its answer, in tokens."""
        return self.llm.settings.max_model_len

    @property
    def bits(self) -> float:
        """Mean bits per weight of the matrices; for a GGUF file, of the whole file."""
        spec, settings = self.llm.spec, self.llm.settings
        if is_gguf(self._folder):
            num_bytes = sum(file.stat().st_size for file in split_files(self._folder))
            return 8 * num_bytes / spec.num_parameters
        rounded = bytes_per_weight(settings.quantization, spec, settings.dtype)
        return 8 * (rounded or DTYPE_BYTES[settings.dtype])

    def generate(
        self, chats: Sequence[list[dict[str, str]]], *, max_tokens: int
    ) -> list[str | None]:
        """Return greedy answers; None if a chat and `max_tokens` exceed the context, as when
        served.

        A model without a chat template continues a transcript.
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
        """Return the log-probability of every token of these texts, in order."""
        outputs = self.llm.generate(list(texts), scoring(top), use_tqdm=False)
        return [score_of(output, top) for output in outputs]

    def score_ids(self, rows: Sequence[list[int]], *, top: int = 0) -> list[Score]:
        """Return the scores of token ids."""
        prompts = [{"prompt_token_ids": ids} for ids in rows]
        outputs = self.llm.generate(prompts, scoring(top), use_tqdm=False)
        return [score_of(output, top) for output in outputs]

    def encode(self, text: str) -> list[int]:
        """Return token ids, with the special tokens that the model's tokenizer adds."""
        return self.tokenizer.encode(text)

    def distributions(self, token_ids: list[int]) -> np.ndarray:
        """Return float32 [T, V]: log-probabilities of the token after each of the T positions.

        Raises RequestError if T is not less than the context.
        """
        recorded: list[np.ndarray] = []
        self._recorder.recorded = recorded
        try:
            self.llm.generate({"prompt_token_ids": token_ids}, scoring(0), use_tqdm=False)
        finally:
            self._recorder.recorded = None
        return np.concatenate(recorded)


def scoring(top: int) -> SamplingParams:
    """Return parameters for log-probabilities of the prompt; the one generated token is dropped."""
    return SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=top)


def score_of(output: RequestOutput, top: int) -> Score:
    """Convert the engine's output for a prompt; alternatives beyond `top` are dropped."""
    ids = output.prompt_token_ids
    entries = output.prompt_logprobs or [None] * len(ids)
    return Score(
        token_ids=ids,
        logprobs=[entry[i].logprob if entry else None for i, entry in zip(ids, entries)],
        top=[
            {i: each.logprob for i, each in entry.items() if each.rank <= top} if entry else {}
            for entry in entries
        ],
    )
