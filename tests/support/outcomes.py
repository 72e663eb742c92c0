"""Counts what the examples of a property came to, so that one which rarely reaches its subject fails."""

import functools
from collections import Counter
from collections.abc import Callable

from hypothesis import currently_in_test_context, event


class Outcomes:
    """What the examples of one property came to, by name."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, outcome: str) -> None:
        """Count one example, or one part of it, and show it in hypothesis' statistics, if that draws the examples."""
        if currently_in_test_context():
            event(outcome)
        self._counts[outcome] += 1

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self._counts.most_common())

    def reaching(self, share: float, *subject: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorate a property that notes outcomes here: it fails unless enough of them are its subject."""

        def decorate(check_property: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(check_property)
            def run(*args: object, **kwargs: object) -> None:
                self._counts.clear()
                check_property(*args, **kwargs)
                self.check(share, *subject)

            return run

        return decorate

    def check(self, share: float, *subject: str) -> None:
        """Fail unless at least `share` of all that was noted is one of `subject`."""
        reached, total = sum(self._counts[name] for name in subject), self._counts.total()
        assert total > 0, "no example was noted"
        assert reached >= share * total, f"{reached} of {total} were {' or '.join(subject)}: {dict(self._counts)}"
