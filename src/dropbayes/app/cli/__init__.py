"""The command line (fit, predict, evaluate, calibrate, explain, report, serve, demo, page), quick to import."""

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.core import TyperGroup

from dropbayes.app.cli import options
from dropbayes.app.cli.fitting import demo, fit
from dropbayes.app.cli.messages import complain, note
from dropbayes.app.cli.predicting import calibrate, evaluate, explain, predict, report
from dropbayes.app.cli.serving import page, serve
from dropbayes.runtime import __version__

__all__ = ["main"]

app = typer.Typer(
    name="dropbayes",
    help="How sure is my network? Fit dropout networks to tables, and predict with honest uncertainty.",
    epilog="Exit codes: 0 success, 1 failure (data, model, disk), 2 wrong usage, 130 interrupted.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (fit, predict, evaluate, calibrate, explain, report, serve, demo, page):
    app.command()(function)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dropbayes {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, options.flag("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, options.flag("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line with some arguments, by default those of the process; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started the process
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends
    # Rich takes longer to import than all of this; in a pipe its frames only get in the way.
    app.rich_markup_mode = "rich" if sys.stdout.isatty() else None
    command = typer.main.get_group(app)
    terminated = 128 + signal.SIGTERM

    def terminate(*_: object) -> None:
        raise SystemExit(terminated)  # so that partial files are removed

    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, terminate) if in_main_thread else None
    with warnings.catch_warnings():
        warnings.showwarning = _note_warning
        try:
            code = _run(command, arguments)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe (`| head`): nothing to say, nor at the last flush
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        except KeyboardInterrupt:
            complain("interrupted; nothing was left half-written.")
            code = 130 if argv is not None else _exit_now(130)
        except SystemExit as end:
            if argv is not None or end.code != terminated:
                raise
            code = _exit_now(terminated)
        except Exception as error:
            if "--debug" in arguments or os.environ.get("DROPBAYES_DEBUG", "") not in ("", "0"):
                raise
            lines = [_error_message(error), *getattr(error, "__notes__", ())]
            for parameter in (parameter for each in command.commands.values() for parameter in each.params):
                if parameter.opts[0].startswith("--"):  # the user knows an argument by the option that sets it
                    lines = [line.replace(f"`{parameter.name}`", parameter.opts[0]) for line in lines]
            complain(lines[0], lines[1:])
            code = 1
        finally:
            if previous is not None:
                signal.signal(signal.SIGTERM, previous)
    return code


def _run(command: TyperGroup, arguments: list[str]) -> int:
    if not arguments:
        _run(command, ["--help"])
        return 2
    try:
        outcome = command.main(args=arguments, prog_name="dropbayes", standalone_mode=False, obj=arguments)
    except typer.BadParameter.__base__ as error:  # every error of usage
        name = error.ctx.command_path if error.ctx is not None else "dropbayes"
        message = (
            error.format_message().rstrip(".").replace(": Value error, ", ": ").replace(": Input should", ": must")
        )
        for fault in getattr(error.__cause__, "errors", list)():  # of pydantic, which may not repeat what was given
            message += "" if repr(fault["input"]) in message else f"; got {fault['input']!r}"
        complain(f"{message}{'' if message.endswith('?') else '.'} See {name} --help.")
        return 2
    if outcome == 130:  # typer's word for an interruption
        raise KeyboardInterrupt
    return int(outcome or 0)


def _error_message(error: Exception) -> str:
    from dropbayes.runtime.devices import is_out_of_memory

    match error:
        case OSError(strerror=str(reason), filename=name) if reason:
            return f"{'' if name is None else f'{str(name)!r}: '}{reason}."
        case _ if is_out_of_memory(error) or isinstance(error, OverflowError):  # a size beyond any memory
            return "not enough memory; try fewer rows, or a smaller --hidden, --block-rows or --n-draws."
        case ModuleNotFoundError(name=str(name)) if not name.startswith("dropbayes"):
            return f"the package {name!r} is needed for this: pip install {name}."
        case ValueError() | OSError() | FloatingPointError() | ImportError() if str(error):
            return str(error)
    return f"unexpected {type(error).__name__}: {error}. Set DROPBAYES_DEBUG=1 to see where it arose."


def _note_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    if not issubclass(category, (DeprecationWarning, FutureWarning)):
        note(message)


def _exit_now(code: int) -> int:
    """Ends the process without waiting for threads of other libraries: a reader that still blocks would abort it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
