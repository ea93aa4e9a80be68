"""Standard tasks whose data is in a folder, and tasks in files of the user's own.

A task has questions, which the model answers greedily, or multiple choices, of which the one with
the highest log-likelihood counts as its answer.
"""
