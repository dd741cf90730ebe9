"""`scripts/bench soak`: a server under thousands of requests that come, go away, and collide."""
