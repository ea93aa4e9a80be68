"""The room that computes: models, kernels, KV memory, sampling, behind `core.plan.Executor`."""
