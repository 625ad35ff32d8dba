"""The speeds that a plan's clock assumes, the same for every run.

They are those of an H100, and assumed: of NVIDIA's GPUs only an H200 has run this
package (docs/validation.md). Times are in flops: as many as large products make
meanwhile. ``lab.pricing.presets`` has the sources, and ``test_pricing_counts`` holds
the two together.

==================  ==================================================================
``FLOPS_PER_PS``    650 TFLOP/s, 0.66 of the data sheet's, as the time model has it for
                    matrices that can gain by being shared
``NETWORK_BYTE``    42.5 GB/s each way between nodes: 0.85 of a 400 Gbit/s port a GPU
``NODE_BYTE``       300 GB/s each way inside a node: 0.66 of NVLink's 450
``MEMORY_BYTE``     2,680 GB/s: 0.8 of the data sheet's 3,350
``MESSAGE``         25 µs of a grouped send and receive
``PEER``            1.2 µs more for each peer
``KERNEL``          2.5 µs of the shortest kernel
``BATCH``           100 µs: the last wave of a batch of matrices does not fill a GPU
==================  ==================================================================
"""

from __future__ import annotations

FLOPS_PER_PS = 650
NETWORK_BYTE = 15_294
NODE_BYTE = NETWORK_BYTE // 7
MEMORY_BYTE = NETWORK_BYTE // 63
MESSAGE = 25_000_000 * FLOPS_PER_PS
PEER = 1_200_000 * FLOPS_PER_PS
KERNEL = 2_500_000 * FLOPS_PER_PS
BATCH = 100_000_000 * FLOPS_PER_PS
