"""Plain Python: which tokens of which requests run in the next step. Never imports jax."""
