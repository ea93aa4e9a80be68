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
SOURCES = (*FREE, *WINDOWED, *DRAFTERS)


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
    def told(self) -> str:
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
    def told(self) -> str:
        """What there is, for a reason."""
        return "a layer"


Beside = MedusaSpec | EagleSpec
"""A drafter that lies beside a model's weights and reads its states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Without `sources` nobody guesses.

    The layers of a drafting model, read from the folder `draft_model`, or that of `eagle` ride on
    the model's KV group `draft_group`, -1 where there is none. A pass of the drafter reads
    `draft_share` of what a step of the model reads.
    """

    sources: tuple[str, ...] = ()
    max_drafts: int = 8
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
            return min(self.max_drafts, self.medusa.num_heads)
        return self.max_drafts

    @property
    def named(self) -> str:
        """As `--speculate` has it: who guesses, or off."""
        return ",".join(self.sources) or "off"

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        draft_group: int,
        draft_share: float,
        beside: Beside | None = None,
        draft_vocab_size: int = 0,
    ) -> Self:
        """What the options say; UsageError for a source that is none, or is not there.

        `beside` is the drafter beside the model's weights, where there is one. The drafter guesses
        among the first and latest `draft_vocab_size` tokens, 0: among all.
        """
        given = options.speculate.replace(" ", "")
        if given == "off":
            names: tuple[str, ...] = ()
            if options.max_drafts != EngineOptions().max_drafts:
                raise UsageError(
                    f"--max-drafts {options.max_drafts}: with --speculate off nobody guesses.",
                    "Leave it out, or give --speculate auto.",
                )
        elif given == "auto":
            found = beside.source if beside is not None else "lookahead"
            drafter = "draft" if options.draft_model else found
            names = (*FREE, drafter)
        else:
            names = tuple(dict.fromkeys(given.split(",")))
        for name in names:
            if name not in SOURCES:
                raise UsageError(
                    f"--speculate: {name!r} is not a source of drafts.",
                    f"Use auto, off, or some of {', '.join(SOURCES)}, with commas.",
                )
        if "draft" in names and not options.draft_model:
            raise UsageError(
                "--speculate draft needs a drafting model.", "Name its folder with --draft-model."
            )
        if "draft" not in names and options.draft_model:
            raise UsageError(
                f"--draft-model is given, but --speculate {given} does not use it.",
                "Add draft to --speculate, or use --speculate auto.",
            )
        drafters = [name for name in DRAFTERS if name in names]
        if len(drafters) > 1:
            raise UsageError(
                f"--speculate names {' and '.join(drafters)}, but a step asks only one of them.",
                f"Leave {'one' if len(drafters) == 2 else 'two'} of them out.",
            )
        if drafters not in ([], ["draft"]) and beside is None:
            raise UsageError(
                f"--speculate {drafters[0]} needs {drafters[0]}.safetensors beside the model's "
                "weights.",
                "Train it for the model, or use another source.",
            )
        return cls(
            sources=names,
            max_drafts=options.max_drafts,
            draft_model=options.draft_model,
            draft_group=draft_group,
            draft_share=draft_share,
            medusa=beside if "medusa" in names and isinstance(beside, MedusaSpec) else None,
            eagle=beside if "eagle" in names and isinstance(beside, EagleSpec) else None,
            draft_vocab_size=draft_vocab_size,
        )
