"""GPT layers with hyper-connections, for ``--spec support.models.hyper_connections
layer``.
"""

from megatron.core.models.gpt import gpt_layer_specs

from support.models.meta_models import hyper_connected

layer = hyper_connected(gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec())
