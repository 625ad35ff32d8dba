"""The plan of the exchange: homes, messages and rounds as integers, the same on every
rank.
"""
