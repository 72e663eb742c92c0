"""What became of a case. No torch here: who asks for cases to be run need not import it."""

from dataclasses import dataclass, replace

OURS = ("mismatch", "error", "no transfers", "mended")


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    `kind` is "same", "unmoved" (the same, and known to leave nothing to move), "mismatch", "error" (ours), "no
    transfers" (though there was something to offload), "expected" (known to fail), "mended" (known as one of
    these, and is not),
    "skipped", "unstable" (torch's own two runs differ) or "torch" (its own backend raises). `moved` says whether
    something was offloaded or computed again; `raised` whether the budget had to be raised above the floor's 0.2 %.
    """

    name: str
    kind: str
    moved: bool = False
    raised: bool = False
    detail: str = ""

    @property
    def ran(self) -> bool:
        """Return whether tencache ran it."""
        return self.kind not in ("skipped", "unstable", "torch")

    def __str__(self) -> str:
        notes = [self.detail] * bool(self.detail) + ["nothing could move"] * (self.kind == "same" and not self.moved)
        notes += ["above the floor"] * self.raised
        return " ".join([f"{self.kind:8} {self.name}", *(f"({note})" for note in notes)])

    def expecting(self, known: str | None, unmoved: str | None = None) -> "Verdict":
        """Return this verdict on a case that should fail as `known` says, or move nothing for the reason `unmoved`."""
        if not self.ran or known is None and (unmoved is None or self.kind != "same"):
            return self
        if known is not None and self.kind in OURS:
            return replace(self, kind="expected", detail=f"{known}: {self.detail}")
        if known is not None:
            return replace(self, kind="mended", detail=f"{known} does not fail: take it out of the table")
        if self.moved:
            return replace(self, kind="mended", detail=f"something moves: take it out of the table ({unmoved})")
        return replace(self, kind="unmoved", detail=str(unmoved))
