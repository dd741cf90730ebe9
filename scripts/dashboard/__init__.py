"""The Grafana dashboard, checked."""
