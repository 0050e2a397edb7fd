"""What the tests of DeepSpeed 0.19.6 compare and newer engines have no more: the names of its sparse tensors, none."""

from deepspeed.runtime.engine import DeepSpeedEngine

if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):
    DeepSpeedEngine.sparse_tensor_module_names = frozenset()
