"""Python imports this where its folder is on PYTHONPATH: for scripts, whose start is
not ours.
"""

import typing_override  # noqa: F401
