"""The common part of measuring from outside: the HTTP client, saved reports, charts and pages.

`bench` (how fast) and `evals` (how good) use it; what only one of them needs is in its own room. It
reaches a server by HTTP alone, so any OpenAI-compatible server can be measured. It imports core.
"""
