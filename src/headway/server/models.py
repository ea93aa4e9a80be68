"""The table of served models: names, the client of the engines, and defaults.

A client is an engine, wherever it runs; several names of one model are keys of one row. The server
asks this table for everything that depends on the model.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headway.admit.admission import Admission, Rules
from headway.config.options import ServerOptions
from headway.core.clock import Clock, SystemClock
from headway.core.errors import RequestError
from headway.core.records import StepRecord
from headway.core.service import BATCH_CLASS, ServiceClass, choose_class
from headway.edge.keys import Caller, Keyring
from headway.edge.upstream import FallbackUpstream
from headway.engine.messages import Ready
from headway.frontend.client import EngineClient, not_ready
from headway.frontend.shorten.scorer import Scorer
from headway.frontend.text import Tokenizer
from headway.frontend.text.output_parser import ReasoningMarkers, choose_reasoning_markers
from headway.frontend.text.tools import BY_NAME, ToolFormat, choose_format
from headway.server.responses.store import ResponseStore
from headway.server.tokenizer_pool import TokenizerPool
from headway.telemetry.live import Introduction, Telemetry
from headway.telemetry.tasks import MachineTime, Retries, Tasks
from headway.telemetry.traffic import Origin


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """One model; `defaults` are the sampling parameters of its generation_config.json.

    `format` and `reasoning` are the formats of tool calls and reasoning in its answers, if any.
    """

    names: list[str]
    client: EngineClient
    tokenizer: Tokenizer | None
    telemetry: Telemetry
    defaults: dict[str, Any] = field(default_factory=dict)
    created: int = 0
    format: ToolFormat | None = None
    reasoning: ReasoningMarkers | None = None
    rules: Rules = Rules()
    num_engines: int = 1
    scorer: Scorer | None = None
    """Scores the units that `context` may cut; None without a draft model."""
    request_ids: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    """Ids of the next prompts in the engine."""
    machine_time: MachineTime = field(default_factory=MachineTime)
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(self.telemetry.clock, self.rules, self.num_engines)
        queues = self.admission.queues
        self.telemetry.on_record = self._on_record
        self.telemetry.on_engine_death = queues.on_engine_down
        self.telemetry.on_engine_ready = self._on_engine_ready
        if self.telemetry.ready is not None:
            self._on_engine_ready(0, self.telemetry.ready)

    def _on_record(self, record: StepRecord) -> None:
        self.admission.queues.on_record(record)
        self.machine_time.add(record)

    def _on_engine_ready(self, engine: int, ready: Introduction) -> None:
        """Reset the prefixes of an engine that has started, at the size of its KV blocks."""
        self.admission.queues.on_engine_ready(engine, max(ready.group_blocks) * ready.block_size)

    def origin(self) -> Origin | None:
        """Return the settings for a simulation; None before the engine is ready."""
        ready = self.telemetry.ready
        if ready is None or ready.plan is None:
            return None
        return Origin(
            spec=self.telemetry.spec,
            settings=ready.plan,
            classes=self.telemetry.classes,
            replicas=self.num_engines,
            max_queue=self.rules.max_queue,
            max_queue_wait_s=self.rules.max_queue_wait_s,
        )

    def info(self) -> Ready:
        """Return what the engine serves; raises EngineDownError while it loads or restarts."""
        if not self.client.ready or self.client.info is None:
            raise not_ready(self.client.status)
        return self.client.info

    def service_class(self, body: Any, caller: Caller) -> ServiceClass:
        """Return the class of `body`, else of its key, else the default; raises RequestError."""
        chosen = choose_class(
            self.telemetry.classes,
            body.service_class,
            body.service_tier,
            default=caller.service_class,
        )
        if caller.may_use(chosen.name):
            return chosen
        by_tier = body.service_class is None and body.service_tier
        named = "service_tier" if by_tier else "service_class"
        subject = "Batches of this key" if caller.in_batch else "This key"
        raise RequestError(
            f"{subject} may not use the class {chosen.name!r}. Leave {named} out, or let the "
            "operator name the class under `classes` in the key's row.",
            param=named,
            code="permission_denied",
            status=403,
        )

    @property
    def accepts(self) -> list[str]:
        """Kinds of prompts: ids always, text with a tokenizer, messages with a chat template."""
        if self.tokenizer is None:
            return ["token_ids"]
        chats = ["messages"] if self.tokenizer.template else []
        return [*chats, "text", "token_ids"]

    def needs_tokenizer(self, param: str) -> Tokenizer:
        """Return the tokenizer; RequestError on `param` where the server runs without one."""
        if self.tokenizer is None:
            raise RequestError(
                "This server runs without a tokenizer; send token ids to /v1/completions.",
                param=param,
                code="no_tokenizer",
            )
        return self.tokenizer


@dataclass(slots=True, kw_only=True)
class ServerState:
    """State of the server process, passed to every handler."""

    models: dict[str, ServedModel]
    options: ServerOptions
    clock: Clock = field(default_factory=SystemClock)
    fingerprint: str = ""
    keyring: Keyring = field(default_factory=Keyring)
    upstream: FallbackUpstream | None = None
    """Server that answers requests refused here for load; without one `fallback_model` does."""
    fallback_model: str = ""
    pool: TokenizerPool = field(default_factory=TokenizerPool)
    log_stats: bool = False
    """Whether the totals are logged once a minute."""
    tasks: Tasks = field(default_factory=Tasks)
    retries: Retries = field(default_factory=Retries)
    responses: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.options.response_memory)

    @property
    def unnamed(self) -> str | None:
        """Name of the model of a request without one: the only one served, without the fallback."""
        rows = [row for row in self.rows if self.fallback_model not in row.names]
        return rows[0].names[0] if len(rows) == 1 else None

    def name(self, given: str | None) -> str:
        """Return the given name, or that of the only model; RequestError where there are more."""
        name = self.unnamed if given is None else given
        if name is not None:
            return name
        raise RequestError(
            f"The field model is required; there is {', '.join(self.models)}.",
            param="model",
            code="missing_required_parameter",
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that a request may give."""
        return tuple(self.models)

    @property
    def batch_price(self) -> float:
        """Price of a token of the batch class, relative to others."""
        return self.rows[0].telemetry.classes[BATCH_CLASS].price

    def takes_lines(self, model: str) -> bool:
        """Whether lines of a batch for this model may run now."""
        return self.models[model].client.ready

    def num_at_once(self, model: str) -> int:
        """Return the number of slots of the model's engines; 1 before an engine is ready."""
        info = self.models[model].client.info
        return info.max_num_seqs * self.models[model].num_engines if info else 1

    def model(self, given: str | None) -> ServedModel:
        """Return the row of a name; RequestError 404 without one."""
        name = self.name(given)
        model = self.models.get(name)
        if model is None:
            raise RequestError(
                f"The model {name[:200]!r} does not exist; there is {', '.join(self.models)}.",
                param="model",
                code="model_not_found",
                status=404,
            )
        return model

    def named_or_first(self, name: str | None) -> ServedModel:
        """Return the named model; without a name the first."""
        return self.model(name if name is not None else next(iter(self.models)))

    def falls_back(self, given: str | None) -> bool:
        """Whether a fallback answers for this model when it is full."""
        if self.upstream is not None:
            return True
        second = self.models.get(self.fallback_model)
        return second is not None and second is not self.models.get(self.name(given))

    @property
    def rows(self) -> list[ServedModel]:
        """Each served model once."""
        return list({id(model): model for model in self.models.values()}.values())


def answer_formats(
    tokenizer: Tokenizer | None, parser: str
) -> tuple[ToolFormat | None, ReasoningMarkers | None]:
    """Return the formats of calls and reasoning, by `parser` or by the chat template."""
    if tokenizer is None or tokenizer.template is None:
        return None, None
    source = tokenizer.template.source
    return BY_NAME.get(parser) or choose_format(source), choose_reasoning_markers(source)
