"""Accelerate, and the Trainer over it, compile by the names of an enumeration only: `register` adds ours.

    tencache_fx.integrations.dynamo_backend.register()
    accelerator = Accelerator(dynamo_backend="tencache")

Nothing else is changed, and nothing before that call. Where accelerate knows the name by itself, nothing is done.
"""

import accelerate
from accelerate.utils import DynamoBackend

from tencache_fx.errors import UsageError

NAME = "TENCACHE"


def register() -> None:
    """Let accelerate, and so `TrainingArguments(torch_compile_backend="tencache")`, know tencache. Idempotent.

    Raises `UsageError` where accelerate's enumeration is not as this function knows it; it is then as it was.
    """
    if NAME in DynamoBackend.__members__:
        return
    try:
        _add_member()
        known = DynamoBackend(NAME) is DynamoBackend[NAME] is DynamoBackend.TENCACHE
        known = known and list(DynamoBackend)[-1].value == NAME
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        _remove_member()
        raise _unknown_inside() from error
    if not known:
        _remove_member()
        raise _unknown_inside()


def _unknown_inside() -> UsageError:
    return UsageError(
        f"accelerate {accelerate.__version__} keeps the names of its backends in a way that is not known here; leave "
        'torch_compile_backend out, and call model.compile(backend="tencache") before the Trainer or prepare().'
    )


def _add_member() -> None:
    """Make a member as `enum` itself does: one that has members can be neither subclassed nor asked for more."""
    member = str.__new__(DynamoBackend, NAME)
    member._name_ = member._value_ = NAME
    member.__objclass__ = DynamoBackend
    member._sort_order_ = len(DynamoBackend._member_names_)
    setattr(DynamoBackend, NAME, member)  # while it is no member: those cannot be set
    DynamoBackend._member_names_.append(NAME)
    DynamoBackend._member_map_[NAME] = member
    DynamoBackend._value2member_map_[NAME] = member


def _remove_member() -> None:
    """Undo what there is of `_add_member`."""
    for table in ("_member_map_", "_value2member_map_"):
        getattr(DynamoBackend, table, {}).pop(NAME, None)
    names: list[str] = getattr(DynamoBackend, "_member_names_", [])
    if NAME in names:
        names.remove(NAME)
    if NAME in vars(DynamoBackend):
        delattr(DynamoBackend, NAME)
