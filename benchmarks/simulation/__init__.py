"""What the choice of an interval, the memory tier and the flush are worth over the life of a job, and what saves of
thousands of nodes ask of the storage and of the API server: `python -m benchmarks.simulation`.
"""
