"""`POST /v1/messages`, in the shapes of Anthropic's Messages API."""
