"""The scripted customer: answers the assistant's questions, makes the remaining remarks, and then leaves."""

from __future__ import annotations

from precedent_demo.requests import Request


class Customer:
    """The customer of one conversation; its replies depend only on the request and on the assistant's words."""

    def __init__(self, request: Request) -> None:
        self.opening = request.opening
        self._replies = dict(request.replies)
        self._remarks = list(request.remarks)

    def reply(self, text: str) -> str | None:
        """The reply to these words of the assistant; None if there is nothing more to say."""
        topic = _asked(text)
        if topic in self._replies:
            return self._replies.pop(topic)
        return self._remarks.pop(0) if self._remarks else None


def _asked(text: str) -> str | None:
    """Whether the assistant asks who the customer is ("identify") or asks for consent ("confirm")."""
    if "?" not in text:
        return None
    return "identify" if "email" in text.lower() or "order number" in text.lower() else "confirm"
