"""Names of `perf.model` for the policies."""

from headway.perf.model import LEAST_CHUNK, NOTHING, StepModel, Work, work_of

StepCost = StepModel

__all__ = ["LEAST_CHUNK", "NOTHING", "StepCost", "Work", "work_of"]
