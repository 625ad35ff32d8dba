"""Topologies that many tests run on; a name has the sizes that are not 1.

Megatron wants sequence parallelism of a mixture of experts under TP.
"""

from __future__ import annotations

from support.runs.cases import Topology

ONE = Topology()
TP2 = Topology(tp=2)
TP4 = Topology(tp=4)
PP2 = Topology(pp=2)
DP2 = Topology(dp=2)
DP3 = Topology(dp=3)
DP4 = Topology(dp=4)
TP2_CP2 = Topology(tp=2, cp=2)
TP2_PP2 = Topology(tp=2, pp=2)
TP2_DP2 = Topology(tp=2, dp=2)
TP2_DP3 = Topology(tp=2, dp=3)
PP2_DP2 = Topology(pp=2, dp=2)
TP2_PP2_DP2 = Topology(tp=2, pp=2, dp=2)
DP4_INSTANCES2 = Topology(dp=4, instances=2)
PP2_DP2_CHUNKS2 = Topology(pp=2, dp=2, chunks=2)
DP2_OVERLAP = Topology(dp=2, overlap=True)
DP3_OVERLAP = Topology(dp=3, overlap=True)
TP2_DP2_OVERLAP = Topology(tp=2, dp=2, overlap=True)
PP2_DP3_OVERLAP = Topology(pp=2, dp=3, overlap=True)
DP2_EP2 = Topology(dp=2, ep=2)
DP4_EP2 = Topology(dp=4, ep=2)
DP4_EP4 = Topology(dp=4, ep=4)
PP2_DP2_EP2 = Topology(pp=2, dp=2, ep=2)
TP2_DP2_EP2 = Topology(tp=2, dp=2, ep=2, sequence_parallel=True)
TP2_EP2_ETP1 = Topology(tp=2, ep=2, etp=1, sequence_parallel=True)
TP2_DP2_EP2_ETP1 = Topology(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True)
TP2_SP = Topology(tp=2, sequence_parallel=True)
TP2_DP2_SP = Topology(tp=2, dp=2, sequence_parallel=True)
TP2_DP2_OVERLAP_SP = Topology(tp=2, dp=2, overlap=True, sequence_parallel=True)
TP2_PP2_DP2_OVERLAP_SP = Topology(2, 2, 2, overlap=True, sequence_parallel=True)
