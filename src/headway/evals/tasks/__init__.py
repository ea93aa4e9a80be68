"""Standard tasks: questions whose data is at hand in a folder, and files of the user's own.

A task is questions that a model answers greedily, or choices of which it takes the likeliest. It is
given a `core.scoring.Model`, and promises every item with its reply.
"""
