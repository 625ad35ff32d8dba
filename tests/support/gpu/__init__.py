"""What tests/gpu runs on ranks: on GPUs, or over gloo and on the virtual GPU without
one.
"""
