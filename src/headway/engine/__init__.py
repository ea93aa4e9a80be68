"""The room that decides: sequences, KV blocks, scheduling policies, grammars, text.

Here lives the step (schedule, run, update), what it needs to know, and the client by which the
server's process talks to the engine's. The model is behind `core.plan.Executor`.
It imports core and telemetry. It never imports torch or the runtime, and it knows no HTTP.
"""
