"""Simulation of the real scheduler on a virtual clock.

Engine, KV cache, policies, admission and cost model are the server's own objects. Simulated is what
surrounds them: the real time of a step (`truth`), an executor that moves the clock instead of
computing (`executor`), the host's work for a request (`front`), arrivals and clients (`loop`), and
the load generator's own report of the result (`outcome`).
"""
