"""What happened: step records, request timelines, metrics, goodput, verdicts.

Here lives everything that is counted and how it is added up: `records`, `timeline`, `registry` (the
table of metrics), `live`, `summary`, `verdict`. `/stats`, `/metrics` and `/trace` are made from it.
It imports core alone. It decides nothing and serves nothing: who asks reads it.
"""
