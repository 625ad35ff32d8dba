"""``python -m megatron_muon SCRIPT ARGS``; see ``launch``."""

import sys

from megatron_muon.megatron_lm.launch import main

main(sys.argv[1:])
