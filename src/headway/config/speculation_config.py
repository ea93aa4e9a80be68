"""Who guesses tokens, and how many: what the engine and the runtime are told of speculation."""

from dataclasses import dataclass
from typing import ClassVar, Self

from headway.config.options import EngineOptions
from headway.core.errors import UsageError

FREE = ("lookup", "suffixes", "forced")
"""Sources that cost microseconds."""
WINDOWED = ("lookahead",)
"""Sources whose guesses are rows that look for n-grams as well."""
DRAFTERS = ("draft", "medusa", "eagle")
"""Sources that compute: a drafting model, Medusa heads, a layer. A step asks one of them."""
METHODS = {
    "ngram": "lookup",
    "suffix": "suffixes",
    "grammar": "forced",
    **{name: name for name in (*WINDOWED, *DRAFTERS)},
}
"""Value of `--speculative-method` → name of its source in `/stats`, metrics and reports."""
METHOD_OF_SOURCE = {source: method for method, source in METHODS.items()}


def choose_method(options: EngineOptions) -> str:
    """Return `--speculative-method` without spaces; left out it is auto with a draft model.

    >>> choose_method(EngineOptions(draft_model="small")), choose_method(EngineOptions())
    ('auto', 'off')
    """
    if options.speculative_method is None:
        return "auto" if options.draft_model else "off"
    return options.speculative_method.replace(" ", "")


def parse_method(name: str) -> str:
    """Return the source of one method; raises UsageError for an unknown one."""
    if name in METHODS:
        return METHODS[name]
    known = f"Use auto, off, or some of {', '.join(METHODS)}, with commas."
    method = METHOD_OF_SOURCE.get(name)
    raise UsageError(
        f"--speculative-method: {name!r} is not a source of draft tokens.",
        known if method is None else f"Use {method}.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec:
    """Medusa heads as their file tells them: head i guesses the token i + 2 ahead.

    Each is `num_layers` residual blocks and an output matrix, the model's own where it is shared.
    """

    source: ClassVar[str] = "medusa"
    num_heads: int
    num_layers: int
    shares_head: bool
    num_parameters: int

    @property
    def summary(self) -> str:
        """What there is, for a reason."""
        return f"{self.num_heads} heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """A layer that drafts from the model's states, as the shapes of its file tell it (EAGLE)."""

    source: ClassVar[str] = "eagle"
    shares_head: ClassVar[bool] = True
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    qkv_bias: bool
    fc_bias: bool
    num_parameters: int

    @property
    def summary(self) -> str:
        """What there is, for a reason."""
        return "a layer"


DraftHead = MedusaSpec | EagleSpec
"""A drafter that lies beside a model's weights and reads its states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Without `sources` nobody guesses.

    The layers of a drafting model, read from the folder `draft_model`, or that of `eagle` ride on
    the model's KV group `draft_group`, -1 where there is none. A pass of the drafter reads
    `draft_share` of what a step of the model reads.
    """

    sources: tuple[str, ...] = ()
    num_speculative_tokens: int = 8
    draft_model: str = ""
    draft_group: int = -1
    draft_share: float = 0.0
    medusa: MedusaSpec | None = None
    eagle: EagleSpec | None = None
    draft_vocab_size: int = 0
    """The drafter guesses among so many tokens; 0: all."""

    @property
    def drafter(self) -> str:
        """The one of `DRAFTERS` that is asked, "" for none."""
        return next((name for name in self.sources if name in DRAFTERS), "")

    @property
    def max_proposed(self) -> int:
        """Most guesses that the drafter makes of a sequence."""
        if self.medusa is not None:
            return min(self.num_speculative_tokens, self.medusa.num_heads)
        return self.num_speculative_tokens

    @property
    def source_names(self) -> str:
        """Names of the sources as in `/stats`, or off."""
        return ",".join(self.sources) or "off"

    @property
    def methods(self) -> tuple[str, ...]:
        """The sources as `--speculative-method` names them."""
        return tuple(METHOD_OF_SOURCE[source] for source in self.sources)

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        draft_group: int,
        draft_share: float,
        draft_head: DraftHead | None = None,
        draft_vocab_size: int = 0,
    ) -> Self:
        """What the options say; UsageError for a source that is none, or is not there.

        `draft_head` is the drafter in the model's own folder. The drafter proposes the first and
        latest `draft_vocab_size` tokens alone, 0: all.
        """
        given = choose_method(options)
        if given == "off":
            names: tuple[str, ...] = ()
            if options.num_speculative_tokens != EngineOptions().num_speculative_tokens:
                raise UsageError(
                    f"--num-speculative-tokens {options.num_speculative_tokens}: with "
                    "--speculative-method off there are no draft tokens.",
                    "Leave it out, or give --speculative-method auto.",
                )
        elif given == "auto":
            default = draft_head.source if draft_head is not None else "lookahead"
            drafter = "draft" if options.draft_model else default
            names = (*FREE, drafter)
        else:
            names = tuple(parse_method(name) for name in dict.fromkeys(given.split(",")))
        if "draft" in names and not options.draft_model:
            raise UsageError(
                "--speculative-method draft needs a drafting model.",
                "Name its folder with --draft-model.",
            )
        if "draft" not in names and options.draft_model:
            raise UsageError(
                f"--draft-model is given, but --speculative-method {given} does not use it.",
                "Add draft to --speculative-method, or use --speculative-method auto.",
            )
        drafters = [name for name in DRAFTERS if name in names]
        if len(drafters) > 1:
            raise UsageError(
                f"--speculative-method names {' and '.join(drafters)}, but a step asks only one "
                "of them.",
                f"Leave {'one' if len(drafters) == 2 else 'two'} of them out.",
            )
        if drafters not in ([], ["draft"]) and draft_head is None:
            raise UsageError(
                f"--speculative-method {drafters[0]} needs {drafters[0]}.safetensors beside the "
                "model's weights.",
                "Train it for the model, or use another source.",
            )
        return cls(
            sources=names,
            num_speculative_tokens=options.num_speculative_tokens,
            draft_model=options.draft_model,
            draft_group=draft_group,
            draft_share=draft_share,
            medusa=draft_head if "medusa" in names and isinstance(draft_head, MedusaSpec) else None,
            eagle=draft_head if "eagle" in names and isinstance(draft_head, EagleSpec) else None,
            draft_vocab_size=draft_vocab_size,
        )
