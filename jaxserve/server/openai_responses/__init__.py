"""`POST /v1/responses`, in the shapes of OpenAI's Responses API."""
