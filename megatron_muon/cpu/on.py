"""Importing this module calls ``enable(allow_cuda=True)``: for ``python -c`` and
preloads.
"""

from megatron_muon.cpu import enable

enable(allow_cuda=True)
