"""Observability of one model: request timelines, metrics, windows, goodput, verdicts.

`live` receives step records and requests; `timeline` keeps the timestamps of a request, `windows`
the sums of each second, `registry` the table of metrics. `summary` and `verdict` derive the figures
of a window; `stats`, `trace` and `calibration` make the answers of `/stats`, `/trace` and
`/calibration` from them. This room only measures: it makes no decision and serves no HTTP.
"""
