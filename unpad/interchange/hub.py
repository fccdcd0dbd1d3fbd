"""Models by name on a hub: the required files are downloaded into the cache of huggingface_hub, and read from there.

Only the needed files are downloaded: JSON, the tokenizer, the chat template and safetensors. No code of a repository is
ever run. A complete file in the cache is not downloaded again, and without a network the cache is used.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unpad.errors import CheckpointError, DiskError, Interrupted, RecipeError, UnpadError
from unpad.run.folder import RUNS
from unpad.storage.paths import user_path

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
CONFIG = "config.json"
AGAIN = "run the same command again: files that are whole are kept"
MAIN = "main"


@dataclass(frozen=True)
class Snapshot:
    """Files of a repository at one commit, in the cache.

    Args:
        name: name of the repository; commit: its hash.
        folder: contains the files.
    """

    name: str
    commit: str
    folder: Path


def is_hub_name(name: str) -> bool:
    """True for OWNER/MODEL or OWNER/MODEL@REVISION where no file or folder has this name; a name under runs/ is that of
    a run."""
    is_name = _NAME.fullmatch(name) is not None and not name.startswith(f"{RUNS}/")
    return is_name and not user_path(name).exists()


def download_config(name: str, kind: type[UnpadError] = CheckpointError) -> Snapshot:
    """Download the config.json of a repository, a few kB.

    Raises:
        RecipeError: huggingface_hub is not installed.
        kind: there is no such repository or revision, access is denied, or the hub cannot be reached.
        DiskError: the cache cannot be written.
        Interrupted: by Ctrl-C.
    """
    hub = _Hub(name, kind)
    hub.bring([CONFIG])
    return hub.snapshot


def download_model(name: str) -> Snapshot:
    """Download everything that `import` reads from a repository, config.json first, so that an unsupported model is
    refused before its weights are downloaded.

    Raises:
        CheckpointError: as `download_config`, or the repository holds no safetensors, or a model that is not covered.
    """
    from unpad.interchange.families import family_of
    from unpad.interchange.folder import INDEX, JSON_FILES, OTHERS, WEIGHTS, read_config, read_json_files, weight_files

    hub = _Hub(name, CheckpointError)
    hub.bring([CONFIG])
    folder = hub.snapshot.folder
    given = read_json_files(folder)[CONFIG]
    read_config(folder, family_of(given, folder / CONFIG), given)
    found = [file for file in hub.files if file.endswith(".safetensors") and "/" not in file]
    if not found:
        pickled = any(file.endswith((".bin", ".pt", ".pth", ".ckpt")) for file in hub.files)
        what = f"{hub.snapshot.name} holds no safetensors" + ("; pickled weights are not read" if pickled else "")
        fix = "name a repository with safetensors, or convert the weights in a folder of your own"
        raise CheckpointError(what, where=hub.where, fix=fix)
    hub.bring([file for file in (*JSON_FILES, *OTHERS, INDEX) if file in hub.files])
    if WEIGHTS in found or INDEX not in hub.files:
        hub.bring([WEIGHTS] if WEIGHTS in found else found)
    else:
        hub.bring([path.name for path in weight_files(folder)])
    return hub.snapshot


def kept_folder(name: str, earlier: str | None) -> str | None:
    """The cached folder that a run began from, if it belongs to this repository: a resume does not ask the hub
    again."""
    found = _NAME.fullmatch(name)
    if found is None or earlier is None:
        return None
    return earlier if _cache_name(found[1]) in Path(earlier).parts else None


def _cache_name(name: str) -> str:
    return "models--" + name.replace("/", "--")


class _Hub:
    """A repository at the current commit of its revision, or at the cached one."""

    def __init__(self, name: str, kind: type[UnpadError]) -> None:
        found = _NAME.fullmatch(name)
        assert found is not None, "asked before"
        self.name, self.revision, self.kind = found[1], found[2] or MAIN, kind
        self.where = name
        try:
            from huggingface_hub import HfApi, utils
        except ImportError:
            what = f'there is no "{name}" here, and for one of a hub huggingface_hub is needed, which is not installed'
            raise RecipeError(what, where=name, fix="pip install 'unpad[hf]', or name a folder") from None
        if not sys.stderr.isatty():
            utils.disable_progress_bars()  # type: ignore[attr-defined]
        self.files: list[str] = []
        self.is_cached = False  # whether the hub could not be asked
        self.api = HfApi()
        self.snapshot = self._resolved()

    def _resolved(self) -> Snapshot:
        from huggingface_hub import errors

        with self._reported():
            try:
                info = self.api.model_info(self.name, revision=self.revision)
                self.files = [one.rfilename for one in info.siblings or []]
                return Snapshot(self.name, str(info.sha), self._cache() / "snapshots" / str(info.sha))
            except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
                raise
            except (_http_error(), errors.OfflineModeIsEnabled) as error:
                return self._cached(error)

    def _cached(self, error: Exception) -> Snapshot:
        """The cached repository, if the hub cannot be asked."""
        ref = self._cache() / "refs" / self.revision
        commit = ref.read_text("utf-8").strip() if ref.is_file() else self.revision
        folder = self._cache() / "snapshots" / commit
        if not (folder / CONFIG).is_file():
            what = f'there is no folder "{self.name}" here, and no such model in the cache'
            what += f"; the hub cannot be reached: {_reason(error)}"
            fix = "name the folder that holds it, or run this again with a network and without HF_HUB_OFFLINE"
            raise self.kind(what, where=self.where, fix=fix) from None
        self.files, self.is_cached = [path.name for path in folder.iterdir()], True
        return Snapshot(self.name, commit, folder)

    def _cache(self) -> Path:
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / _cache_name(self.name)

    def bring(self, files: Sequence[str]) -> None:
        """Download files into the cache."""
        for file in files:
            names_commit = file == CONFIG and not self.is_cached  # by the revision, which the cache then knows
            if names_commit or not (self.snapshot.folder / file).exists():
                revision = self.revision if names_commit else self.snapshot.commit
                with self._reported(file):
                    self.api.hf_hub_download(self.name, file, revision=revision)

    @contextmanager
    def _reported(self, file: str = "") -> Iterator[None]:
        """Turn errors of the library into ours."""
        from huggingface_hub import errors

        try:
            yield
        except errors.GatedRepoError:
            what, fix = f"{self.name} is gated", "ask for access on its page, and set HF_TOKEN to a token of yours"
        except errors.RevisionNotFoundError:
            what, fix = f'{self.name} has no revision "{self.revision}"', "correct what follows the @"
        except errors.RepositoryNotFoundError:
            what = f'there is no file or folder "{self.name}" here, and no such repository that you may read'
            fix = "correct the name; for a private repository set HF_TOKEN to a token of yours"
        except errors.RemoteEntryNotFoundError:
            what, fix = f"{self.name} holds no {file}", "name a repository of a model of transformers"
        except (_http_error(), errors.EntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            what, fix = f"{file} of {self.name} did not come: {_reason(error)}", AGAIN
        except KeyboardInterrupt:
            raise Interrupted(f"the download of {self.name} was stopped", fix=AGAIN) from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO):
                fix = "free some space, or set HF_HOME to a folder on another disk; then run the same command again"
                raise DiskError(str(error.strerror), where=str(self._cache()), fix=fix) from None
            what, fix = f"{file} of {self.name} did not come whole: {_reason(error)}", AGAIN
        else:
            return
        raise self.kind(what, where=self.where, fix=fix) from None


def _http_error() -> type[Exception]:
    """Base class of request errors in huggingface_hub's HTTP library."""
    from huggingface_hub import errors

    found: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    return found


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
