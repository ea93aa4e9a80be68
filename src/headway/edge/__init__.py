"""Shared parts of every HTTP process, whatever it serves.

They are connections and their limits, keys and rates, errors in the form clients expect, event
streams, requests to other servers, the database file, systemd, and the end of a process in time.
The room has no endpoint and no engine. It imports core.
"""
