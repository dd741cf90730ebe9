"""Pure functions of pytrees, and one boundary (`model_runner.py`, `compiled.py`) that touches the device."""
