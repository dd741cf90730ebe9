"""Prompts on which the demo model is compared with transformers: plain text and chats of 5 to 1,500 tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class DemoPrompt:
    """Exactly one of `text` and `messages` is set; `length` cuts a text to that many tokens (None keeps all)."""

    name: str
    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None  # (role, content)
    length: int | None = None


def _station_log(lines: int, seed: int) -> str:
    """Text of any length that doesn't repeat itself word for word."""
    rng = random.Random(seed)
    places = ["the harbour", "Pier 9", "the north ridge", "Lake Orla", "the old mill", "Sector 12"]
    events = [
        "the wind turned to {w} and reached {n} km/h",
        "visibility fell below {n} metres because of fog",
        "two of the {n} buoys stopped sending data",
        "a crew of {n} replaced the pressure sensor",
        "rain of {n} mm was measured within an hour",
        "the temperature rose by {n} degrees before noon",
    ]
    winds = ["north", "south-west", "east", "north-west"]
    out = []
    for day in range(1, lines + 1):
        event = rng.choice(events).format(w=rng.choice(winds), n=rng.randint(2, 95))
        out.append(f"Day {day}: at {rng.choice(places)}, {event}.")
    return "\n".join(out)


_CODE = '''def merge(left, right):
    """Merge two sorted lists."""
    result = []
    while left and right:
        result.append((left if left[0] <= right[0] else right).pop(0))
    return result + left + right


class Stack:
    def __init__(self):
        self._items = []

    def push(self, item):
        self._items.append(item)

    def pop(self):
        if not self._items:
            raise IndexError("pop from an empty stack")
'''

_LANGUAGES = (
    "Guten Morgen! Wie spät ist es? — Il est déjà midi, et le café refroidit. 今日はいい天気ですね。 "
    "Привет, как дела? مرحبا بالعالم. Η θάλασσα είναι ήρεμη. 🙂🚀👩‍👩‍👧 naïve façade: 3,14 ≈ π; x² + y² = r²."
)

DEMO_PROMPTS: tuple[DemoPrompt, ...] = (
    DemoPrompt("capital", text="The capital of France is"),
    DemoPrompt("counting", text="one two three four five six seven eight nine"),
    DemoPrompt("log_17", text=_station_log(4, seed=1), length=17),
    DemoPrompt("chat_short", messages=(("user", "What is gravity?"),)),
    DemoPrompt(
        "chat_system",
        messages=(
            ("system", "You answer in one short sentence."),
            ("user", "Why is the sky blue?"),
            ("assistant", "Because air scatters blue light more than red."),
            ("user", "And why are sunsets red?"),
        ),
    ),
    DemoPrompt("languages", text=_LANGUAGES),
    DemoPrompt("code", text=_CODE),
    DemoPrompt("log_400", text=_station_log(30, seed=2), length=400),
    DemoPrompt(
        "chat_document",
        messages=(("user", "Summarise this log in three sentences:\n" + _station_log(25, seed=3)),),
    ),
    DemoPrompt("log_1500", text=_station_log(90, seed=4), length=1500),
)
