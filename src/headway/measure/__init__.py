"""What measuring from outside has in common: the HTTP client, saved reports, charts and pages.

`bench` (how fast) and `evals` (how good) stand on it; what only one of them needs is theirs.
It reaches a server by HTTP alone, so any OpenAI-compatible server can be measured.
It imports core.
"""
