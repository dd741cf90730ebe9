"""Stop strings: against the definition, written down naively, and the ways others got them wrong."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.stop_strings import StopStringMatcher


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the first stop string to be complete; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]


TEXT = st.text(alphabet="ab\n🦩", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n🦩", min_size=1, max_size=6), max_size=5)


@settings(max_examples=400)
@given(text=TEXT, stops=STOPS, places=st.lists(st.integers(0, 60)), include=st.booleans())
def test_any_cutting_gives_the_text_up_to_the_first_complete_stop(text, stops, places, include):
    matcher = StopStringMatcher(stops, include_stop=include)
    want, which = naive(text, stops, include)
    got = ""
    for piece in cut(text, places):
        got += matcher.feed(piece)
        assert want.startswith(got), "text was shown that is none of the output"
    got += matcher.flush()
    assert (got, matcher.matched) == (want, which)


@settings(max_examples=200)
@given(text=TEXT, stops=STOPS)
def test_only_a_possible_beginning_is_held_back(text, stops):
    """Whatever is held back is the longest end of the text that begins a stop string, and no more (B012)."""
    matcher = StopStringMatcher(stops)
    shown = ""
    for end, char in enumerate(text, 1):
        shown += matcher.feed(char)
        if matcher.matched is not None:
            return
        sizes = [n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
        assert shown == text[: end - max(sizes, default=0)]
    assert shown + matcher.flush() == text


def test_a_held_beginning_is_shown_when_the_output_ends_otherwise():
    matcher = StopStringMatcher(["\n\n###"])
    assert matcher.feed("line\n\n") == "line"
    assert matcher.flush() == "\n\n"
    assert matcher.matched is None


def test_nothing_is_shown_after_a_match():
    matcher = StopStringMatcher(["END"])
    assert matcher.feed("onENDtwo") == "on"
    assert matcher.feed("three") == ""
    assert matcher.flush() == ""


@settings(max_examples=200)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=3), max_size=20),
    stops=STOPS,
    first=st.integers(0, 20),
)
def test_stops_that_end_while_too_short_never_count(pieces, stops, first):
    """min_tokens (B017): a stop string counts if the token that completes it counts, wherever it began."""
    matcher = StopStringMatcher(stops)
    text = got = ""
    unarmed_chars = sum(len(piece) for piece in pieces[:first])
    for number, piece in enumerate(pieces):
        text += piece
        got += matcher.feed(piece, armed=number >= first)
    got += matcher.flush()
    want, which = text, None
    for end in range(unarmed_chars + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            which = max(complete, key=len)
            want = text[: end - len(which)]
            break
    assert matcher.matched == which
    assert got == want


def test_a_stop_that_did_not_count_may_be_the_beginning_of_one_that_does():
    matcher = StopStringMatcher(["abab"])
    assert matcher.feed("xabab", armed=False) == "xab"
    assert matcher.feed("ab") == ""
    assert matcher.matched == "abab"


def test_the_last_of_many_long_stops_still_stops():
    """No limit below the documented one (B224)."""
    stops = [f"{number:03d}" + "x" * 1000 for number in range(63)] + ["the end"]
    matcher = StopStringMatcher(stops)
    assert matcher.feed("000xx 001xxx this is the end of it") == "000xx 001xxx this is "
    assert matcher.matched == "the end"


def test_hostile_stops_stay_within_a_few_steps_a_character():
    """64 stop strings of 1,000 equal characters: work per character is bounded, counted in comparisons of a prefix."""
    matcher = StopStringMatcher(["a" * (1000 - number) + "b" for number in range(64)])
    shown = "".join(matcher.feed("a") for _ in range(3000))
    assert shown == "a" * 2000
    assert matcher.feed("c") == "a" * 1000 + "c"


def test_duplicates_are_one():
    matcher = StopStringMatcher(["ab", "ab"])
    assert matcher.feed("xab") == "x"


def test_random_long_text_agrees_with_the_definition():
    rng = random.Random(0)
    for _ in range(20):
        text = "".join(rng.choice("abc") for _ in range(500))
        stops = ["".join(rng.choice("abc") for _ in range(rng.randint(4, 9))) for _ in range(8)]
        matcher = StopStringMatcher(stops)
        got = "".join(matcher.feed(char) for char in text) + matcher.flush()
        assert (got, matcher.matched) == naive(text, stops, False)
