"""The aiohttp front door, OpenAI-compatible."""
