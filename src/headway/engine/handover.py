"""Handover of sequences between engines: from the engine that prefills to the one that decodes.

The prefilling side calls `offer` after `Engine.add`: full blocks are exported while the next chunk
is computed. `hand_over` removes the request and returns its state as a parcel; `take_due` does so
for all that have sampled a token since they were offered. The decoding side calls `take_over` with
the parcel and with the request as its own server knows it: the blocks are restored as from any
lower tier, into blocks that are allocated first. A parcel that does not fit is refused by name, and
the request is computed here.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.core.errors import RequestError
from headway.core.parcel import (
    VERSION,
    Parcel,
    ParcelError,
    decode_parcel,
    encode,
    peer_of,
)
from headway.core.request import Request
from headway.engine.admission import scaled_len
from headway.engine.build import add_tiers
from headway.engine.chain import Chain, root_key
from headway.engine.engine import Engine, ResumedTokens
from headway.engine.kv.cache import KVCache
from headway.engine.kv.peer import PeerTier
from headway.engine.kv.prefix import first_visible
from headway.engine.sequence import Sequence

MAX_PARCEL_IDS = 4096
"""Number of parcel ids to remember, so that none is accepted twice."""


@dataclass(slots=True)
class Handover:
    """Both sides of the handover of `engine`, whose blocks other engines fetch at `address`.

    A parcel with another `fingerprint` is refused. `release` is called with the id of a parcel
    whose blocks are no longer fetched. It needs a prefix cache.
    """

    engine: Engine
    fingerprint: bytes
    address: str
    release: Callable[[bytes], None] = lambda parcel_id: None
    _due: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """Request id → its parcel id, and its generated tokens when it was offered."""
    _given: dict[int, bytes] = field(default_factory=dict)
    """Request id → its parcel id after the handover, until it is dropped; oldest first."""
    _parcel_ids: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        if self.engine.kv.tiers is None:
            add_tiers(self.engine)

    # ── prefilling side ─────────────────────────────────────────────────────────────────────

    def offer(self, request_id: int) -> None:
        """Start the export of a request that was just added.

        Raises RequestError for one with several answers, which share blocks.
        """
        for sequence in self.engine.sequences_of(request_id):
            if sequence.request.sampling.n > 1:
                raise RequestError("A request with several answers is not handed over.", param="n")
            sequence.parcel_id = secrets.token_bytes(16)
            self._due[request_id] = sequence.parcel_id, sequence.num_generated

    def take_due(self) -> list[tuple[int, bytes]]:
        """Return (request id, parcel) of each request that sampled a token since its offer.

        Exported blocks of ended requests are released.
        """
        parcels = []
        for request_id, (parcel_id, known) in list(self._due.items()):
            sequences = self.engine.sequences_of(request_id)
            if not sequences:
                del self._due[request_id]
                self.release(parcel_id)
            elif sequences[0].num_generated > known:
                parcels.append((request_id, self.hand_over(request_id)))
        return parcels

    def hand_over(self, request_id: int) -> bytes:
        """Abort an offered request and return its parcel.

        The last of its blocks are exported with the next step. Raises RequestError if it ended.
        """
        for sequence in self.engine.sequences_of(request_id):
            if sequence.parcel_id:
                frame = encode(self._parcel_of(sequence))
                self.engine.abort(request_id)
                self._due.pop(request_id, None)
                self._given[request_id] = sequence.parcel_id
                if len(self._given) > MAX_PARCEL_IDS:
                    del self._given[next(iter(self._given))]
                return frame
        raise RequestError("There is no such request to hand over.", param="request_id")

    def drop(self, request_id: int) -> None:
        """Release the exported blocks of a request that was handed over."""
        parcel_id = self._given.pop(request_id, None)
        if parcel_id is not None:
            self.release(parcel_id)

    def _parcel_of(self, sequence: Sequence) -> Parcel:
        kv, request = self.engine.kv, sequence.request
        end = sequence.num_exported
        first_tokens = [first_visible(end * kv.block_size, window) for window in kv.windows]
        return Parcel(
            version=VERSION,
            parcel_id=sequence.parcel_id,
            address=self.address,
            fingerprint=self.fingerprint,
            root=sequence.root,
            request=request,
            index=sequence.index,
            seed=sequence.seed,
            tokens=sequence.tokens,
            computed=sequence.computed,
            groups=[(first // kv.block_size, end) for first in first_tokens],
        )

    # ── decoding side ───────────────────────────────────────────────────────────────────────

    def take_over(self, request: Request, frame: bytes, resumed: ResumedTokens = ()) -> str:
        """Continue `request` from the parcel `frame`; returns why it is refused, or "".

        A refused request is computed here, after its known tokens (`Engine.add`).
        """
        try:
            parcel = decode_parcel(frame)
            self._check(parcel, request, resumed)
        except ParcelError as error:
            self.engine.add(request, resumed)
            return error.name
        self._parcel_ids[parcel.parcel_id] = None
        while len(self._parcel_ids) > MAX_PARCEL_IDS:
            self._parcel_ids.popitem(last=False)
        self.engine.add(request, [parcel.tokens[len(request.prompt_token_ids) :]])
        for sequence in self.engine.sequences_of(request.request_id):
            sequence.seed = parcel.seed
            sequence.source = self._source_of(parcel)
        return ""

    def _source_of(self, parcel: Parcel) -> PeerTier:
        chain = Chain(parcel.tokens, parcel.root, self.engine.kv.block_size)
        held = [{chain.key(at) for at in range(first, end)} for first, end in parcel.groups]
        tiers = self.engine.kv.tiers
        assert tiers is not None
        peer = peer_of(parcel.address, parcel.parcel_id)
        return PeerTier(peer, held, tiers.engine_rate)

    def _root_of(self, request: Request) -> bytes:
        """Return the root key of the request's chain in this engine."""
        scaled = scaled_len(request, self.engine.settings)
        return root_key(request.principal.cache_salt, request.adapter, scaled)

    def _check(self, parcel: Parcel, request: Request, resumed: ResumedTokens) -> None:
        """Raise ParcelError if the parcel does not fit the request, its answer, or the engine."""
        kv, prompt = self.engine.kv, request.prompt_token_ids
        faults = {
            "fingerprint": parcel.fingerprint != self.fingerprint,
            "salt": parcel.root != self._root_of(request),
            "request": not is_same_question(parcel.request, request),
            "tokens": parcel.tokens[: len(prompt)] != prompt
            or (resumed and parcel.tokens[len(prompt) :] != resumed[0])
            or not 0 <= parcel.computed <= len(parcel.tokens) < self.engine.settings.max_model_len
            or not all(0 <= token < self.engine.vocab_size for token in parcel.tokens),
            "group": len(parcel.groups) != len(kv.pools),
            "blocks": has_too_many(parcel, kv),
            "replayed": parcel.parcel_id in self._parcel_ids,
        }
        for name, is_so in faults.items():
            if is_so:
                raise ParcelError(name)


def is_same_question(one: Request, other: Request) -> bool:
    """Return whether two requests have equal prompt, sampling, grammar and adapter."""
    return (one.prompt_token_ids, one.sampling, one.adapter) == (
        other.prompt_token_ids,
        other.sampling,
        other.adapter,
    )


def has_too_many(parcel: Parcel, kv: KVCache) -> bool:
    """Return whether the parcel names blocks beyond its computed tokens."""
    most = parcel.computed // kv.block_size
    return not all(0 <= first <= end <= most for first, end in parcel.groups)
