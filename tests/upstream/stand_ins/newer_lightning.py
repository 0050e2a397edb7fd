"""What tests of Lightning's newest source ask of it and the release has not yet: whether torch is at least 2.11."""

from lightning.pytorch.utilities import imports

if not hasattr(imports, "_TORCH_GREATER_EQUAL_2_11"):
    imports._TORCH_GREATER_EQUAL_2_11 = True
