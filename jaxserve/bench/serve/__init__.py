"""What `jaxserve bench` runs: a server under load, by its URL; an engine in this process."""
