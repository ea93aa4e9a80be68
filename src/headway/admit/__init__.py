"""Admission, and the forecast of how long a request waits: decided without a message to the engine.

The room has the rules of admission, the forecast of the queue before an engine, and what the
engine's policies and the forecast have to agree on (`queue`). It knows no HTTP, so a simulation
decides by the same code.
It imports core, telemetry and of edge the keys and rates. It never imports the engine.
"""
