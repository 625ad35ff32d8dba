"""The module that patched checkouts import; see ``megatron_lm.autoload``."""

import megatron_muon.megatron_lm.autoload  # noqa: F401
