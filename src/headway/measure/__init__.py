"""How it is measured from outside: the load generator, workloads from real traffic, reports."""
