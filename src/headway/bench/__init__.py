"""The load generator of `headway bench`: how fast a server is for its users.

It holds workloads, arrivals, runs, searches for a rate, reports and their tables and pages. It
reaches a server by HTTP alone (`measure.client`), so any OpenAI-compatible server can be measured.
It imports core, config, perf, measure and the formulas of telemetry; never the engine or the
server.
"""
