"""`sampler.choose` without a read-back: the host's inputs are sent first, the rest is tensors.

It has the same edits in the same order, the same floors and draws. The reference sorts the
likeliest tokens and checks whether they suffice, which would need a read-back. Here a floor is
found by halving the range of all floats 32 times, each time adding up what lies above the middle:

    top_k   the greatest floor that at least k tokens reach
    top_p   the greatest floor whose tokens have at least the mass p

A floor is a value of the row itself, so ties are kept together as in the reference. R rows, V
vocabulary, W words of 32 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headway.core.plan import GrammarMasks
from headway.runtime.batch import WorkerSequence
from headway.runtime.cuda.staging import Staging
from headway.runtime.philox import uniforms
from headway.runtime.sampler import NEVER, NO_TOKEN, row_masks

LEAST_KEY, GREATEST_KEY = -(2**31), 2**31 - 1


@dataclass(slots=True, kw_only=True)
class RowInputs:
    """Sampling inputs of the rows of a step, on the device; None where no row uses one.

    Edits of single tokens are (indices in the flat logits, numbers). `tokens_R` are the indices of
    the rows among the step's tokens, `state_R` those of their sequences in the state.
    """

    tokens_R: Tensor
    state_R: Tensor
    allowed_RW: Tensor | None
    bias: tuple[Tensor, Tensor] | None
    banned: Tensor | None
    repeated: tuple[Tensor, Tensor] | None
    penalties: tuple[Tensor, Tensor] | None
    greedy_R: Tensor
    temperature_R1: Tensor
    min_p_R1: Tensor
    top_k_R1: Tensor
    top_p_R1: Tensor
    u_R1: Tensor
    any_drawn: bool
    any_filter: bool


class SparseEdits:
    """Edits of single tokens while they are collected: row · V + token → a number."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._at: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, row: int, tokens: np.ndarray, values: np.ndarray | float) -> None:
        """Add numbers for tokens of a row; tokens beyond the head's width are dropped."""
        inside = (tokens >= 0) & (tokens < self._vocabulary)
        all_values = np.broadcast_to(np.asarray(values, np.float32), tokens.shape)
        self._at.append(row * self._vocabulary + tokens[inside].astype(np.int64))
        self._values.append(all_values[inside])

    def arrays(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return (indices, numbers), None without any."""
        if not self._at:
            return None
        return np.concatenate(self._at), np.concatenate(self._values)


def edits_of(
    sequences: list[WorkerSequence], vocabulary: int
) -> dict[str, tuple[np.ndarray, np.ndarray] | None]:
    """Return the edits of `sampler.edit_row`, by name."""
    names = ("bias", "banned", "repeated", "penalties")
    edits = {name: SparseEdits(vocabulary) for name in names}
    for row, sequence in enumerate(sequences):
        params, new = sequence.new.sampling, sequence.new
        if params.logit_bias:
            values = np.array(list(params.logit_bias.values()), np.float32)
            edits["bias"].add(row, np.array(list(params.logit_bias)), values)
        if params.min_tokens > len(sequence.generated) and new.stop_ids:
            edits["banned"].add(row, np.array(new.stop_ids), NEVER)
        if params.repetition_penalty != 1.0:
            prompt = new.token_ids[: new.num_prompt_tokens]
            unique_ids = np.unique(np.array([*prompt, *sequence.generated]))
            edits["repeated"].add(row, unique_ids, params.repetition_penalty)
        if sequence.generated and (params.frequency_penalty or params.presence_penalty):
            ids, counts = np.unique(np.array(sequence.generated), return_counts=True)
            amounts = params.frequency_penalty * counts + params.presence_penalty
            edits["penalties"].add(row, ids, amounts.astype(np.float32))
    return {name: one.arrays() for name, one in edits.items()}


def allowed_words(
    sequences: list[WorkerSequence], masks: GrammarMasks, vocabulary: int
) -> np.ndarray | None:
    """Return a bit for each allowed token, (R, W); None where all are allowed."""
    by_row = row_masks(masks, sequences)
    named = [row for row, s in enumerate(sequences) if s.new.sampling.allowed_token_ids]
    if not by_row and not named:
        return None
    words = -(-vocabulary // 32)
    allowed_RB = np.full((len(sequences), 4 * words), 255, np.uint8)
    for row, mask in by_row.items():
        packed = np.frombuffer(mask, np.uint8)[: 4 * words]
        allowed_RB[row] = 0
        allowed_RB[row, : len(packed)] = packed
    for row in named:
        bits = np.zeros(32 * words, np.uint8)
        tokens = np.array(sequences[row].new.sampling.allowed_token_ids)
        bits[tokens[(tokens >= 0) & (tokens < vocabulary)]] = 1
        allowed_RB[row] &= np.packbits(bits, bitorder="little")
    return allowed_RB.view(np.int32)


def is_plain(sequence: WorkerSequence) -> bool:
    """Return whether the token is sampled from unedited logits, without log-probabilities."""
    params, new = sequence.new.sampling, sequence.new
    edits = (params.grammar, params.logit_bias, params.allowed_token_ids)
    penalties = (params.frequency_penalty, params.presence_penalty)
    held_back = new.stop_ids and params.min_tokens > len(sequence.generated)
    return (
        not any((*edits, *penalties, held_back))
        and params.repetition_penalty == 1.0
        and params.logprobs is None
    )


def draw_arrays(sequences: list[WorkerSequence], vocabulary: int) -> dict[str, np.ndarray]:
    """Return sampling parameters, (R,) or (R, 1), by the names of `graphs.DRAW_INPUTS`."""
    params = [sequence.new.sampling for sequence in sequences]
    top_k = [p.top_k if p.top_k > 0 else vocabulary for p in params]
    return {
        "greedy": np.array([p.greedy for p in params], np.bool_),
        "temperature": column([1.0 if p.greedy else p.temperature for p in params], np.float32),
        "min_p": column([p.min_p for p in params], np.float32),
        "top_k": column(top_k, np.int64),
        "top_p": column([p.top_p for p in params], np.float32),
        "u": uniforms(
            np.array([sequence.new.seed for sequence in sequences], np.uint64),
            np.array([sequence.new.index for sequence in sequences], np.int64),
            np.array([len(sequence.generated) for sequence in sequences], np.int64),
        )[:, None],
    }


def column(values: list[float] | list[int], dtype: type) -> np.ndarray:
    """Return the values as (R, 1)."""
    return np.array(values, dtype).reshape(-1, 1)


def draw_inputs(sent: dict[str, Tensor], state_R: Tensor) -> RowInputs:
    """Return the inputs of rows without edits, with every filter turned on; see `draw_arrays`."""
    return RowInputs(
        tokens_R=state_R,
        state_R=state_R,
        allowed_RW=None,
        bias=None,
        banned=None,
        repeated=None,
        penalties=None,
        greedy_R=sent["greedy"],
        temperature_R1=sent["temperature"],
        min_p_R1=sent["min_p"],
        top_k_R1=sent["top_k"],
        top_p_R1=sent["top_p"],
        u_R1=sent["u"],
        any_drawn=True,
        any_filter=True,
    )


def row_inputs(
    tokens: list[int],
    sequences: list[WorkerSequence],
    masks: GrammarMasks,
    vocabulary: int,
    staging: Staging,
) -> RowInputs:
    """Return all that the host knows of these rows, sent in one copy."""
    params = [sequence.new.sampling for sequence in sequences]
    filters = [(p.min_p, p.top_k, p.top_p) for p in params if not p.greedy]
    allowed = allowed_words(sequences, masks, vocabulary)
    edits = edits_of(sequences, vocabulary)
    arrays: dict[str, np.ndarray] = {
        "tokens": np.array(tokens, np.int64),
        "state": np.array([sequence.row for sequence in sequences], np.int64),
        **draw_arrays(sequences, vocabulary),
    }
    if allowed is not None:
        arrays["allowed"] = allowed
    for name, pair in edits.items():
        if pair is not None:
            arrays |= {name: pair[0], f"{name} values": pair[1]}
    sent = dict(zip(arrays, staging.send(list(arrays.values())), strict=True))

    def pair_of(name: str) -> tuple[Tensor, Tensor] | None:
        return (sent[name], sent[f"{name} values"]) if name in sent else None

    return replace(
        draw_inputs(sent, sent["state"]),
        tokens_R=sent["tokens"],
        allowed_RW=sent.get("allowed"),
        bias=pair_of("bias"),
        banned=sent.get("banned"),
        repeated=pair_of("repeated"),
        penalties=pair_of("penalties"),
        any_drawn=bool(filters),
        any_filter=any(one != (0.0, 0, 1.0) for one in filters),
    )


def choose(
    logits_RV: Tensor, rows: RowInputs, kernel: Callable[[Tensor, RowInputs], Tensor] | None = None
) -> Tensor:
    """Return a token for each row, NO_TOKEN where all are forbidden, (R,); the logits stay
    unchanged.

    `kernel` does all that follows the edits at once (`triton.draw`).
    """
    edited = (rows.allowed_RW, rows.bias, rows.banned, rows.repeated, rows.penalties)
    changed = any(one is not None for one in edited)
    logits_RV = logits_RV.to(torch.float32, copy=changed)
    if changed:
        edit(logits_RV, rows)
    if kernel is not None:
        return kernel(logits_RV, rows)
    best_R1, chosen_R1 = logits_RV.max(-1, keepdim=True)
    if rows.any_drawn:
        drawn_R1 = draw(logits_RV, rows)
        chosen_R1 = torch.where(rows.greedy_R[:, None], chosen_R1, drawn_R1)
    return chosen_R1.masked_fill(best_R1 == NEVER, NO_TOKEN)[:, 0]


def edit(logits_RV: Tensor, rows: RowInputs) -> None:
    """Apply masks, allowed tokens, bias, min_tokens and penalties, in place."""
    if rows.allowed_RW is not None:
        bit = torch.arange(32, device=logits_RV.device, dtype=torch.int32)
        allowed_RV = ((rows.allowed_RW[:, :, None] >> bit) & 1).flatten(1)[:, : logits_RV.shape[1]]
        logits_RV.masked_fill_(allowed_RV == 0, NEVER)
    flat = logits_RV.view(-1)
    if rows.bias is not None:
        at, values = rows.bias
        flat.index_copy_(0, at, flat.index_select(0, at) + values)
    if rows.banned is not None:
        flat.index_fill_(0, rows.banned, NEVER)
    if rows.repeated is not None:
        at, factors = rows.repeated
        values = flat.index_select(0, at)
        flat.index_copy_(0, at, torch.where(values > 0, values / factors, values * factors))
    if rows.penalties is not None:
        at, amounts = rows.penalties
        flat.index_copy_(0, at, flat.index_select(0, at) - amounts)


def draw(logits_RV: Tensor, rows: RowInputs) -> Tensor:
    """Return one token for each row from the filtered distribution, (R, 1): `sampler.draw`."""
    logits_RV = logits_RV / rows.temperature_R1
    if rows.any_filter:
        logits_RV = keep_likely(logits_RV, rows)
    cumulative_RV = logits_RV.double().softmax(-1).cumsum(-1)
    target_R1 = rows.u_R1 * cumulative_RV[:, -1:]
    token_R1 = torch.searchsorted(cumulative_RV, target_R1, right=True)
    return token_R1.clamp_(max=logits_RV.shape[1] - 1)


def keep_likely(logits_RV: Tensor, rows: RowInputs) -> Tensor:
    """Apply min_p, then top_k, then top_p: `sampler.keep_likely`."""
    floor_R1 = logits_RV.amax(-1, keepdim=True) + rows.min_p_R1.log()
    logits_RV = logits_RV.masked_fill(logits_RV < floor_R1, NEVER)
    vocabulary = logits_RV.shape[1]
    ones = torch.ones((), dtype=torch.float64, device=logits_RV.device)
    num_top_R1 = rows.top_k_R1.clamp(max=vocabulary)
    floor_R1 = greatest_floor(logits_RV, ones, num_top_R1.double())
    floor_R1 = floor_R1.masked_fill(num_top_R1 >= vocabulary, NEVER)
    logits_RV = logits_RV.masked_fill(logits_RV < floor_R1, NEVER)
    wide_RV = logits_RV.double()
    mass_RV = (wide_RV - torch.logsumexp(wide_RV, -1, keepdim=True)).exp()
    floor_R1 = greatest_floor(logits_RV, mass_RV, rows.top_p_R1.double())
    floor_R1 = floor_R1.masked_fill(rows.top_p_R1 >= 1, NEVER)
    return logits_RV.masked_fill(logits_RV < floor_R1, NEVER)


def greatest_floor(logits_RV: Tensor, weights_RV: Tensor, target_R1: Tensor) -> Tensor:
    """Return the greatest number such that the weights of the logits from it on reach `target`, (R,
    1).

    It halves the range of keys, which have the order of the floats; 32 rounds for any numbers.
    """
    keys_RV = key_of(logits_RV)
    low_R1 = torch.full_like(target_R1, LEAST_KEY, dtype=torch.int64)
    high_R1 = torch.full_like(target_R1, GREATEST_KEY, dtype=torch.int64)
    for _ in range(32):
        middle_R1 = (low_R1 + high_R1 + 1) >> 1
        above_RV = torch.where(keys_RV >= middle_R1, weights_RV, 0.0)
        enough_R1 = above_RV.sum(-1, keepdim=True) >= target_R1
        low_R1 = torch.where(enough_R1, middle_R1, low_R1)
        high_R1 = torch.where(enough_R1, high_R1, middle_R1 - 1)
    return float_of(low_R1).nan_to_num(nan=NEVER, posinf=float("inf"), neginf=NEVER)


def key_of(values: Tensor) -> Tensor:
    """Return int64 keys in the order of fp32 numbers: bits, inverted for negative ones."""
    bits = values.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, bits ^ GREATEST_KEY, bits)


def float_of(keys: Tensor) -> Tensor:
    """Return the fp32 number of each key."""
    bits = torch.where(keys < 0, keys ^ GREATEST_KEY, keys)
    return bits.to(torch.int32).view(torch.float32)


def top_logprobs(logits_RV: Tensor, chosen_R: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-probabilities (R, 1 + count), ranks (R,), alternatives) of tokens."""
    logits_RV = logits_RV.float()
    total_R1 = torch.logsumexp(logits_RV, -1, keepdim=True)
    value_R1 = logits_RV.gather(1, chosen_R.clamp(min=0)[:, None])
    ranks_R = (logits_RV > value_R1).sum(-1) + 1
    top = logits_RV.topk(min(count, logits_RV.shape[1]), -1)
    return torch.cat((value_R1, top.values), 1) - total_R1, ranks_R, top.indices
