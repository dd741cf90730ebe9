"""C++ for CPUs, see `library`."""
