"""What megatron-core 0.18 and later take from Python 3.12, for older ones: nothing but
a mark.

Imported before Megatron: by the tests, by the ranks' processes and, through
sitecustomize, by scripts.
"""

import typing

import typing_extensions

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
