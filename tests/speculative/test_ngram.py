"""Prompt lookup against a plain search of the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduler.output import DraftRequest
from jaxserve.speculative.acceptance import num_accepted
from jaxserve.speculative.ngram import NgramProposer
from tests.fakes import make_request


def search(text: list[int], count: int) -> tuple[int, ...]:
    """What stood behind the latest earlier occurrence of the longest of the last 4, 3, 2 tokens: among the 32 latest
    of the last 2."""
    places = [end for end in range(len(text) - 1, 1, -1) if text[end - 2 : end] == text[-2:]][:32]
    for length in (4, 3, 2):
        for end in places:
            if end >= length and text[end - length : end] == text[-length:]:
                found = list(text)
                while len(found) < end + count + len(text):
                    found.append(found[len(found) - (len(text) - end)])
                return tuple(found[end : end + count])
    return ()


@settings(max_examples=200)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    outputs=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=12),
    count=st.integers(1, 8),
)
def test_it_finds_what_a_search_finds(prompt: list[int], outputs: list[list[int]], count: int) -> None:
    """Token by token or several at a time, as steps give them."""
    request = make_request("r", prompt, 1000)
    proposer = NgramProposer()
    for fresh in [[], *outputs]:
        request.output_token_ids += fresh
        (found,) = proposer.propose([DraftRequest(request, count, 0)])
        assert found == search([*prompt, *request.output_token_ids], count)
    proposer.forget("r:0")
    assert not proposer._indices


def test_only_so_many_places_are_compared() -> None:
    """A text full of the same two tokens costs no more than another."""
    far = [7, 8, 1, 2, 99]
    near = [5, 1, 2, 6] * 40
    request = make_request("r", [*far, *near, 7, 8, 1, 2], 9)
    assert NgramProposer().propose([DraftRequest(request, 1, 0)]) == [(6,)]


def test_requests_do_not_mix() -> None:
    proposer = NgramProposer()
    one, other = make_request("a", [1, 2, 3, 1, 2], 9), make_request("b", [1, 2, 4, 1, 2], 9)
    wanted = [DraftRequest(one, 1, 0), DraftRequest(other, 1, 1)]
    assert proposer.propose(wanted) == [(3,), (4,)]


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), min_size=7, max_size=7))
def test_how_far_a_draft_goes(drafts: list[int], sampled: list[int]) -> None:
    count = num_accepted(drafts, sampled)
    assert drafts[:count] == sampled[:count]
    assert count == len(drafts) or drafts[count] != sampled[count]
