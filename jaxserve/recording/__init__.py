"""What an engine did, on disk: every input and decision for `jaxserve replay`, step times for `jaxserve simulate`."""
