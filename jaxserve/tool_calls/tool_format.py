"""What distinguishes the ways in which families of models write tool calls."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ListUse(enum.Enum):
    """Whether the objects of several calls stand in a JSON list."""

    NEVER = "never"
    OPTIONAL = "optional"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format. Each call is an object, `{"name": ..., ARGUMENTS_KEY: {...}}`, in a frame.

    Attributes:
      name: what users call it.
      opening, closing: the frame's texts; often tokens of their own. `closing` may be empty: the output ends then.
      begins_bare: an output that begins with an object needs no opening.
      lists: whether objects stand in a list within the frame.
      between: what the model writes between two calls: of one list, or else between two frames or bare objects.
      padding: what it writes inside of the frame, beside opening and closing.
      arguments_key: what it calls the arguments (`arguments` and `parameters` are both read).
      call_id_length: letters and digits of a call's id, where templates of the family want so many; None: any.
    """

    name: str
    opening: str
    closing: str = ""
    begins_bare: bool = False
    lists: ListUse = ListUse.NEVER
    between: str = ""
    padding: str = ""
    arguments_key: str = "arguments"
    call_id_length: int | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of the frame, which have to stay in the output's text to be seen."""
        return (self.opening, self.closing) if self.closing else (self.opening,)
