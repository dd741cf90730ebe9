"""What any endpoint takes, ready for the engine. Batch files come in here as well."""

from __future__ import annotations

from jaxserve.server.conversion import Endpoint, PreparedRequest, ServingContext, prepare_generation
from jaxserve.server.embeddings import prepare_embeddings
from jaxserve.server.service_level import Caller


def prepare(
    endpoint: Endpoint, data: bytes, context: ServingContext, caller: Caller = Caller()
) -> PreparedRequest:
    """Decode a JSON body, check it, tokenise its prompts.

    Args:
      caller: what is known of the request besides its body.

    Raises:
      InvalidRequestError: the body can't be honoured as asked.
      ApiError: it names a model that is not served.
    """
    if endpoint == "/v1/embeddings":
        return prepare_embeddings(data, context, caller)
    return prepare_generation(endpoint, data, context, caller)
