"""``python -m megatron_muon.cli``: the same as the command ``megatron-muon``."""

import sys

from megatron_muon.cli import main

sys.exit(main())
