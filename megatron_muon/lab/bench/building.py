"""Importing this imports what a rank imports to build a model and its optimizer.

A fork server does so once for all ranks that it forks. It takes a second, mostly for what torch's
optimizers import when the first is made, and for the rows that ``install()`` compares.
"""

import contextlib

import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
import torch._dynamo  # noqa: F401

import megatron_muon.mcore.wiring.install  # noqa: F401
from megatron_muon.mcore.seams.rows import check_hooks

with contextlib.suppress(Exception):  # the ranks, which call it again, have the error
    check_hooks()
