"""The room that decides: sequences, KV blocks, scheduling policies, grammars.

Here lives the step (schedule, run, update), what it needs to know, and the loop of the engine's
process. The model is behind `core.plan.Executor`; the clients of the process are in `frontend`.
It imports core and telemetry. It never imports torch or the runtime, and it knows no HTTP.
"""
