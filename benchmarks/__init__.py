"""Benchmarks: pytest-benchmark suites (`make bench`) and the table of docs/benchmarks.md (`make bench-report`)."""
