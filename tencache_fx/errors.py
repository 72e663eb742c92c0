"""What can go wrong, and who is asked to act.

TencacheError
|-- OptionError     an option is unknown or unreadable: the caller mends it
|-- BudgetError     the plan, or the run, does not fit the budgets given: raise one or shrink the work
|-- StoreError      the spill directory failed: the message says where, and what was lost
|-- UsageError      a compiled region was used in a way its plan cannot serve: the message says what to do instead
|-- RankError       another rank has failed, and this one waited for it: the message says which, and why
`-- InvariantError  a bug of ours, found by a checker before it could do harm
"""


class TencacheError(Exception):
    """Root of every error that tencache_fx raises on purpose."""


class OptionError(TencacheError, ValueError):
    """An option is unknown, or its value cannot be used."""


class BudgetError(TencacheError):
    """The work needs more of a tier than its budget allows."""


class StoreError(TencacheError, OSError):
    """The spill store could not write or read; the first line says what was lost."""


class UsageError(TencacheError):
    """A compiled region was used in a way its plan cannot serve."""


class RankError(TencacheError):
    """Another rank has failed, and the collectives in which this one waited for it were aborted."""


class InvariantError(TencacheError):
    """A rule of the plan or of the rewritten graph is broken; please report it."""
