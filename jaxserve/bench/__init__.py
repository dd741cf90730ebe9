"""Measurements that can be repeated: one workload, engines that differ in one thing. See `scripts/bench`."""
