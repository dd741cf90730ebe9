"""Workloads: requests with their arrivals, made with a seed or read from a file."""
