"""What all workers of a service have to agree on. A worker reads the file as it is when it starts, and an edit that
waits for a restart must not leave one service at two brokers. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from delayer.settings import Settings


class Disagreement(Exception):
    """A worker that starts now would differ from those that run."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(f"a restart is needed for {', '.join(keys)}: the other workers run with the values of before")


class Agreement:
    """The places that the workers were started with."""

    def __init__(self, settings: Settings) -> None:
        self._places = _places(settings)

    def check(self, new: Settings) -> None:
        """Raises Disagreement."""
        places = _places(new)
        differing = [key for key, place in self._places.items() if place != places[key]]
        if "store.url" in differing and None in (self._places["store.url"], places["store.url"]):
            differing.remove("store.url")  # with a store beside those without one: that is no second store
        if differing:
            raise Disagreement(differing)

    def reloaded(self, new: Settings) -> None:
        """The workers were told to read ``new``: a first store is taken into use then."""
        self._places["store.url"] = self._places["store.url"] or _places(new)["store.url"]


def _places(settings: Settings) -> dict[str, object]:
    """Where messages wait and go, by key. Nothing that two workers may have different, such as intake.prefetch."""
    return {
        "broker.url": _without_login(settings.broker.url.reveal()),
        "store.url": _without_login(settings.store_url or "") or None,
        "intake.queue": settings.intake.queue,
        "native": settings.native,
        "refused.queue": settings.refused.queue,
    }


def _without_login(url: str) -> str:
    """A changed password leads to the same place, and is the only one that lets in."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
