"""The time of a step on stated hardware: plain numbers, from the plan that a run
makes.
"""
