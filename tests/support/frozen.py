"""Importing this takes every object that exists by now out of garbage collection.

Torch and Megatron are 270,000 objects. A worker looks through all objects and collects
garbage after each call: 0.2 s of a processor, and a copy of the pages that it shares
with its fork server. The hooks' rows are compared before, so that no worker has to:
``rows`` keeps what it read.
"""

import contextlib
import gc

from megatron_muon.mcore.seams.rows import check_hooks

with contextlib.suppress(Exception):  # a test that installs the plugin has the error
    check_hooks()
gc.collect()
gc.freeze()
