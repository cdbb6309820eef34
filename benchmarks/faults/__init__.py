"""Long fault runs: `python -m benchmarks.faults.kill`, `.operations`, `.power_cut` (root only)."""
