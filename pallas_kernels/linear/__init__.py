"""Products with a model's matrices."""
