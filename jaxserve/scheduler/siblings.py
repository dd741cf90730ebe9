"""Which members of a group (`n` > 1) run, and which wait until one of them has computed the common prompt."""

from __future__ import annotations

from jaxserve.request import Request


class SiblingIndex:
    def __init__(self) -> None:
        self._running: dict[str, dict[str, Request]] = {}
        self._parked: dict[str, list[str]] = {}

    def started(self, request: Request) -> None:
        self._running.setdefault(request.group_id, {})[request.request_id] = request

    def stopped(self, request: Request) -> list[str]:
        """A member runs no longer. Returns parked siblings that have nobody left to wait for."""
        members = self._running[request.group_id]
        del members[request.request_id]
        if members:
            return []
        del self._running[request.group_id]
        return self._parked.pop(request.group_id, [])

    def source_for(self, request: Request) -> Request | None:
        """A running sibling whose prompt is computed, lowest index first."""
        ready = [
            member
            for member in self._running.get(request.group_id, {}).values()
            if member.num_computed_tokens >= member.num_prompt_tokens
            and member.prompt_token_ids == request.prompt_token_ids
            and member.cache_salt == request.cache_salt
        ]
        return min(ready, key=lambda member: (member.index, member.request_id), default=None)

    def has_running(self, group_id: str) -> bool:
        return group_id in self._running

    def park(self, request: Request) -> None:
        """Set a waiting request aside until `prompt_computed` or `stopped` returns it."""
        self._parked.setdefault(request.group_id, []).append(request.request_id)

    def prompt_computed(self, group_id: str) -> list[str]:
        """A member has computed the prompt. Returns the parked siblings, which can fork now."""
        return self._parked.pop(group_id, [])

    def unpark(self, request: Request) -> bool:
        """Forget a parked request that is aborted. False when it is not parked."""
        parked = self._parked.get(request.group_id)
        if not parked or request.request_id not in parked:
            return False
        parked.remove(request.request_id)
        if not parked:
            del self._parked[request.group_id]
        return True

    def is_parked(self, request: Request) -> bool:
        return request.request_id in self._parked.get(request.group_id, ())

    def check_integrity(self) -> None:
        """Raises AssertionError when somebody is parked for nobody."""
        for group_id, parked in self._parked.items():
            assert parked, f"empty parking list of {group_id}"
            assert group_id in self._running, f"{parked} wait for a sibling that does not run"
            assert all(
                m.num_computed_tokens < m.num_prompt_tokens for m in self._running[group_id].values()
            ), f"{parked} wait although a sibling has computed the prompt"
