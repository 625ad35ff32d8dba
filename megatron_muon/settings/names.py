"""Names of settings in messages: the field of MuonConfig and the flag in Megatron-LM."""

from __future__ import annotations

FLAG_OF = {
    "matched_adamw_rms": "--muon-matched-adamw-rms",
    "scale_mode": "--muon-scale-mode",
    "momentum": "--muon-momentum",
    "nesterov": "--no-muon-nesterov",
    "ns_steps": "--muon-ns-steps",
    "ns_coefficients": "--muon-ns-coefficients",
    "ns_iteration": "--muon-ns-iteration",
    "ns_dtype": "--muon-ns-dtype",
    "ns_batch": "--muon-ns-batch",
    "elementwise": "--muon-elementwise",
    "clip_scope": "--muon-clip-scope",
    "weight_decay_all_params": "--weight-decay-all-params",
    "split_qkv": "--muon-no-split-qkv",
    "splits": "--muon-split",
    "lr_mults": "--muon-lr-mult",
    "wd_mults": "--muon-wd-mult",
    "qk_clip": "--muon-qk-clip",
    "qk_clip_alpha": "--muon-qk-clip-alpha",
    "muon_include": "--muon-include",
    "muon_exclude": "--muon-exclude",
    "homes": "--muon-homes",
    "split_matrices": "--muon-split-matrices",
    "rank_tflops": "--muon-rank-tflops",
    "link_gbytes": "--muon-link-gbytes",
    "node_ranks": "--muon-node-ranks",
    "round_bytes": "--muon-round-mib",
    "align_shards": "--muon-dp-layout",
    "early_param_gather": "--muon-early-param-gather",
    "checkpoint_digest": "--no-muon-checkpoint-digest",
    "nonfinite_limit": "--muon-nonfinite-limit",
    "log_interval": "--muon-log-interval",
    "log_file": "--muon-log-file",
}


def named(field: str) -> str:
    """A field of MuonConfig with its flag."""
    return f"{field} ({FLAG_OF[field]})"
