"""The room that computes: models, kernels, KV memory, sampling, behind `core.plan.Executor`.

Here lives everything that touches tensors: `executor`, `models`, `attention`, `kernels`, `native`
(C++ called from Python), `sampler`, checkpoints and their loading.
It decides nothing: what to compute is stated by the plan that it is given.
"""
