"""HTTP: three dialects over engine clients, with keys, limits, errors and streams.

Here lives what turns a body into a request and deltas into bytes: `openai`, `responses`,
`anthropic`, the live page.
It imports core, telemetry, admit, engine, frontend, edge and batches. It never imports torch: the
model is in another process.
"""
