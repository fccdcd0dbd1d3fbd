"""The program: runs a verb, and turns errors into three lines and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback

from unpad.cli import app
from unpad.errors import DiskError, Interrupted, OutOfMemoryError, RecipeError, UnpadError, is_memory_error
from unpad.processes.start import started_by_torchrun


def main() -> None:
    """Run a verb; print an error that a user can cause as three lines, without a traceback, and exit with its code."""
    prepare_streams()
    if started_by_torchrun():
        from unpad.processes.worker import run_as_worker

        run_as_worker(_run)
    else:
        _run()


def _run() -> None:
    options: dict[str, bool] = {}
    try:
        try:
            _refuse_bytes(sys.argv[1:])
            app(prog_name="unpad", obj=options)
        finally:
            sys.stdout.flush()  # raises BrokenPipeError here rather than while the interpreter ends
    except UnpadError as error:
        if options.get("debug"):
            traceback.print_exc()
        if not _is_left(error):
            print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        if options.get("debug"):
            traceback.print_exc()
        what = (str(error).splitlines() or [""])[0][:200] or "the work does not fit"
        fix = "free memory, or use less data, a smaller model or a lower plan.tokens_per_micro"
        print(OutOfMemoryError(what, fix=fix), file=sys.stderr)
        sys.exit(OutOfMemoryError.exit_code)
    except (KeyboardInterrupt, SystemExit) as end:  # the library of the verbs turns a Ctrl-C into an exit
        if isinstance(end, SystemExit) and (end.code != Interrupted.exit_code or options.get("told")):
            raise
        print("Interrupted: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(Interrupted.exit_code)
    except OSError as error:
        sys.exit(end_output(error))


def _is_left(error: UnpadError) -> bool:
    """True if another process prints the error."""
    if not started_by_torchrun():
        return False
    from unpad.processes.worker import leave_to_launcher

    return leave_to_launcher(error)


def end_output(error: OSError) -> int:
    """Give up standard output, and return the exit code; an error of another file is raised again."""
    left = isinstance(error, BrokenPipeError)  # the reader has closed the pipe, which is no error
    if not left and (error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries once more
    if left:
        return 141
    fix = "write it elsewhere, or free some space"
    print(DiskError(f"the output cannot be written: {error.strerror}", fix=fix), file=sys.stderr)
    return DiskError.exit_code


def prepare_streams() -> None:
    """Escape characters that a terminal cannot show, such as those of a file's name that is not UTF-8."""
    if sys.stdout is None:  # closed, as `unpad train >&-` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _refuse_bytes(arguments: list[str]) -> None:
    """Refuse names that are not UTF-8: no file of a run could hold them."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode("utf-8", "backslashreplace")
            fix = "rename the file or folder, for example with `convmv -f GBK -t UTF-8 --notest NAME`"
            raise RecipeError("E_NAME the name is not UTF-8", where=shown, fix=fix) from None
