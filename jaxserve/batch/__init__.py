"""numpy only: a scheduler's plan becomes arrays of a known shape. Never imports jax."""
