"""One error class, in three parts: what was given, what is allowed, what to do.

Everything a user can get wrong raises `JspecError`; the command line prints its text without a
traceback. A bare traceback therefore always means a fault in jspec itself.
"""

from __future__ import annotations


class JspecError(ValueError):
    """A request that cannot be honoured, told in three parts.

    Args:
      given: what was given, with the offending value quoted in backticks.
      allowed: what would have been accepted.
      action: the next thing to try.
    """

    def __init__(self, given: str, allowed: str, action: str) -> None:
        self.given = given
        self.allowed = allowed
        self.action = action
        super().__init__(f"{given}\nAllowed: {allowed}\nTo do: {action}")

    def __reduce__(self) -> tuple[type[JspecError], tuple[str, str, str]]:
        return (JspecError, (self.given, self.allowed, self.action))
