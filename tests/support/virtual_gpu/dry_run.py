"""All that tests of a GPU take of the package's dry run, which builds models without memory."""

from megatron_muon.lab.dry_run import world as world
from megatron_muon.lab.dry_run.chunks import build_chunks as build_chunks
from megatron_muon.lab.dry_run.model import Ranks as Ranks
from megatron_muon.lab.dry_run.model import ranks_of as ranks_of
from megatron_muon.lab.dry_run.model import transformer_config as transformer_config
from megatron_muon.lab.dry_run.stages import built as built
from megatron_muon.lab.dry_run.stages import planned_on as planned_on
from megatron_muon.lab.dry_run.stages import planned_optimizers as planned_optimizers
from megatron_muon.lab.plan.kinds import optimizer_of as optimizer_of
from megatron_muon.lab.plan.kinds import stage_makeup as stage_makeup
