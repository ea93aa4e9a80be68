"""HTTP server: three API dialects over engine clients, with keys, limits, errors and streams.

The room turns a body into a request and deltas into bytes: `openai`, `responses`, `anthropic`, and
the live page.
It imports core, telemetry, admit, engine, frontend, edge and batches. It never imports torch: the
model is in another process.
"""
