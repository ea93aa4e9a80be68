"""How many engines the traffic of late asks for, at the pace that is promised.

Not how busy they are: an engine with one answer is in steps all the time. It is what prompts took,
and the tokens of answers over those that an engine makes with as many rows as the pace allows, by
the snapshot of its cost model. Worked example, decode steps of 8 ms and 0.1 ms a row, 20 ms
promised:

    prompts took 0.9 s of each second               0.9 engines
    3,000 tokens/s, 120 rows an engine at 20 ms     3,000 x 0.020 / 120 = 0.5 engines
"""

from bisect import bisect_right
from collections.abc import Callable

from headway.core.clock import Clock
from headway.core.records import StepRecord
from headway.core.service import ServiceClass
from headway.core.slo import DEFAULT_CLASS
from headway.perf.model import StepModel, Work

HALF_LIFE_S = 20.0
MOST_ROWS = 4096
USUAL_TPOT_S = 0.1
"""The pace of answers where the default class promises none."""


def promised_s(classes: dict[str, ServiceClass]) -> float:
    """The seconds a token that answers of the default class may take."""
    return classes[DEFAULT_CLASS].slo.tpot_s or USUAL_TPOT_S


class Demand:
    """How many engines the traffic of late asks for, by what they would do."""

    def __init__(self, clock: Clock, tpot_s: Callable[[], float]) -> None:
        self._clock, self._tpot_s = clock, tpot_s
        self._attended = self._read = 0.0
        """Of each row, in the last step that only decoded."""
        self._prefill_s = self._decode_s = self._span_s = 0.0
        self._at_s = clock.now_s()
        self._rows_by: tuple[StepModel | None, float] = None, 0.0
        self._rows = 0

    def on_record(self, record: StepRecord, model: StepModel | None) -> None:
        """An engine has made a step; `model` is what its cost model had learned, where known."""
        rows, tpot_s = record.num_decode_tokens, self._tpot_s()
        if rows and not record.num_prefill_tokens:
            self._attended = record.attended_tokens / rows
            self._read = sum(record.kv_tokens_read) / rows
        self._pass()
        prefill_s = decode_s = 0.0
        if record.num_prefill_tokens:
            decodes_s = model.seconds(self._decodes(rows)) if model and rows else 0.0
            prefill_s = max(record.duration_s - decodes_s, 0.0)
        if rows:
            decode_s = rows * tpot_s / self._rows_at(model, tpot_s)
        self._prefill_s += prefill_s
        self._decode_s += decode_s

    def _decodes(self, rows: int) -> Work:
        """Return the work of a step that decodes so many rows of the present contexts."""
        return Work(rows, rows, round(rows * self._attended), round(rows * self._read))

    def _rows_at(self, model: StepModel | None, tpot_s: float) -> int:
        """Return how many rows a step may have that is to take `tpot_s`, at least one.

        They are counted once for each snapshot of the model.
        """
        if model is None:
            return MOST_ROWS
        if self._rows_by != (model, tpot_s):
            rows = range(1, MOST_ROWS + 1)
            count = bisect_right(rows, tpot_s, key=lambda n: model.seconds(self._decodes(n)))
            self._rows, self._rows_by = max(count, 1), (model, tpot_s)
        return self._rows

    def _pass(self) -> None:
        """Time has passed: what was asked before counts for less."""
        passed_s = max(self._clock.now_s() - self._at_s, 0.0)
        keep = 0.5 ** (passed_s / HALF_LIFE_S)
        self._at_s += passed_s
        self._prefill_s, self._decode_s = keep * self._prefill_s, keep * self._decode_s
        self._span_s = keep * self._span_s + passed_s

    @property
    def asked(self) -> tuple[float, float]:
        """(engines for prompts, engines for answers); zeros before any time has passed."""
        self._pass()
        if not self._span_s:
            return 0.0, 0.0
        return self._prefill_s / self._span_s, self._decode_s / self._span_s
