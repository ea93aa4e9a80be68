"""How fast a server is, as its users see it: the load generator of `headway bench`.

Here live workloads, arrivals, runs, searches for a rate, reports and their tables and pages.
It reaches a server by HTTP alone (`measure.client`), so any OpenAI-compatible server will do.
It imports core, measure and of telemetry the formulas; never the engine or the server.
"""
