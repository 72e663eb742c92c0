"""What code of the user's raises, in one sentence: its reason, and where it came from."""

import contextlib
import logging
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tencache_fx import passes
from tencache_fx.errors import OptionError

_BELOW = (Path(str(torch.__file__)).parent, Path(__file__).parents[1], Path(str(passes.__file__)).parent)
_LIBRARIES = tuple(each.resolve() for each in _BELOW)
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")  # what torch.compile calls the rest of a function
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()


@contextlib.contextmanager
def users_code(what: str, advise: Callable[[BaseException], str], *, tell_place: bool = True) -> Iterator[None]:
    """Call code of the user's within; whatever it raises becomes an `OptionError` that says what fails, where and why.

    It may raise anything, `SystemExit` too. An interrupt passes.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        place = place_of(error) if tell_place else ""
        raise OptionError(f"{what}{place}, {reason_of(error)}; {advise(error)}.") from error


def place_of(error: BaseException) -> str:
    """Return the innermost line of the user's that an error came through, or else of a package; "" if there is none.

    Lines of Python, of torch and of this package do not count. Where torch traces, its error has those that it traced.
    """
    lines = [(each.filename, each.lineno, each.name) for each in getattr(error, "real_stack", None) or ()]
    if not lines:
        walked = traceback.walk_tb(error.__traceback__)
        lines = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]
    known = [(Path(name).resolve(), line, function) for name, line, function in lines if not name.startswith("<")]
    known = [each for each in known if not _is_library(each[0])]
    if not known:
        return ""
    path, line, function = next((each for each in reversed(known) if not _is_installed(each[0])), known[-1])
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    function = _RESUMED.sub(r"\1", function)
    return f" at {shown}:{line}" if function == "<module>" else f" at {shown}:{line}, in {function}"


def _is_library(path: Path) -> bool:
    if any(path.is_relative_to(each) for each in _LIBRARIES):
        return True
    return path.is_relative_to(_STANDARD) and not _is_installed(path)


def _is_installed(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def reason_of(error: BaseException) -> str:
    """Return what an error is, and the first line of what it says, with the next one where it only introduces that.

    >>> reason_of(ValueError("wrong field:\\n    size is -1\\nmore")), reason_of(SystemExit(3))
    ('ValueError: wrong field: size is -1', 'SystemExit: 3 (it ends the program)')
    """
    reason = _reason(type(error).__name__, str(error))
    return f"{reason} (it ends the program)" if isinstance(error, SystemExit) else reason


def reason_of_torch(error: BaseException) -> str:
    """Return the reason of an error that torch may have wrapped: of Dynamo's texts the explanation, or what it got.

    >>> reason_of_torch(RuntimeError("no call\\n  Explanation: failed: f(1): got ValueError('no size.')\\nmore"))
    'ValueError: no size'
    """
    cause: BaseException = getattr(error, "inner_exception", error)
    text = str(cause)
    if got := re.search(r": got (\w+)\((['\"])(.+?)\2,?\)$", text, re.MULTILINE):
        return _reason(got[1], got[3].replace("\\n", "\n"))
    if explained := re.search(r"^ *Explanation: (.+)$", text, re.MULTILINE):
        return _reason(type(cause).__name__, explained[1])
    return reason_of(cause)


def _reason(kind: str, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{kind}: {said.rstrip('.')}" if said else kind


@contextlib.contextmanager
def no_logged_tracebacks() -> Iterator[None]:
    """Have torch log no traceback of its own for an op that fails on fake tensors: its error is raised, too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_has_no_traceback)
    try:
        yield
    finally:
        log.removeFilter(_has_no_traceback)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info
