"""The messages of CSI and of the kubelet's plugin registration that are exchanged. `make protos` makes the code."""
