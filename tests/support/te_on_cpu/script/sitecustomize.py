"""Python imports this where its folder is on PYTHONPATH: for scripts, whose start is
not ours.

Attention's kernels are not in the stub, so Megatron's own attention is in the place of
Transformer Engine's. State-space layers take plain torch for the kernels of mamba_ssm
and fla.
"""

import typing_override  # noqa: F401

import support.te_on_cpu.on  # noqa: F401
from megatron_muon import cpu
from support import hybrid_on_cpu, ssm_on_cpu
from support.te_on_cpu import loader

loader.replace_attention()
ssm_on_cpu.install()


def _state_on_the_host(patches: object) -> None:
    hybrid_on_cpu.install()


cpu.REPLACEMENTS = (*cpu.REPLACEMENTS, _state_on_the_host)
