"""The machine: tensors, streams, torch.cuda and torch.distributed, which write a
trace.
"""
