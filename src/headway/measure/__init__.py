"""How it is measured from outside: the load generator, and the evaluations of answers.

Here lives `headway bench` (workloads, arrivals, reports), `headway eval` (`evals`) and the twelve
skills (`skills`) that the embedded models are trained and asked with.
It imports core and telemetry. It reaches a server by HTTP alone, so any server can be measured.
"""
