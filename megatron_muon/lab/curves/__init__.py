"""Loss curves of runs: read from logs of any kind, compared by the steps that runs
need.
"""
