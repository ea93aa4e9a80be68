"""How many engines the traffic of late asks for, at the pace that is promised.

Not how busy they are: an engine with one answer is in steps all the time. From the steps that
engines tell: what prompts took, and the tokens of answers over those that an engine makes with as
many rows as the pace allows. Worked example, decode steps of 8 ms and 0.1 ms a row, 20 ms promised:

    prompts took 0.9 s of each second               0.9 engines
    3,000 tokens/s, 120 rows an engine at 20 ms     3,000 x 0.020 / 120 = 0.5 engines
"""

from collections.abc import Callable

from headway.core.clock import Clock
from headway.core.records import StepRecord
from headway.core.service import ServiceClass
from headway.core.slo import DEFAULT_CLASS

HALF_LIFE_S = 20.0
ROW_SHARE = 0.2
"""Of a decode step, what grows with its rows, until steps of different numbers were seen."""
MOST_ROWS = 4096
USUAL_TPOT_S = 0.1
"""The pace of answers where the default class promises none."""


def promised_s(classes: dict[str, ServiceClass]) -> float:
    """The seconds a token that answers of the default class may take."""
    return classes[DEFAULT_CLASS].slo.tpot_s or USUAL_TPOT_S


class DecodeSteps:
    """Seconds of a step that only decodes, by its rows: a line through those of late."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        keep = 0.5 ** (seconds / HALF_LIFE_S)
        self._weight = keep * self._weight + 1
        self._rows = keep * self._rows + rows
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + rows * rows
        self._products = keep * self._products + rows * seconds

    @property
    def line(self) -> tuple[float, float]:
        """(seconds of any step, seconds of each row)."""
        if not self._weight:
            return 0.0, 0.0
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - rows * rows
        row_s = ROW_SHARE * seconds / rows
        if spread > 0.25:
            row_s = (self._products / self._weight - rows * seconds) / spread
            row_s = min(max(row_s, 0.01 * seconds / rows), seconds / rows)
        return seconds - row_s * rows, row_s

    def seconds(self, rows: int) -> float:
        """What so many rows take; 0 before any step was seen, and without rows."""
        any_s, row_s = self.line
        return any_s + rows * row_s if rows else 0.0

    def rows_at(self, tpot_s: float) -> float:
        """How many rows a step may have that is to take `tpot_s`, at least one."""
        any_s, row_s = self.line
        return min(max((tpot_s - any_s) / row_s, 1.0), MOST_ROWS) if row_s else MOST_ROWS


class Demand:
    """How many engines the traffic of late asks for, by what they would do."""

    def __init__(self, clock: Clock, tpot_s: Callable[[], float]) -> None:
        self._clock, self._tpot_s = clock, tpot_s
        self._decodes = DecodeSteps()
        self._prefill_s = self._decode_s = self._span_s = 0.0
        self._at_s = clock.now_s()

    def on_record(self, record: StepRecord) -> None:
        """An engine has made a step."""
        rows = record.num_decode_tokens
        if rows and not record.num_prefill_tokens:
            self._decodes.observe(rows, record.duration_s)
        self._pass()
        prefill_s = decode_s = 0.0
        if record.num_prefill_tokens:
            prefill_s = max(record.duration_s - self._decodes.seconds(rows), 0.0)
        if rows:
            tpot_s = self._tpot_s()
            decode_s = rows * tpot_s / self._decodes.rows_at(tpot_s)
        self._prefill_s += prefill_s
        self._decode_s += decode_s

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
