"""What release 0.2.0 had and this version has not, each with what to do now.

A row stays for one minor version, so those of 0.2.0 go with 0.4.
"""

from __future__ import annotations

# Flags on Megatron-LM's command line, and those of the commands that take them.
FLAGS: dict[str, str] = {}

# Settings of ``MuonConfig``.
FIELDS: dict[str, str] = {}

# Public names of ``megatron_muon``.
NAMES: dict[str, str] = {}
