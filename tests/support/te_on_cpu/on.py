"""Import this before Megatron: what imports Transformer Engine or Apex then gets its
Python.

Where there is none, or a GPU, it does nothing. The package's CPU runtime, which
replaces the layers and the Adam of Transformer Engine, leaves both where they are.
"""

from megatron_muon import cpu
from megatron_muon.cpu import megatron_core, options
from support import apex_on_cpu, te_on_cpu
from support.te_on_cpu import loader

if te_on_cpu.TE is not None:
    loader.install()
    cpu.REPLACEMENTS = tuple(
        each for each in cpu.REPLACEMENTS if each is not megatron_core.adam
    )
    options.REPLACED = tuple(
        row for row in options.REPLACED if row.dest != "transformer_impl"
    )
    with_adam = "use_precision_aware_optimizer"
    options.REFUSED = tuple(row for row in options.REFUSED if row.dest != with_adam)
elif apex_on_cpu.installed():
    apex_on_cpu.install()
