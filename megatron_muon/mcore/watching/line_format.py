"""The format of a run's lines; readers need nothing else of this folder, and no torch."""

from __future__ import annotations

FORMAT = 1
KINDS = ("muon", "adamw", "layers", "logits")  # of rows; each has numbers by name
