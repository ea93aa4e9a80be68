"""The one model of performance: what a step takes, what a byte costs, what the host adds.

Here lives `StepModel`, which the engine teaches with every step, the filter behind it, the rates of
tiers and slots, the roofline that the model begins with, and the CPU time of a request outside the
engine. Engine, server, telemetry, admission, doctor, planner and simulator read it.
It imports core alone, and never torch.
"""
