"""Megatron-LM's training scripts with Muon: flags, saves, the launcher and the patch's
import.
"""
