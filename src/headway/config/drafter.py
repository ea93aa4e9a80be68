"""What a drafter adds to a model: its weights, its KV, how many tokens it guesses among.

It does not guess among all tokens, for most are never said: a guess that is missing costs time and
no token, and an output matrix over 152,000 tokens is a third of what a small drafting model reads
(FR-Spec, Zhao et al. 2025). Tokens of a BPE have the ids of their merges, so the first are the
frequent ones, and what came lately comes again:

    of Qwen3's 151,669 tokens                    books   Wikipedia    code   JSON schemas
    the first 32,768                             0.930       0.938   0.961          0.935
    the first 30,720, 2,048 that came lately     0.975       0.977   0.991          0.991
"""

from dataclasses import replace
from typing import NamedTuple

from headway.config.memory_plan import gib, plan_plain, plan_rounded
from headway.config.options import EngineOptions
from headway.config.reasons import Reasons
from headway.config.speculation_config import DraftHead, EagleSpec
from headway.core.errors import UsageError
from headway.core.machine import Machine
from headway.spec import DTYPE_BYTES, KVGroupSpec, ModelSpec
from headway.spec.formats import PLAIN, Format
from headway.spec.quantization import Quantization

MOST, SHARE = 32_768, 3
"""Of a vocabulary a third at most, and this many: EAGLE-3's heads have 32,000."""
FEWEST = 4_096
"""A smaller list is not worth its while: such a vocabulary is little of a pass."""
LEARNED, LEARNED_SHARE = 2_048, 8
"""Of the list so many, or this part of it, are tokens that came lately; the others the first."""
TOGETHER = 64
"""Rows of an output matrix that are packed together: panels are whole in any instruction set."""


class DrafterPlan(NamedTuple):
    """What a drafter adds: the model's KV groups with its own riding on `group`, -1 where none
    does; the bytes of its weights; what a pass reads as a `share` of the model's parameters; among
    how many tokens it guesses, 0: all."""

    groups: tuple[KVGroupSpec, ...]
    group: int = -1
    num_bytes: int = 0
    share: float = 0.0
    vocab_size: int = 0


def plan_drafter(
    options: EngineOptions,
    machine: Machine,
    model: ModelSpec,
    draft: ModelSpec | None,
    draft_head: DraftHead | None,
    device: str,
    dtype: str,
    kernels: str,
    quantization: Quantization,
    reasons: Reasons,
) -> DrafterPlan:
    """What a draft model or a draft head adds; nothing where neither is."""
    if draft is None and draft_head is None:
        if options.draft_vocab_size:
            raise UsageError(
                f"--draft-vocab-size {options.draft_vocab_size} is given, but no model or head "
                "drafts.",
                "Leave it out, or name draft, medusa or eagle in --speculative-method.",
            )
        return DrafterPlan(model.kv_groups)
    listed = plan_draft_vocabulary(options, model, draft, draft_head, reasons)
    num_bytes = listed_bytes(draft or model, listed, dtype, kernels, quantization)
    groups, group = model.kv_groups, -1
    if draft is not None:
        groups, group = plan_draft(model, draft.kv_groups)
        name, share = "draft", draft_share(model, draft, listed)
        choice = plan_draft_weights(machine, draft, device, dtype, kernels, quantization)
    else:
        assert draft_head is not None, "one of both is there"
        if isinstance(draft_head, EagleSpec):
            groups, group = plan_eagle(model, draft_head, dtype)
        name, share = draft_head.source, draft_head_share(model, draft_head, listed)
        choice = plan_draft_head_weights(draft_head, dtype, kernels, quantization)
    num_bytes += reasons.choose(f"{name}_weights", choice, shown=gib)
    return DrafterPlan(groups, group, num_bytes, share, listed)


def choose_draft_vocabulary(
    given: int | None, spec: ModelSpec, size: int, *, own_output: bool = False
) -> tuple[int, str]:
    """(how many of `size` tokens are guessed with the output matrix of `spec`, why); 0: all.

    `own_output`: they are not guessed with that, for each head has one of its own.
    """
    whole = "the output matrix"
    why = "heads have output matrices of their own" if own_output else ""
    if not spec.tied:
        why = f"{whole} is not the embedding, whose rows a list is made of"
    if why and given:
        raise UsageError(
            f"--draft-vocab-size {given}: {why}.", "Leave it out, or give 0: all tokens."
        )
    if why:
        return 0, f"all {size:,}: {why}"
    if given and given % TOGETHER:
        raise UsageError(
            f"--draft-vocab-size {given} is not a multiple of {TOGETHER}.",
            f"Give {-(-given // TOGETHER) * TOGETHER}.",
        )
    if given is not None:
        return (given if given < size else 0), "given"
    fitting = min(MOST, size // SHARE // TOGETHER * TOGETHER)
    if fitting < FEWEST:
        return 0, f"all {size:,}: {whole} is small"
    return fitting, f"of {size:,}: the first, and those that came lately"


def num_learned(size: int) -> int:
    """How many of a list of `size` are tokens that came lately.

    >>> num_learned(32_768), num_learned(1_024), num_learned(64)
    (2048, 128, 64)
    """
    return max(min(LEARNED, size // LEARNED_SHARE // TOGETHER * TOGETHER), TOGETHER)


def plan_eagle(
    model: ModelSpec, eagle: EagleSpec, dtype: str
) -> tuple[tuple[KVGroupSpec, ...], int]:
    """`plan_draft` of a layer that drafts: beside its keys and values lies a state a token."""
    if model.latent is not None:
        raise UsageError(
            f"eagle in --speculative-method: {model.architecture} has latent attention, which no "
            "layer that drafts reads yet.",
            "Leave eagle out of --speculative-method.",
        )
    own = KVGroupSpec(layers=(0,), num_kv_heads=eagle.num_kv_heads, head_dim=model.head_dim)
    return plan_draft(model, (own,), model.hidden_size * DTYPE_BYTES[dtype])


def plan_draft(
    model: ModelSpec, riders: tuple[KVGroupSpec, ...], state_bytes: int = 0
) -> tuple[tuple[KVGroupSpec, ...], int]:
    """(the model's KV groups, one of which the drafter's layers ride on, which one).

    Keys and values of the drafter lie in blocks of the same numbers, so what the model finds again,
    shares or copies the drafter finds, shares and copies too. Windows would take them away.
    """
    if any(rider.value_dim for rider in riders):
        raise UsageError(
            "--draft-model: a drafting model with latent attention is not read yet.",
            "Give one of another family.",
        )
    if any(rider.states for rider in riders):
        raise UsageError(
            "--draft-model: a drafting model with states of sequences is not read yet.",
            "Give one of another family.",
        )
    groups = model.kv_groups
    group = next((i for i, group in enumerate(groups) if not group.window), None)
    if group is None:
        raise UsageError(
            "A drafter with keys and values needs a model with layers of full attention; this one "
            "has windows only.",
            "Leave out --draft-model, and eagle in --speculative-method.",
        )
    riding = replace(groups[group], riders=riders, state_bytes=state_bytes)
    return (*groups[:group], riding, *groups[group + 1 :]), group


def plan_draft_weights(
    machine: Machine,
    draft: ModelSpec,
    device: str,
    dtype: str,
    kernels: str,
    quantization: Quantization,
) -> tuple[int, str]:
    """(bytes of the draft's weights, why): of the model's type, rounded as the model's are."""
    quantization = quantization.of_draft(draft.formats)
    if quantization.rounded:
        return plan_rounded(machine, draft, dtype, quantization)
    _, num_bytes, _ = plan_plain(machine, draft, device, dtype, kernels)
    return num_bytes, f"{draft.num_parameters:,} parameters of {dtype}"


def plan_draft_head_weights(
    draft_head: DraftHead, dtype: str, kernels: str, quantization: Quantization
) -> tuple[int, str]:
    """(bytes of the weights of heads or a layer, why)."""
    format = format_of_drafter(kernels, quantization)
    num_bytes = quantization.weight_bytes(format, 1, draft_head.num_parameters, dtype)
    weights_format = dtype if format == PLAIN else format
    return (
        num_bytes,
        f"{draft_head.summary}, {draft_head.num_parameters:,} parameters of {weights_format}",
    )


def plan_draft_vocabulary(
    options: EngineOptions,
    model: ModelSpec,
    draft: ModelSpec | None,
    draft_head: DraftHead | None,
    reasons: Reasons,
) -> int:
    """Among how many tokens the drafter guesses; 0: all."""
    size = min(model.vocab_size, (draft or model).vocab_size)
    own_output = draft is None and draft_head is not None and not draft_head.shares_head
    choice = choose_draft_vocabulary(
        options.draft_vocab_size, draft or model, size, own_output=own_output
    )
    return reasons.choose("draft_vocab_size", choice)


def format_of_drafter(kernels: str, quantization: Quantization) -> Format:
    """The format of matrices that a drafter adds: as the output matrix's; torch rounds none."""
    return quantization.format_of("head").at_load if kernels == "native" else PLAIN


def listed_bytes(
    model: ModelSpec, listed: int, dtype: str, kernels: str, quantization: Quantization
) -> int:
    """What that part of the output matrix takes beside the whole."""
    format = format_of_drafter(kernels, quantization)
    return quantization.weight_bytes(format, listed, model.hidden_size, dtype)


def draft_share(model: ModelSpec, draft: ModelSpec, listed: int) -> float:
    """What a pass of the draft reads, as a share of the model's parameters."""
    unread = draft.vocab_size - listed if listed else 0
    return (draft.num_parameters - unread * draft.hidden_size) / model.num_parameters


def draft_head_share(model: ModelSpec, draft_head: DraftHead, listed: int) -> float:
    """What a pass of all heads or of a layer reads, as a share of the model's parameters."""
    outputs = (listed or model.vocab_size) if draft_head.shares_head else 0
    return (draft_head.num_parameters + outputs * model.hidden_size) / model.num_parameters
