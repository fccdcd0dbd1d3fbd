"""Models by name on a hub: the required files are downloaded into the cache of huggingface_hub, and read from there.

Only the needed files are downloaded: JSON, the tokenizer, the chat template and safetensors. No code of a repository is
ever run. A complete file in the cache is not downloaded again, and without a network the cache is used.
"""

import errno
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unpad.errors import CheckpointError, DiskError, Interrupted, RecipeError, UnpadError
from unpad.run.folder import RUNS
from unpad.storage.paths import user_path

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
CONFIG = "config.json"
AGAIN = "run the same command again: files that are whole are kept"


def is_hub_name(name: str) -> bool:
    """True for OWNER/MODEL or OWNER/MODEL@REVISION where no file or folder has this name; a name under runs/ is that of
    a run."""
    return _NAME.fullmatch(name) is not None and not name.startswith(f"{RUNS}/") and not user_path(name).exists()


def download_model(name: str) -> "Snapshot":
    """Download everything that `import` reads from a repository, config.json first, so that an unsupported model is
    refused before its weights are downloaded.

    Raises:
        CheckpointError: as `Snapshot`, or the repository holds no safetensors, or a model that is not covered.
    """
    from unpad.interchange.families import family_of
    from unpad.interchange.folder import INDEX, JSON_FILES, OTHERS, WEIGHTS, read_config, read_json_files, weight_files

    snapshot = Snapshot(name, CheckpointError)
    given = read_json_files(snapshot.folder)[CONFIG]
    read_config(snapshot.folder, family_of(given, snapshot.folder / CONFIG), given)
    weights = [file for file in snapshot.files if file.endswith(".safetensors") and "/" not in file]
    if not weights:
        pickled = any(file.endswith((".bin", ".pt", ".pth", ".ckpt")) for file in snapshot.files)
        what = f"{snapshot.name} holds no safetensors" + ("; pickled weights are not read" if pickled else "")
        fix = "name a repository with safetensors, or convert the weights in a folder of your own"
        raise CheckpointError(what, where=name, fix=fix)
    snapshot.bring([file for file in (*JSON_FILES, *OTHERS, INDEX) if file in snapshot.files])
    if WEIGHTS in weights:
        weights = [WEIGHTS]
    elif INDEX in snapshot.files:
        weights = [path.name for path in weight_files(snapshot.folder)]
    snapshot.bring(weights)
    return snapshot


def kept_folder(name: str, earlier: str | None) -> str | None:
    """The cached folder that a run began from, if it belongs to this repository: a resume does not ask the hub
    again."""
    parsed = _NAME.fullmatch(name)
    if parsed is None or earlier is None:
        return None
    return earlier if _cache_name(parsed[1]) in Path(earlier).parts else None


def _cache_name(name: str) -> str:
    return "models--" + name.replace("/", "--")


class Snapshot:
    """Files of a repository at the current commit of its revision, or at the cached one where the hub cannot be asked.

    Args:
        where: OWNER/MODEL or OWNER/MODEL@REVISION.
        kind: class of errors about the repository.

    Attributes:
        name: OWNER/MODEL.
        commit: its hash.
        folder: of the cache, with the files that were brought; config.json first.
        files: names of all files of the repository.

    Raises:
        RecipeError: huggingface_hub is not installed.
        kind: there is no such repository or revision, access is denied, or the hub cannot be reached.
        DiskError: the cache cannot be written.
        Interrupted: by Ctrl-C.
    """

    def __init__(self, where: str, kind: type[UnpadError]) -> None:
        parsed = _NAME.fullmatch(where)
        assert parsed is not None, "asked before"
        self.where, self.kind, self.name, self.revision = where, kind, parsed[1], parsed[2] or "main"
        try:
            from huggingface_hub import HfApi, constants, errors
            from huggingface_hub.utils.tqdm import disable_progress_bars
        except ImportError:
            what = f'there is no "{where}" here, and for one of a hub huggingface_hub is needed, which is not installed'
            raise RecipeError(what, where=where, fix="pip install 'unpad[hf]', or name a folder") from None
        if not sys.stderr.isatty():
            disable_progress_bars()
        self.api, self.cache = HfApi(), Path(constants.HF_HUB_CACHE) / _cache_name(self.name)
        with self._reported():
            try:
                info = self.api.model_info(self.name, revision=self.revision)
                self.commit, self.files = str(info.sha), [file.rfilename for file in info.siblings or []]
            except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
                raise
            except (_http_error(), errors.OfflineModeIsEnabled) as error:
                self._use_cache(error)
                return
        self.folder = self.cache / "snapshots" / self.commit
        self._download(CONFIG, self.revision)  # by the revision, which the cache then knows

    def _use_cache(self, error: Exception) -> None:
        """Take the cached repository."""
        ref = self.cache / "refs" / self.revision
        self.commit = ref.read_text("utf-8").strip() if ref.is_file() else self.revision
        self.folder = self.cache / "snapshots" / self.commit
        if not (self.folder / CONFIG).is_file():
            what = f'there is no folder "{self.name}" here, and no such model in the cache'
            what += f"; the hub cannot be reached: {_reason(error)}"
            fix = "name the folder that holds it, or run this again with a network and without HF_HUB_OFFLINE"
            raise self.kind(what, where=self.where, fix=fix) from None
        self.files = [path.name for path in self.folder.iterdir()]

    def bring(self, files: Sequence[str]) -> None:
        """Download the files that the cache lacks."""
        for file in files:
            if not (self.folder / file).exists():
                self._download(file, self.commit)

    def _download(self, file: str, revision: str) -> None:
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
                raise DiskError(str(error.strerror), where=str(self.cache), fix=fix) from None
            what, fix = f"{file} of {self.name} did not come whole: {_reason(error)}", AGAIN
        else:
            return
        raise self.kind(what, where=self.where, fix=fix) from None


def _http_error() -> type[Exception]:
    """Base class of request errors in huggingface_hub's HTTP library."""
    from huggingface_hub import errors

    return errors.HTTPError  # type: ignore[attr-defined]


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
