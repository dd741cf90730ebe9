"""OpenAI-compatible servers side by side: one client, one workload, one server at a time."""
