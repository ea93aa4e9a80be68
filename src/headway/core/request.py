"""Requests, sampling parameters and sequence updates: the messages between server and engine.

They are msgspec structs, validated once, when they are created. A `Request` asks for `sampling.n`
sequences over one prompt; each `SequenceUpdate` has the new tokens of one sequence in one step.
"""

import math
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.core.grammar import Grammar
from headway.core.principal import Principal
from headway.core.terms import Terms

GREEDY_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOPS = 16
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters, with vLLM's names and meanings.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 keep everything; `min_p` drops tokens
    less likely than `min_p` times the likeliest. Penalties follow the OpenAI API (presence,
    frequency: over generated tokens) and Keskar et al. 2019, CTRL (repetition: prompt too).
    `seed` fixes the draws of this request in any batch. `max_tokens` None means up to the end of
    the context. `logprobs` asks for that many alternatives per generated token,
    `prompt_logprobs` the same for the prompt. `grammar` constrains the answer's text. Raises
    RequestError that names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.top_k == -1:
            self.top_k = 0
        for name, usual, low, high in CHECKED:
            value = getattr(self, name)
            if value is not usual and (value is not None or name not in OPTIONAL):
                check_range(name, value, low, high, integer=name in INTEGERS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens}).",
                param="min_tokens",
                code="invalid_value",
            )
        self._check_lists()
        self.check_grammar()

    def _check_lists(self) -> None:
        for name, kind in CONTAINERS.items():
            if not isinstance(getattr(self, name), kind):
                raise RequestError(
                    f"{name} must be {'a list' if kind is list else 'an object'}.",
                    param=name,
                    code="invalid_type",
                )
        if len(self.stop) > MAX_STOPS:
            raise RequestError(
                f"stop has {len(self.stop)} entries; at most {MAX_STOPS} are accepted.",
                param="stop",
                code="array_above_max_length",
            )
        if self.stop and any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(
                "stop must hold non-empty strings.", param="stop", code="invalid_value"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}.",
                param="logit_bias",
                code="object_above_max_properties",
            )
        for token_id, bias in self.logit_bias.items():
            name = f"logit_bias[{token_id}]"
            check_range(name, bias, -100, 100, integer=False, param="logit_bias")
        for name in ("logit_bias", *ID_LISTS):
            for token_id in getattr(self, name):
                label = f"A token id of {name}"
                check_range(label, token_id, 0, MAX_COUNT, integer=True, param=name)

    def check_grammar(self) -> None:
        """Raise RequestError for a field that a grammar excludes; called again if one is added.

        A grammar determines which tokens are allowed and when the answer ends.
        """
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError("grammar must be a Grammar.", param="grammar", code="invalid_type")
        for name in ("allowed_token_ids", "min_tokens"):
            if self.grammar is not None and getattr(self, name):
                raise RequestError(
                    f"{name} and a grammar ({self.grammar.param}) exclude each other; drop {name}.",
                    param=name,
                    code="invalid_value",
                )

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is taken: temperature 0, or too small to divide by."""
        return self.temperature < GREEDY_TEMPERATURE

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError if a token id is outside the width of the logits."""
        for name in ("logit_bias", *ID_LISTS):
            for token_id in getattr(self, name):
                if not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"{name} names token {token_id}; ids run from 0 to {vocab_size - 1}.",
                        param=name,
                        code="invalid_value",
                    )


RANGES: dict[str, tuple[float | None, float | None]] = {
    "n": (1, 128),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, MAX_COUNT),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "seed": (-(2**63), MAX_SEED),
    "max_tokens": (1, MAX_COUNT),
    "min_tokens": (0, MAX_COUNT),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


USUAL = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
CHECKED = [(name, USUAL[name], low, high) for name, (low, high) in RANGES.items()]
"""(field, default that needs no check, lowest and highest value)."""
OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs"}
INTEGERS = {"n", "top_k", "min_tokens", *OPTIONAL}
ID_LISTS = ("stop_token_ids", "allowed_token_ids")
CONTAINERS = {"stop": list, **dict.fromkeys(ID_LISTS, list), "logit_bias": dict}


def check_range(
    name: str,
    value: Any,
    low: float | None,
    high: float | None,
    *,
    integer: bool | None = None,
    param: str | None = None,
) -> None:
    """Raise RequestError with OpenAI's code unless `value` is a finite number in [low, high].

    `integer` is the type of the field; None: the type of the value.
    """
    kind = "integer" if (isinstance(value, int) if integer is None else integer) else "decimal"
    param = param or name
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        expected = "an integer" if integer else "a number"
        raise RequestError(f"{name} must be {expected}.", param=param, code="invalid_type")
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number.", param=param, code="invalid_value")
    if low is not None and value < low:
        raise RequestError(
            f"{name} is {value}; the minimum is {low}.",
            param=param,
            code=f"{kind}_below_min_value",
        )
    if high is not None and value > high:
        raise RequestError(
            f"{name} is {value}; the maximum is {high}.",
            param=param,
            code=f"{kind}_above_max_value",
        )


class Request(msgspec.Struct, array_like=True):
    """One prompt and its parameters. `request_id` is the server's, never a client's.

    `kv_read` is the share of its context that a generated token reads, `kv_keep` that of its prompt
    that is kept for generated tokens; None: the server's values.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    principal: Principal = Principal()
    arrived_s: float = 0.0
    adapter: str = ""
    terms: Terms = Terms()
    kv_read: float | None = None
    kv_keep: float | None = None


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """One position: the chosen token, its natural-log probability, its rank (1 = likeliest).

    `top_ids` and `top_logprobs` are the likeliest alternatives, best first, as many as asked for.
    All are of the model's own distribution, before temperature, penalties or filters.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class SequenceUpdate(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one sequence of one request in one step.

    `finish_reason` is None while it runs, then exactly once `stop`, `length`, `abort` or `error`.
    `stop_token_id` is the end token that stopped it; it is the last of `token_ids`. `incomplete`
    says that it ended before its grammar was satisfied, for example by `max_tokens`.
    `prompt_logprobs` (first position None), `num_cached_tokens` and `first_scheduled_s`, on the
    clock of `Request.arrived_s`, are set once, with the first token. Of `num_drafts` verified draft
    tokens `num_kept_drafts` were accepted; the last `num_forced` tokens were forced by its grammar.
    """

    request_id: int
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    first_scheduled_s: float | None = None
    incomplete: bool = False
    num_drafts: int = 0
    num_kept_drafts: int = 0
    num_forced: int = 0
