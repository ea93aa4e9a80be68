"""Decisions of the engine: sequences, KV blocks, scheduling policies, grammars, and its process.

The room has the step (schedule, run, update) and the loop of the engine's process. The model is
behind `core.plan.Executor`; the clients of the process are in `frontend`. It imports core and
telemetry, and never torch or the runtime; it knows no HTTP.
"""
