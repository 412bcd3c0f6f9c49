"""The command line: fit, predict, evaluate, calibrate, explain, report, demo, page.

Exit codes: 0 success, 1 failure (data, model, disk), 2 wrong usage, 130 interrupted. Nothing heavy is imported before a
command needs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from dropbayes.app.cli.messages import complain, note

__all__ = ["main"]

# Errors of data, models and machines; anything else is a bug.
_EXPECTED = (ValueError, OSError, FloatingPointError, MemoryError, ImportError)


_TERMINATED = 128 + signal.SIGTERM

_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "allow_new", "categorical", "coverage", "decimal", "delimiter", "device", "drop_prob", "encoding", "group",
        "hidden", "ignore", "keep", "learning_rate", "max_categories", "method", "missing", "n_draws", "n_networks",
        "n_steps", "prefix", "seed", "target", "task", "time", "training", "weight_decay", "weights",
    )
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    Args:
        argv: The arguments; those of the process by default.
    """
    from dropbayes.app.cli import commands, showcases  # noqa: F401  # they add themselves to the application
    from dropbayes.app.cli.application import command, debugging

    arguments = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = _note_warning  # type: ignore[assignment]
        previous = _exit_on_sigterm()
        try:
            code = _run(command(), arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            code = _leave_quietly()
        except KeyboardInterrupt:
            complain("interrupted; nothing was left half-written.")
            code = 130 if argv is not None else _exit_now(130)
        except SystemExit as end:
            if argv is not None or end.code != _TERMINATED:
                raise
            _exit_now(_TERMINATED)
        except Exception as error:
            if debugging():
                raise
            complain(_error_message(error), [_as_options(line) for line in getattr(error, "__notes__", ())])
            code = 1
        finally:
            if previous is not None:
                signal.signal(signal.SIGTERM, previous)
    return code


def _run(command: Any, arguments: list[str]) -> int:
    import typer

    usage_error: Any = typer.BadParameter.__base__
    if not arguments:
        _run(command, ["--help"])
        return 2
    try:
        outcome = command.main(args=arguments, prog_name="dropbayes", standalone_mode=False, obj=arguments)
    except usage_error as error:
        name = error.ctx.command_path if error.ctx is not None else "dropbayes"
        message = error.format_message().rstrip(".").replace(": Value error, ", ": ")
        complain(f"{message}{'' if message.endswith('?') else '.'} See {name} --help.")
        return 2
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.Exit as error:
        outcome = error.exit_code
    if outcome == 130:  # typer's word for an interruption
        raise KeyboardInterrupt
    return outcome if isinstance(outcome, int) else 0


def _error_message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        file_name = "" if error.filename is None else f"{str(error.filename)!r}: "
        return f"{file_name}{error.strerror}."
    if isinstance(error, MemoryError):
        return "not enough memory; try fewer rows, or a smaller --block-rows or --n-draws."
    if isinstance(error, ImportError) and error.name and not error.name.startswith("dropbayes"):
        return f"the package {error.name!r} is needed for this: pip install {error.name}."
    if isinstance(error, _EXPECTED) and str(error):
        return _as_options(str(error))
    return f"unexpected {type(error).__name__}: {error}. Set DROPBAYES_DEBUG=1 to see where it arose."


def _as_options(text: str) -> str:
    """The message with the arguments of the library called by the options that set them."""
    return re.sub(r"`([a-z][a-z_]*)`", lambda match: _OPTIONS.get(match[1], match[0]), text)


def _note_warning(message: Any, category: Any, *_: Any) -> None:
    if not issubclass(category, (DeprecationWarning, FutureWarning)):
        note(message)


def _leave_quietly() -> int:
    """Exits without a message when the reader has closed the pipe (`| head`), the interpreter's last flush included."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _exit_now(code: int) -> int:
    """Ends the process without waiting for threads of other libraries: a reader that still blocks would abort it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _exit_on_sigterm() -> Any:
    """Turns SIGTERM into SystemExit so that partial files are removed."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def leave(*_: Any) -> None:
        raise SystemExit(_TERMINATED)

    return signal.signal(signal.SIGTERM, leave)
