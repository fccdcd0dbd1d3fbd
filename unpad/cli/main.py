"""The program: runs a verb, and turns errors into three lines and an exit code."""

import errno
import io
import os
import re
import shlex
import sys
import traceback
from contextlib import suppress

from unpad import errors
from unpad.cli import app
from unpad.cli.limits import watch_address_space
from unpad.processes.worker import started_by_torchrun
from unpad.storage.paths import RENAME, is_utf8
from unpad.terminal.printing import print_error, print_text

FIELD_OPTION = re.compile(r"-+[a-z_]+(\.\w+)+(=|$)")  # as in --optim.lr=1e-4
# Names of earlier versions, of the programs of docs/migrating.md and of guesses, and the command that does it.
INSTEAD = {
    "drill": "doctor RECIPE --machine --at DIR", "bench": "plan RECIPE --measure",
    "search": "train RECIPE key=value, or examples/search.py",
    "merge": "export RUN DIR --merge", "quantize": "export RUN DIR --int8", "info": "runs RUN",
    "list": "runs", "resume": "train --resume RUN", "finetune": "train RECIPE train.init_from=RUN",
    "train-llm": "train llm", "train-image": "train images", "test": "eval RUN", "ask": "predict RUN FILE, or chat RUN",
    "classify": "predict RUN FOLDER", "risk": "predict RUN TABLES", "convert": "export RUN FOLDER", "web": "serve RUN",
    "ui": "serve RUN", "check": "data check FILE",
}  # fmt: skip
CHECK_RECIPE = "`unpad data check RECIPE.yaml` shows"  # in errors, which do not know the recipe's name
OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO)  # a full disk, and a terminal that is gone


def main() -> None:
    """Run a verb; print an error that a user can cause as three lines, without a traceback, and exit with its code."""
    prepare_streams()
    watch_address_space()
    if started_by_torchrun():
        from unpad.processes.worker import run_as_worker

        run_as_worker(_run)
        return
    try:
        _run()
    except Exception:
        _say(f"{traceback.format_exc()}\n{errors.PLEASE_REPORT}")
        sys.exit(errors.UNFORESEEN)


def _run() -> None:
    options: dict[str, bool] = {}
    try:
        _refuse_words(sys.argv[1:])
        app(prog_name="unpad", obj=options)
    except (KeyboardInterrupt, SystemExit) as end:  # the library of the verbs turns Ctrl-C and a closed pipe into exits
        if isinstance(end.__context__, BrokenPipeError):
            raise SystemExit(end_output(end.__context__)) from end
        if isinstance(end, KeyboardInterrupt) or (end.code == errors.Interrupted.exit_code and not options.get("told")):
            _say("Interrupted: stopped by Ctrl-C")
            end = SystemExit(errors.Interrupted.exit_code)
        if getattr(end.__context__, "option_name", None):  # of an option that there is none of
            _say(
                "  do: --help lists the options; docs/migrating.md has what is in the place of those of other programs"
            )
        raise SystemExit(_leave_output() or end.code) from end
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            sys.exit(end_output(error))
        known = _known(error)
        _leave_output()
        if known is None:
            raise
        if options.get("debug"):
            _say(traceback.format_exc())
        known.fix = _as_typed(known.fix)
        if not _is_left(known):
            _say_error(known)
        raise SystemExit(known.exit_code) from known


def _as_typed(fix: str) -> str:
    """A fix that checks the recipe of the command, by its name and with its changes as they were typed."""
    from unpad.cli.data import CHANGE
    from unpad.recipes.file import SUFFIXES, recipe_names

    words = sys.argv[2:] if CHECK_RECIPE in fix else []
    changes = [word for word in words if CHANGE.match(word)]
    recipes = [word for word in words if word not in changes and (word.endswith(SUFFIXES) or word in recipe_names())]
    typed = shlex.join(["unpad", "data", "check", *recipes[:1], *changes])
    return fix.replace(CHECK_RECIPE, f"`{typed}` shows") if recipes else fix


def _known(error: Exception) -> errors.UnpadError | None:
    """The user error behind an exception; None for a bug of the program."""
    if isinstance(error, errors.UnpadError):
        return error
    if isinstance(error, OSError):
        if error.filename is None:
            return None if error.errno not in OUTPUT_ERRORS else _lost_output(error)
        fix = "see that it is there, that you may use it, and that its disk is well; --debug shows where this was met"
        return errors.DiskError(error.strerror or "it cannot be used", where=os.fsdecode(error.filename), fix=fix)
    if errors.is_memory_error(error):
        what = (str(error).splitlines() or [""])[0][:200] or "the work does not fit"
        fix = "free memory, or use less data, a smaller model or a lower plan.tokens_per_micro"
        return errors.OutOfMemoryError(what, fix=fix)
    return None


def _say(text: str) -> None:
    """Print on standard error, which may be closed or full."""
    with suppress(OSError, ValueError):
        print_text(f"{text}\n", to_errors=True)


def _say_error(error: errors.UnpadError) -> None:
    with suppress(OSError, ValueError):
        print_error(error)


def _is_left(error: errors.UnpadError) -> bool:
    """True if another process prints the error."""
    if not started_by_torchrun():
        return False
    from unpad.processes.worker import leave_to_launcher

    return leave_to_launcher(error)


def _leave_output() -> int:
    """Flush standard output; the exit code if that fails, or 0."""
    try:
        sys.stdout.flush()  # fails here rather than while the interpreter ends
    except OSError as error:
        return end_output(error)
    return 0


def end_output(error: OSError) -> int:
    """Close standard output after an error, and return the exit code; an error of another file is raised again."""
    left = isinstance(error, BrokenPipeError)  # the reader has closed the pipe, which is no error
    if not left and (error.errno not in OUTPUT_ERRORS or error.filename is not None):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries once more
    if left:
        return 141
    _say_error(_lost_output(error))
    return errors.DiskError.exit_code


def _lost_output(error: OSError) -> errors.DiskError:
    fix = "write it elsewhere, or free some space"
    return errors.DiskError(f"the output cannot be written: {error.strerror}", fix=fix)


def prepare_streams() -> None:
    """Escape characters that a terminal cannot show, such as those of a file's name that is not UTF-8."""
    if sys.stdout is None:  # closed, as `unpad train >&-` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _refuse_words(arguments: list[str]) -> None:
    """Refuse words that are not UTF-8, which no file of a run could hold, and fields of recipes given as options."""
    for argument in arguments:
        if not is_utf8(argument):
            what = "E_NAME the argument is not UTF-8, and neither is the name of a file that it gives"
            fix = f"type it in a terminal of UTF-8; the file of such a name: {RENAME}"
            raise errors.RecipeError(what, where=argument, fix=fix)
    if arguments and arguments[0] in INSTEAD:
        _say(f"unpad {arguments[0]} is no verb; use: unpad {INSTEAD[arguments[0]]}")
        raise SystemExit(errors.RecipeError.exit_code)
    for argument in arguments[: arguments.index("--")] if "--" in arguments else arguments:
        if FIELD_OPTION.match(argument):
            name, _, value = argument.lstrip("-").partition("=")
            word = shlex.quote(f"{name}={value or 'VALUE'}")
            fix = f"write {word}, without dashes"
            raise errors.RecipeError("a field of a recipe is no option", where=argument, fix=fix)
