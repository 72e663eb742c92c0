"""Made-up updates that are not in parts."""


class OnePart:
    """An update of one part, at whose end there is nothing to do."""

    parts = 1

    def end(self, error: BaseException | None) -> None:
        """Do nothing."""
