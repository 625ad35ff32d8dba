"""Rounds of the exchange: which parameters go together, by which time, and a rank's
part in one.
"""
