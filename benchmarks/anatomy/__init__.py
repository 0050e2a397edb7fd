"""How near estimates of a training step's memory come to what the allocator says."""
