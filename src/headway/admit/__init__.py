"""Who is let in, and how long it will wait: decided without a word to the engine.

Here live admission's rules, the forecast of the queue before an engine, and what the engine's
policies and the forecast have to agree on (`queue`). It knows no HTTP, so that a simulation can
decide by the same code.
It imports core, telemetry and of edge the keys and rates. It never imports the engine.
"""
