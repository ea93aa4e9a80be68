"""Who guesses tokens, and how many: what the engine and the runtime are told of speculation."""

from dataclasses import dataclass
from typing import Self

from headway.core.errors import UsageError
from headway.core.options import EngineOptions

FREE = ("lookup", "suffixes", "forced")
"""Sources that cost microseconds."""
SOURCES = (*FREE, "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Without `sources` nobody guesses.

    The layers of a drafting model, read from the folder `draft_model`, ride on the model's KV group
    `draft_group`, -1 where there is none; it has `draft_share` of the model's parameters.
    """

    sources: tuple[str, ...] = ()
    max_drafts: int = 8
    draft_model: str = ""
    draft_group: int = -1
    draft_share: float = 0.0

    @property
    def named(self) -> str:
        """As `--speculate` has it: who guesses, or off."""
        return ",".join(self.sources) or "off"

    @classmethod
    def of(cls, options: EngineOptions, draft_group: int, draft_share: float) -> Self:
        """What the options say; UsageError for a source that is none, or is not there."""
        given = options.speculate.replace(" ", "")
        if given == "off":
            names: tuple[str, ...] = ()
        elif given == "auto":
            names = FREE + (("draft",) if options.draft_model else ())
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
        return cls(
            sources=names,
            max_drafts=options.max_drafts,
            draft_model=options.draft_model,
            draft_group=draft_group,
            draft_share=draft_share,
        )
