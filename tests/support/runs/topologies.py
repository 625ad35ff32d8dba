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
TP2_CP2 = Topology.of("tp2 cp2")
TP2_PP2 = Topology.of("tp2 pp2")
TP2_DP2 = Topology.of("tp2 dp2")
TP2_DP3 = Topology.of("tp2 dp3")
PP2_DP2 = Topology.of("pp2 dp2")
TP2_PP2_DP2 = Topology.of("tp2 pp2 dp2")
DP4_INSTANCES2 = Topology.of("dp4 instances2")
PP2_DP2_CHUNKS2 = Topology.of("pp2 dp2 chunks2")
DP2_OVERLAP = Topology.of("dp2 overlap")
DP3_OVERLAP = Topology.of("dp3 overlap")
TP2_DP2_OVERLAP = Topology.of("tp2 dp2 overlap")
PP2_DP3_OVERLAP = Topology.of("pp2 dp3 overlap")
DP2_EP2 = Topology.of("dp2 ep2")
DP4_EP2 = Topology.of("dp4 ep2")
DP4_EP4 = Topology.of("dp4 ep4")
PP2_DP2_EP2 = Topology.of("pp2 dp2 ep2")
TP2_DP2_EP2 = Topology.of("tp2 dp2 sp ep2")
TP2_EP2_ETP1 = Topology.of("tp2 sp ep2 etp1")
TP2_DP2_EP2_ETP1 = Topology.of("tp2 dp2 sp ep2 etp1")
TP2_SP = Topology.of("tp2 sp")
TP2_DP2_SP = Topology.of("tp2 dp2 sp")
TP2_DP2_OVERLAP_SP = Topology.of("tp2 dp2 overlap sp")
TP2_PP2_DP2_OVERLAP_SP = Topology.of("tp2 pp2 dp2 overlap sp")
