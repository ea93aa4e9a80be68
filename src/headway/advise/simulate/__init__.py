"""The scheduler that serves, on a clock that does not wait.

Engine, KV cache, policies, admission and cost model are the server's own objects. What is here is
everything around them: how long a step really takes (`truth`), an executor that moves the clock
instead of computing (`executor`), what the host adds (`front`), who arrives (`loop`), and the load
generator's own report of what became of it (`outcome`).
"""
