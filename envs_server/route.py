"""Decides where an actor joins next: at its first address, or where a learner redirected it. Knows nothing of sessions.

It trusts no address further than the learner it was started with: `wire.security.check_redirect` holds for every
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
        self.redirects = 0  # since the actor was last served

    @property
    def is_home(self) -> bool:
        return self.link is self._home

    def served(self) -> None:
        self.redirects = 0

    def stay(self) -> None:
        """Join here again, and stay if possible."""
        self.redirects = max(1, self.redirects)

    def go_home(self) -> None:
        """Join at home again; an attempt that failed there ends the chain of redirects."""
        if self.is_home:
            self.redirects = 0
        self.link = self._home

    def follow(self, address: str) -> str:
        """Join there next; return the reason if the actor goes home instead."""
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
            self.redirects = MAX_REDIRECTS  # home has to serve it or refuse it
            return f"the learner at {sender} sends it to {address}, where it may not go: {error}"
        return ""
