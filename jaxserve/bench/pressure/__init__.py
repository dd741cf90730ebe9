"""`scripts/bench pressure`: what a server does with more requests than it can serve."""
