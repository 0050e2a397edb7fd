"""The page of what was measured: `python -m benchmarks.report` reads the results, writes docs/performance.md."""
