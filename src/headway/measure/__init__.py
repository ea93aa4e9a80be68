"""How it is measured from outside: the load generator.

Here lives `headway bench`: workloads, arrivals, reports.
It imports core and telemetry. It reaches a server by HTTP alone, so any server can be measured.
"""
