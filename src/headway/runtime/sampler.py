"""Sample tokens from logits, for rows with different parameters in one batch.

The order is vLLM's: allowed tokens, logit bias, min_tokens, penalties; then greedy rows take the
likeliest token, the others are divided by the temperature and filtered by min_p, top_k and top_p. A
filter is a threshold on the logit, and the draw walks the tokens in the order of their ids, so a
row's token depends on its own logits, parameters and random number, never on other rows. Logits of
16 bits are the same numbers in fp32. On a CPU `NativeSampling` chooses the same tokens, where the
native kernels run.

R rows, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.core.plan import GrammarMasks
from headway.core.request import SamplingParams, TokenLogprobs
from headway.runtime.batch import WorkerSequence
from headway.runtime.native.library import TYPES
from headway.runtime.native.sampling import DRAW, NativeSampling
from headway.runtime.philox import uniforms

NEVER = float("-inf")
NO_TOKEN = -1
"""Result of a row where parameters and masks forbid every token."""
TOP_P_CANDIDATES = 512
"""Likeliest tokens that are searched for the mass of top_p before all tokens are sorted."""


@dataclass(slots=True)
class RowParameters:
    """The parameters of R sequences as tensors; None where no row uses one."""

    sequence_ids: tuple[int, ...]
    drawn: list[int]
    temperature: Tensor | None
    min_p: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    edited: list[int]
    has_logprobs: bool
    draws_R: np.ndarray
    logits_place: tuple[int, int] = (0, 0)
    """Address and type of the logits in `draws_R`."""


def row_parameters(sequences: list[WorkerSequence], device: torch.device) -> RowParameters:
    """Gather the parameters of rows to sample; only rows that draw need the filters."""
    params = [sequence.new.sampling for sequence in sequences]
    drawn = [row for row, p in enumerate(params) if not p.greedy]

    def column(name: str, neutral: float) -> Tensor | None:
        values = [getattr(params[row], name) for row in drawn]
        if all(value == neutral for value in values):
            return None
        return torch.tensor(values, device=device)[:, None]

    return RowParameters(
        sequence_ids=tuple(sequence.new.sequence_id for sequence in sequences),
        drawn=drawn,
        temperature=column("temperature", 1.0),
        min_p=column("min_p", 0.0),
        top_k=column("top_k", 0),
        top_p=column("top_p", 1.0),
        edited=[row for row, p in enumerate(params) if edits_logits(p)],
        has_logprobs=any(p.logprobs is not None for p in params),
        draws_R=native_draws(sequences),
    )


def native_draws(sequences: list[WorkerSequence]) -> np.ndarray:
    """Return the parameters for the native kernels; a step sets logits and positions."""
    draws_R = np.zeros(len(sequences), DRAW)
    params = [sequence.new.sampling for sequence in sequences]
    draws_R["seed"] = np.array([sequence.new.seed for sequence in sequences], np.uint64)
    draws_R["index"] = [sequence.new.index for sequence in sequences]
    draws_R["temperature"] = [0.0 if p.greedy else p.temperature for p in params]
    draws_R["log_min_p"] = torch.tensor([float(p.min_p) for p in params]).log().numpy()
    draws_R["top_p"] = [p.top_p for p in params]
    draws_R["top_k"] = [p.top_k for p in params]
    return draws_R


def edits_logits(params: SamplingParams) -> bool:
    """Return whether these parameters change logits before temperature and filters."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


class Sampler:
    """Samples one token for each row; caches the parameter tensors while the rows stay the same."""

    def __init__(self, native: NativeSampling | None = None) -> None:
        self._rows: RowParameters | None = None
        self._native = native

    def sample(
        self, logits_RV: Tensor, sequences: list[WorkerSequence], masks: GrammarMasks
    ) -> tuple[list[int], list[list[TokenLogprobs] | None]]:
        """Return the token ids and, where requested, their log-probabilities."""
        ids = tuple(sequence.new.sequence_id for sequence in sequences)
        if self._rows is None or self._rows.sequence_ids != ids:
            self._rows = row_parameters(sequences, logits_RV.device)
        rows = self._rows
        token_ids = None
        if self._native is not None and self._native.can_sample(logits_RV):
            token_ids = choose_natively(self._native, logits_RV, rows, sequences, masks)
        if token_ids is None:
            token_ids = choose(logits_RV, rows, sequences, masks)
        logprobs: list[list[TokenLogprobs] | None] = [None] * len(sequences)
        if rows.has_logprobs:
            for row, sequence in enumerate(sequences):
                count = sequence.new.sampling.logprobs
                if count is not None and token_ids[row] != NO_TOKEN:
                    logprobs[row] = self.logprobs(logits_RV[row, None], [token_ids[row]], count)
        return token_ids, logprobs

    def logprobs(self, logits_RV: Tensor, token_ids: list[int], count: int) -> list[TokenLogprobs]:
        """Return log-probability, rank and `count` likeliest alternatives of each row's token."""
        count = min(count, logits_RV.shape[1])
        native = None
        if self._native is not None and self._native.can_sample(logits_RV):
            native = self._native.logprobs(logits_RV, token_ids, count)
        if native is None:
            return token_logprobs(logits_RV, token_ids, count)
        values, ranks, tops = (array.tolist() for array in native)
        return [
            TokenLogprobs(token_id, own[0], rank, top, own[1:])
            for token_id, own, rank, top in zip(token_ids, values, ranks, tops, strict=True)
        ]


def choose(
    logits_RV: Tensor, rows: RowParameters, sequences: list[WorkerSequence], masks: GrammarMasks
) -> list[int]:
    """Return one token for each row and leave `logits_RV` unchanged: the definition."""
    changed = bool(rows.edited or masks.by_sequence)
    logits_RV = logits_RV.to(torch.float32, copy=changed)
    if changed:
        apply_masks(logits_RV, row_masks(masks, sequences))
        for row in rows.edited:
            edit_row(logits_RV[row], sequences[row])
    chosen_R = logits_RV.argmax(-1)
    if rows.drawn:
        all_drawn = len(rows.drawn) == len(sequences)
        drawn_RV = logits_RV if all_drawn else logits_RV[rows.drawn]
        chosen_R[rows.drawn] = draw(drawn_RV, rows, [sequences[r] for r in rows.drawn])
    if changed:
        chosen_R.masked_fill_(logits_RV.amax(-1) == NEVER, NO_TOKEN)
    chosen: list[int] = chosen_R.tolist()
    return chosen


def choose_natively(
    native: NativeSampling,
    logits_RV: Tensor,
    rows: RowParameters,
    sequences: list[WorkerSequence],
    masks: GrammarMasks,
) -> list[int] | None:
    """Return the tokens of `choose`; None where a row has to be drawn by `choose`.

    Masks are read apart from the logits, so only rows with other edits are copied: a forbidden
    token is -inf before and after an edit.
    """
    vocabulary, draws_R = logits_RV.shape[1], rows.draws_R
    if rows.drawn:
        draws_R["position"] = [len(sequence.generated) for sequence in sequences]
    begin, kind = logits_RV.data_ptr(), TYPES[logits_RV.dtype]
    if rows.logits_place != (begin, kind) or rows.edited:
        step = vocabulary * logits_RV.itemsize
        draws_R["logits"] = range(begin, begin + step * len(sequences), step)
        draws_R["type"], rows.logits_place = kind, (begin, kind)
    edited = [logits_RV[row].to(torch.float32, copy=True) for row in rows.edited]
    for row, logits_V in zip(rows.edited, edited, strict=True):
        edit_row(logits_V, sequences[row])
        draws_R["logits"][row], draws_R["type"][row] = logits_V.data_ptr(), TYPES[torch.float32]
    draws_R["allowed"], mask_bytes = 0, 0
    by_row = row_masks(masks, sequences)
    if by_row:
        packed = np.frombuffer(b"".join(by_row.values()), np.uint8)
        mask_bytes = packed.nbytes // len(by_row)
        for place, row in enumerate(by_row):
            draws_R["allowed"][row] = packed.ctypes.data + place * mask_bytes
    return native.sample(draws_R, vocabulary, mask_bytes)


def row_masks(masks: GrammarMasks, sequences: list[WorkerSequence]) -> dict[int, bytes]:
    """Return the mask of each row that has one; draft rows beyond the last mask allow no token."""
    if not masks.by_sequence:
        return {}
    by_row: dict[int, bytes] = {}
    for row, sequence in enumerate(sequences):
        own = masks.by_sequence.get(sequence.new.sequence_id)
        if own is not None:
            at = sequence.mask
            by_row[row] = own[at] if at < len(own) else bytes(len(own[0]))
    return by_row


def apply_masks(logits_RV: Tensor, by_row: dict[int, bytes]) -> None:
    """Set the logits of forbidden tokens to -inf; bit t of little-endian words allows token t."""
    rows = list(by_row)
    if not rows:
        return
    packed = np.frombuffer(b"".join(by_row.values()), np.uint8)
    bits = np.unpackbits(~packed.reshape(len(rows), -1), axis=1, bitorder="little")
    width = min(bits.shape[1], logits_RV.shape[1])
    forbidden_RV = torch.from_numpy(bits.view(np.bool_)).to(logits_RV.device)[:, :width]
    if len(rows) == len(logits_RV):
        logits_RV[:, :width].masked_fill_(forbidden_RV, NEVER)
        logits_RV[:, width:] = NEVER
        return
    masked_RV = logits_RV[rows]
    masked_RV[:, :width].masked_fill_(forbidden_RV, NEVER)
    masked_RV[:, width:] = NEVER
    logits_RV[rows] = masked_RV


def edit_row(logits_V: Tensor, sequence: WorkerSequence) -> None:
    """Apply allowed tokens, bias, min_tokens and penalties to one row, in place."""
    params = sequence.new.sampling
    device = logits_V.device
    if params.allowed_token_ids:
        token_ids = torch.tensor(params.allowed_token_ids, device=device)
        allowed = logits_V[token_ids].clone()
        logits_V.fill_(NEVER)
        logits_V[token_ids] = allowed
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=device)
        logits_V[biased] += torch.tensor(list(params.logit_bias.values()), device=device)
    if params.min_tokens > len(sequence.generated) and sequence.new.stop_ids:
        logits_V[torch.tensor(sequence.new.stop_ids, device=device)] = NEVER
    penalize(logits_V, sequence)


def penalize(logits_V: Tensor, sequence: WorkerSequence) -> None:
    """Apply the penalties of one row, in place.

    The repetition penalty counts prompt and answer: positive logits are divided, negative ones
    multiplied. Then frequency · count and presence of the answer are subtracted.
    """
    params, new = sequence.new.sampling, sequence.new
    device = logits_V.device
    if params.repetition_penalty != 1.0:
        prompt = new.token_ids[: new.num_prompt_tokens]
        token_ids = torch.tensor(sorted({*prompt, *sequence.generated}), device=device)
        values = logits_V[token_ids]
        factor = params.repetition_penalty
        logits_V[token_ids] = torch.where(values > 0, values / factor, values * factor)
    if sequence.generated and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(np.array(sequence.generated), return_counts=True)
        amounts = params.frequency_penalty * counts + params.presence_penalty
        at = torch.from_numpy(ids).to(device)
        logits_V[at] -= torch.from_numpy(amounts.astype(np.float32)).to(device)


def draw(logits_RV: Tensor, rows: RowParameters, sequences: list[WorkerSequence]) -> Tensor:
    """Draw one token for each row by the inverse of the filtered cumulative distribution."""
    if rows.temperature is not None:
        logits_RV = logits_RV / rows.temperature
    logits_RV = keep_likely(logits_RV, rows)
    cumulative_RV = logits_RV.double().softmax(-1).cumsum(-1)
    u_R1 = torch.from_numpy(
        uniforms(
            np.array([sequence.new.seed for sequence in sequences], np.uint64),
            np.array([sequence.new.index for sequence in sequences]),
            np.array([len(sequence.generated) for sequence in sequences]),
        )
    )[:, None].to(logits_RV.device)
    target_R1 = u_R1 * cumulative_RV[:, -1:]
    return torch.searchsorted(cumulative_RV, target_R1, right=True)[:, 0].clamp_(
        max=logits_RV.shape[1] - 1
    )


def keep_likely(logits_RV: Tensor, rows: RowParameters) -> Tensor:
    """Apply min_p, then top_k, then top_p; ties at the threshold all stay."""
    if rows.min_p is not None:
        floor_R1 = logits_RV.amax(-1, keepdim=True) + rows.min_p.log()
        logits_RV = logits_RV.masked_fill(logits_RV < floor_R1, NEVER)
    if rows.top_k is not None:
        vocabulary = logits_RV.shape[1]
        k_R1 = torch.where(rows.top_k > 0, rows.top_k, vocabulary).clamp(max=vocabulary)
        if bool((k_R1 < vocabulary).any()):
            largest = int(k_R1[k_R1 < vocabulary].max())
            top_RK = logits_RV.topk(largest, -1).values
            at_R1 = (k_R1 - 1).clamp(max=largest - 1)
            floor_R1 = top_RK.gather(1, at_R1).masked_fill(k_R1 >= vocabulary, NEVER)
            logits_RV = logits_RV.masked_fill(logits_RV < floor_R1, NEVER)
    if rows.top_p is not None:
        floor_R1 = top_p_floor(logits_RV, rows.top_p)
        logits_RV = logits_RV.masked_fill(logits_RV < floor_R1, NEVER)
    return logits_RV


def top_p_floor(logits_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """Return the least logit of the smallest set of tokens with a mass of at least top_p.

    The TOP_P_CANDIDATES likeliest tokens nearly always hold that mass; only otherwise are all
    tokens sorted. A row with top_p 1 has no floor, whatever the other rows have.
    """
    whole_R1 = top_p_R1 >= 1
    total_R1 = torch.logsumexp(logits_RV.double(), -1, keepdim=True)
    for count in (min(TOP_P_CANDIDATES, logits_RV.shape[1]), logits_RV.shape[1]):
        top_RK = logits_RV.topk(count, -1).values
        mass_RK = (top_RK.double() - total_R1).exp().cumsum(-1)
        enough_R1 = whole_R1 | (mass_RK[:, -1:] >= top_p_R1)
        if bool(enough_R1.all()) or count == logits_RV.shape[1]:
            break
    at_R1 = (mass_RK < top_p_R1).sum(-1, keepdim=True).clamp(max=count - 1)
    return top_RK.gather(1, at_R1).masked_fill(whole_R1, NEVER)


def token_logprobs(logits_RV: Tensor, token_ids: list[int], count: int) -> list[TokenLogprobs]:
    """Return log-probability, rank and `count` likeliest alternatives of each row's token."""
    logits_RV = logits_RV.float()
    chosen_R1 = torch.tensor(token_ids, device=logits_RV.device)[:, None]
    total_R1 = torch.logsumexp(logits_RV, -1, keepdim=True)
    value_R1 = logits_RV.gather(1, chosen_R1)
    ranks = ((logits_RV > value_R1).sum(-1) + 1).tolist()
    values = (value_R1 - total_R1)[:, 0].tolist()
    top = logits_RV.topk(min(count, logits_RV.shape[1]), -1)
    top_ids, top_values = top.indices.tolist(), (top.values - total_R1).tolist()
    return [
        TokenLogprobs(token_ids[row], values[row], ranks[row], top_ids[row], top_values[row])
        for row in range(len(token_ids))
    ]
