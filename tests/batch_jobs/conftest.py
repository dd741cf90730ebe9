"""The same tokenizer as for tests of the server."""

from tests.server.conftest import tokenizer

__all__ = ["tokenizer"]
