"""``typing.override`` on Python 3.11, for Megatron-LM 0.18 and later, which declare Python 3.12.

For tests only: ``megatron_lm.py`` puts this folder on PYTHONPATH.
"""

import typing

if not hasattr(typing, "override"):
    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined, unused-ignore]
