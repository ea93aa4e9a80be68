"""What any HTTP process of ours does at its edge, whatever it serves behind it.

Here live connections and their limits, keys and rates, errors as clients expect them, event
streams, asking another server, the database file, systemd, and the end of a process in time.
It knows no endpoint and no engine. It imports core.
"""
