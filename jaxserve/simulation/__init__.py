"""The engine on a clock that does not wait: steps take what a cost model says, and compute nothing."""
