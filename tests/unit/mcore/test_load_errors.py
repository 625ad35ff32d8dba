"""What a failed load says: the way out where it is about optimizer state, else
Megatron's words.
"""

from __future__ import annotations

import pytest

from megatron_muon.mcore.checkpoint.absent import explained

STATE = "optimizer.distributed.dp_group_idx_0.megatron_muon.muon_momentum.a.weight"
WHOLE = "chained_0.optimizer.state.muon_momentum.a.weight"


@pytest.mark.parametrize(
    "text, said",
    [
        (
            f"{STATE} from model not in state dict: ['b']",
            f"has no {STATE}, .*fully-reshardable",
        ),
        (
            f"Missing key in checkpoint state_dict: {WHOLE}.",
            f"has no {WHOLE}.*, .*EP must stay",
        ),
        (
            f"a.weight from model not in state dict: ['{STATE}']",
            "^a.weight from model not in",
        ),
        (
            "Missing key in checkpoint state_dict: rng_state/shard_0.0.1_1.1.2.",
            r"has no rng_state/shard_0\.0\.1_1\.1\.2: .*Give --no-load-rng: dropout",
        ),
        ("Input/output error", "^Input/output error$"),
    ],
)
def test_only_a_key_that_is_missing_is_explained(text: str, said: str) -> None:
    with pytest.raises((ValueError, OSError), match=said), explained("iter_0000001"):
        raise OSError(text)


def test_adamws_missing_state_is_left_to_megatron() -> None:
    with (
        pytest.raises(OSError, match=r"^Missing key "),
        explained("iter_0000001", is_muons=False),
    ):
        raise OSError(f"Missing key in checkpoint state_dict: {WHOLE}.")
