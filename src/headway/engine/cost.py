"""Names of `perf.model` for the policies."""

from headway.perf.model import MIN_CHUNK_TOKENS, NOTHING, StepModel, Work, work_of

StepCost = StepModel
LEAST_CHUNK = MIN_CHUNK_TOKENS

__all__ = ["LEAST_CHUNK", "NOTHING", "StepCost", "Work", "work_of"]
