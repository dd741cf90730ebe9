"""What the model is asked so that it shows how it writes: templates filled in from a seed. Plain Python."""

from __future__ import annotations

import random
from collections.abc import Iterator

_SUBJECTS = (
    "volcanoes", "the moon", "honey bees", "the Roman Empire", "steam engines", "coffee", "electric cars", "chess",
    "the human heart", "rainforests", "the printing press", "glaciers", "jazz music", "photography", "black holes",
    "earthquakes", "sourdough bread", "the internet", "whales", "the French Revolution", "gardening", "democracy",
    "dreams", "inflation", "magnets", "the Great Wall of China", "the water cycle", "penguins", "marathon running",
    "solar panels", "Shakespeare", "the digestive system", "deserts", "computer programming", "tea", "dinosaurs",
    "the stock market", "languages", "sleep", "clouds", "recycling", "public libraries", "bridges", "the violin",
    "artificial intelligence", "castles", "the Olympic Games", "butterflies", "time zones", "pottery",
)  # fmt: skip
_PEOPLE = (
    "a young baker", "two brothers", "a retired teacher", "a clever fox", "an old sailor", "a robot", "a shy painter",
    "a mountain guide", "a curious child", "a travelling musician", "a librarian", "a tired doctor", "a detective",
    "a farmer's daughter", "an astronaut", "a clockmaker",
)  # fmt: skip
_PLACES = (
    "in a small village", "during a snow storm", "on a long train journey", "at the end of summer", "in a big city",
    "on a distant planet", "in an old house", "by a quiet river", "in the desert", "after a great flood",
)  # fmt: skip
_TASKS = (
    "save money", "learn a new language", "prepare for a job interview", "stay healthy in winter", "plan a holiday",
    "write a good essay", "train a puppy", "start a small business", "make new friends", "sleep better",
    "grow tomatoes", "study for an exam", "organise a birthday party", "fix a flat tyre", "give a speech",
    "clean a kitchen", "manage time", "deal with stress", "choose a laptop", "bake a cake",
)  # fmt: skip
_FUNCTIONS = (
    "reverses a string", "finds the largest number in a list", "checks whether a number is prime",
    "counts the words in a text", "sorts a list of names", "computes the factorial of a number",
    "removes duplicates from a list", "merges two dictionaries", "converts Celsius to Fahrenheit",
    "reads a file line by line", "returns the Fibonacci numbers up to n", "tests whether a word is a palindrome",
)  # fmt: skip
_QUESTIONS = (
    "What is the most important thing to know about {subject}?",
    "Explain {subject} to a child.",
    "Write a short paragraph about {subject}.",
    "Tell me three interesting facts about {subject}.",
    "Why do people care about {subject}?",
    "What are the advantages and disadvantages of {subject}?",
    "Give a brief history of {subject}.",
    "How would you describe {subject} in a letter to a friend?",
    "I want to learn more about {subject}. Where should I begin?",
    "What is the connection between {subject} and {other}?",
    "Compare {subject} with {other}.",
    "Make a list of five questions about {subject} and answer them.",
    "How can I {task}?",
    "Give me some tips on how to {task}.",
    "What mistakes should I avoid if I want to {task}?",
    "Write a step-by-step plan to {task}.",
    "Tell a story about {person} {place}.",
    "Write a poem about {person} {place}.",
    "Write a dialogue between {person} and somebody who wants to {task}.",
    "Write an e-mail in which {person} asks for advice on how to {task}.",
    "Write a Python function that {function}.",
    "Write a JavaScript function that {function}, and explain it.",
)
_ROWS = (
    ("Anna", "Oslo", "34"), ("Ben", "Lima", "27"), ("Chen", "Cairo", "51"), ("Dora", "Porto", "45"),
    ("Emil", "Riga", "19"), ("Fay", "Quito", "63"), ("Gus", "Turin", "38"), ("Hana", "Kyoto", "22"),
)  # fmt: skip
_CODE = (
    """def area({a}, height):
    if {a} < 0:
        raise ValueError("negative")
    return {a} * height
""",
    """def count({a}):
    total = 0
    for item in {a}:
        if item:
            total += 1
    return total
""",
    """class Box:
    def __init__(self, {a}):
        self.{a} = {a}

    def show(self):
        print(self.{a})
""",
    """function add({a}, other) {{
  if ({a} === undefined) {{
    return other;
  }}
  return {a} + other;
}}
""",
)
_NAMES = ("width", "value", "numbers", "data", "first", "weight", "price", "label", "points", "size")
_SENTENCES = (
    "The ferry leaves the island at seven in the morning and comes back before night.",
    "In 1911 the mill burned down, and nobody knows to this day who left the lamp on.",
    "Her grandmother kept forty goats, three dogs and a parrot that could whistle.",
    "The new school has twelve rooms, a large hall and a garden behind it.",
    "Every Friday the market fills the square with fish, bread, flowers and noise.",
    "The river was so low that summer that the old bridge could be seen again.",
    "He wrote eleven letters to the company, and the last of them was answered.",
    "Most visitors come in May, when the orchards bloom and the rooms are cheap.",
    "The museum owns two hundred clocks, of which only nine still run.",
    "Snow fell on the first of October, six weeks earlier than anybody remembered.",
)


def prompts(seed: int, count: int, *, copying: float = 0.25) -> list[str]:
    """Questions of one user each, all different.

    Args:
      copying: share of those that ask for a text to be repeated with a change or none.
    """
    source = random.Random(seed)
    made: dict[str, None] = {}
    for text in _endless(source, copying):
        made[text] = None
        if len(made) == count:
            return list(made)
    raise AssertionError


def _endless(source: random.Random, copying: float) -> Iterator[str]:
    while True:
        yield _copy_task(source) if source.random() < copying else _question(source)


def _question(source: random.Random) -> str:
    subject, other = source.sample(_SUBJECTS, 2)
    return source.choice(_QUESTIONS).format(
        subject=subject,
        other=other,
        task=source.choice(_TASKS),
        person=source.choice(_PEOPLE),
        place=source.choice(_PLACES),
        function=source.choice(_FUNCTIONS),
    )


def _copy_task(source: random.Random) -> str:
    kind = source.randrange(3)
    if kind == 0:
        old, new = source.sample(_NAMES, 2)
        code = source.choice(_CODE).format(a=old)
        return f"Rename {old} to {new} in this code. Answer with the whole code.\n\n```\n{code}```"
    if kind == 1:
        text = " ".join(source.sample(_SENTENCES, source.randint(2, 5)))
        order = source.choice(
            ("Repeat this text.", "Copy this text and correct its mistakes.", "Summarise this text.")
        )
        return f"{order}\n\n{text}"
    rows = source.sample(_ROWS, source.randint(3, 6))
    table = "\n".join(("| Name | City | Age |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)))
    order = source.choice(
        ("Write this table again.", "Sort this table by name.", "Turn this table into a list.")
    )
    return f"{order}\n\n{table}"
