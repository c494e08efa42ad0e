"""Decides where an actor joins next: at its first address, or where a learner redirected it. Knows nothing of sessions.

It trusts nobody further than the learner it was started with: the rules of `exposure.check_redirect` hold for every
address, the credentials stay the same, and whatever goes wrong elsewhere leads back home.
"""

from seedrl.config import SecurityConfig
from seedrl.errors import SeedrlError
from seedrl.wire.channel import Link
from seedrl.wire.messages import MAX_REDIRECTS
from seedrl.wire.security import check_redirect


class Route:
    """Owned by the actor's main thread."""

    def __init__(self, home: str, security: SecurityConfig) -> None:
        self._security = security
        self._home = self.link = Link(home, security)
        self.redirects = 0  # since somebody served the actor

    @property
    def is_home(self) -> bool:
        return self.link is self._home

    def served(self) -> None:
        self.redirects = 0

    def stay(self) -> None:
        """Joins here again, and is not sent elsewhere if that can be."""
        self.redirects = max(1, self.redirects)

    def go_home(self) -> None:
        """Joins at home again; an attempt that failed there was the last of its row."""
        if self.is_home:
            self.redirects = 0
        self.link = self._home

    def follow(self, address: str) -> str:
        """Joins there next; returns in words why it does not, if it goes home instead."""
        sender = self.link.address
        self.link = self._home
        if self.redirects >= MAX_REDIRECTS:
            self.redirects = 0
            return f"the learner at {sender} sends it on to {address}, the {MAX_REDIRECTS} before it did as well"
        self.redirects += 1
        try:
            check_redirect(self._home.address, address, self._security)
            if address != self._home.address:
                self.link = Link(address, self._security)
        except SeedrlError as error:
            self.redirects = MAX_REDIRECTS  # home is to serve it or to say no
            return f"the learner at {sender} sends it to {address}, where it may not go: {error}"
        return ""
