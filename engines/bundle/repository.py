"""Finding bundles in a model repository, and telling whether one has changed.

Layouts
    ``name/manifest.yaml`` and ``name/model.onnx``     version 1
    ``name/model.onnx``                                version 1, manifest derived from the file
    ``name/1/model.onnx``, ``name/2/...``              one version per numeric directory

With numeric directories the model file lies in the version directory; ``manifest.yaml`` and ``model.py`` lie there too,
or in the bundle's directory, where all versions share them. Hidden files and directories are ignored, symbolic links
are followed. A directory that is no usable bundle is returned as a ``BrokenBundle`` with the reason: a model that was
meant to serve must show up as failed, never as missing.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engines.bundle.document import shown
from engines.bundle.manifest import DEFAULT_MODEL_FILE, MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest
from engines.bundle.validate import model_file_name, read_manifest
from engines.errors import NotReady

MODEL_PY: Final = "model.py"
MAX_BUNDLES: Final = 10_000
"""Bundle directories in one repository."""
MAX_VERSIONS: Final = 1_000
"""Version directories in one bundle."""
MAX_FINGERPRINT_FILES: Final = 10_000
"""Files of one bundle that a fingerprint looks at, in sorted order; changes in later ones go unseen."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,255}")
_VERSION: Final = re.compile(r"[1-9][0-9]{0,17}")
_IGNORED_FILES: Final = re.compile(
    r"\..*|config\.pbtxt|(readme|license|licence|notice|changelog|changes|authors)(\..*)?|.*\.(md|rst|pyc|swp|tmp|part)|.*~",
    re.IGNORECASE,
)
_IGNORED_DIRECTORIES: Final = re.compile(r"\..*|__pycache__")

Key = tuple[str, str]
Fingerprint = tuple[tuple[str, int, int, int], ...]


class RepositoryError(NotReady):
    """The model repository as a whole cannot be read; the message says which path and what to do."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """One version of one model, as found on disk; its manifest has not been checked yet.

    Attributes:
        path: the version directory; the bundle's directory if it has no numeric directories.
        manifest_path: None if the manifest is to be derived from the model file.
        model_file: exists, is a readable file and not empty.
        model_py: None without one.
        notes: what was ignored and why, for the log.
    """

    name: str
    version: str
    path: Path
    manifest_path: Path | None
    model_file: Path
    model_py: Path | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BrokenBundle:
    """A directory that looks like a model but cannot be loaded; ``reason`` names the file and the fix."""

    name: str
    version: str
    reason: str
    path: Path


@dataclass(frozen=True, slots=True)
class Changes:
    """How two looks at a repository differ, as (name, version) keys in order."""

    added: tuple[Key, ...]
    changed: tuple[Key, ...]
    removed: tuple[Key, ...]


def scan(root: Path) -> list[Bundle | BrokenBundle]:
    """Return every bundle version under ``root``, by name and then by ascending version.

    Raises:
        RepositoryError: ``root`` is missing, not a directory, unreadable, itself a bundle, or far too large.
    """
    names = _directories(root)
    if len(names) > MAX_BUNDLES:
        raise RepositoryError(f"model repository {root} has {len(names)} directories, the limit is {MAX_BUNDLES}")
    if not names:
        lone = next((name for name in (MANIFEST_FILE, DEFAULT_MODEL_FILE) if (root / name).is_file()), None)
        if lone is not None:
            raise RepositoryError(f"{root} holds {lone}, so it is a bundle itself; pass the directory above it")
    found: list[Bundle | BrokenBundle] = []
    for name in names:
        found += scan_bundle(root / name)
    return found


def scan_bundle(directory: Path) -> list[Bundle | BrokenBundle]:
    """Return the versions of the bundle in ``directory``, ascending; at least one entry."""
    name = os.fsencode(directory.name).decode("utf-8", "replace")
    if not _NAME.fullmatch(directory.name):
        reason = f"directory name {shown(name)}: expected letters, digits, '.', '_' and '-'; rename the directory"
        return [BrokenBundle(name, "", reason, directory)]
    try:
        children = _directories(directory)
    except RepositoryError as error:
        return [BrokenBundle(name, "", str(error), directory)]
    numeric = [child for child in children if child.isascii() and child.isdigit()]
    if not numeric:
        return [_version(name, "1", directory, directory)]
    if len(numeric) > MAX_VERSIONS:
        return [BrokenBundle(name, "", f"{len(numeric)} version directories, the limit is {MAX_VERSIONS}", directory)]
    numeric.sort(key=lambda version: (len(version), version))
    return [_version(name, version, directory, directory / version) for version in numeric]


def load_manifest(bundle: Bundle) -> Manifest:
    """Return the bundle's manifest, derived from the model file if there is no ``manifest.yaml``.

    Raises:
        ManifestError: the manifest is wrong; lists every mistake.
        NotReady: no manifest can be derived; the message says what to write.
    """
    if bundle.manifest_path is not None:
        return read_manifest(bundle.manifest_path, has_model_py=bundle.model_py is not None)
    # Imported where it is needed: reading model files takes a large library that a manifest makes unnecessary.
    from engines.bundle.derive import derive_manifest

    return derive_manifest(bundle.model_file)


def fingerprint(bundle: Bundle | BrokenBundle) -> Fingerprint:
    """Return a value that differs when a file that matters to the bundle has changed.

    Sizes, modification times and inodes of all files in the version directory (a hook may read any of them), and of
    the shared files beside the version directories; documentation, hidden and left-over files do not count. Files that
    vanish meanwhile are left out: the next look sees them gone.
    """
    parts: list[tuple[str, int, int, int]] = []
    for path in _files(bundle.path):
        _look(path, str(path.relative_to(bundle.path)), parts)
    if isinstance(bundle, Bundle):
        shared = [path for path in (bundle.manifest_path, bundle.model_py) if path and path.parent != bundle.path]
        if shared:
            above = shared[0].parent
            for name in sorted(entry.name for entry in os.scandir(above) if entry.is_file()):
                if not _IGNORED_FILES.fullmatch(name):
                    _look(above / name, f"../{name}", parts)
    return tuple(parts)


def diff(old: Mapping[Key, Fingerprint], new: Mapping[Key, Fingerprint]) -> Changes:
    """Return what happened between two looks, each a mapping from (name, version) to fingerprint."""
    return Changes(
        added=tuple(sorted(new.keys() - old.keys())),
        changed=tuple(sorted(key for key in new.keys() & old.keys() if new[key] != old[key])),
        removed=tuple(sorted(old.keys() - new.keys())),
    )


def _directories(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_directory(entry))
    except FileNotFoundError:
        raise RepositoryError(f"directory {root} does not exist; create it or name another one") from None
    except NotADirectoryError:
        raise RepositoryError(f"{root} is a file, expected a directory of bundles") from None
    except OSError as error:
        raise RepositoryError(f"directory {root} cannot be read: {error.strerror or error}") from None


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return True  # say a link to itself: opening it tells what is wrong, of this one and not of all


def _version(name: str, version: str, directory: Path, path: Path) -> Bundle | BrokenBundle:
    try:
        return _bundle(name, version, directory, path)
    except OSError as error:
        return BrokenBundle(name, version, f"{error.filename or path}: {error.strerror or error}", path)


def _bundle(name: str, version: str, directory: Path, path: Path) -> Bundle | BrokenBundle:
    if not _VERSION.fullmatch(version):
        reason = f"version directory {version!r}: expected a number from 1 without leading zeros; rename it"
        return BrokenBundle(name, version, reason, path)
    manifest_path = _own_or_shared(MANIFEST_FILE, path, directory)
    model_py = _own_or_shared(MODEL_PY, path, directory)
    for text_file in (manifest_path, model_py):
        # Opening a pipe would wait for somebody to write to it.
        if text_file is not None and not stat.S_ISREG(text_file.stat().st_mode):
            return BrokenBundle(name, version, f"{text_file} is not a regular file", path)
    file_name = DEFAULT_MODEL_FILE
    if manifest_path is not None:
        with manifest_path.open("rb") as stream:
            file_name = model_file_name(stream.read(MAX_MANIFEST_BYTES + 1))
    model_file = path / file_name
    reason = _model_file_problem(model_file, path, has_manifest=manifest_path is not None)
    if reason:
        return BrokenBundle(name, version, reason, path)
    return Bundle(name, version, path, manifest_path, model_file, model_py, _notes(path, directory, file_name))


def _own_or_shared(file_name: str, path: Path, directory: Path) -> Path | None:
    for place in dict.fromkeys((path, directory)):
        candidate = place / file_name
        # lexists, not exists: a dangling link is a mistake to report, not an absent file.
        if os.path.lexists(candidate):
            return candidate
    return None


def _model_file_problem(model_file: Path, path: Path, *, has_manifest: bool) -> str:
    """Return why the model file cannot be used, or nothing."""
    try:
        info = model_file.stat()
    except FileNotFoundError:
        if model_file.is_symlink():
            return f"model file {model_file} is a link to a file that does not exist"
        others = sorted(file.name for file in path.glob("*.onnx"))
        hint = (
            f"; found {', '.join(others[:5])}: rename it, or name it with 'model:' in {MANIFEST_FILE}" if others else ""
        )
        if has_manifest:
            return f"model file {model_file} does not exist{hint}"
        return f"neither {MANIFEST_FILE} nor {model_file.name} in {path}{hint}"
    except OSError as error:
        return f"model file {model_file} cannot be read: {error.strerror or error}"
    if stat.S_ISDIR(info.st_mode):
        return f"model file {model_file} is a directory, expected a file"
    if not stat.S_ISREG(info.st_mode):
        return f"model file {model_file} is not a regular file"
    if info.st_size == 0:
        return f"model file {model_file} is empty; if it is being copied, it is loaded once complete"
    if not os.access(model_file, os.R_OK):
        return f"model file {model_file} cannot be read: permission denied"
    return ""


def _notes(path: Path, directory: Path, file_name: str) -> tuple[str, ...]:
    notes = [
        f"{place / 'config.pbtxt'} is ignored; settings of this model go into {MANIFEST_FILE}"
        for place in dict.fromkeys((directory, path))
        if (place / "config.pbtxt").exists()
    ]
    if path != directory and (directory / file_name).exists():
        notes.append(f"{directory / file_name} is ignored; the numeric directories hold the versions")
    return tuple(notes)


def _files(root: Path) -> list[Path]:
    """Return the files under ``root`` that matter, sorted, at most ``MAX_FINGERPRINT_FILES``."""
    found: list[Path] = []
    for place, directories, names in os.walk(root):
        directories[:] = sorted(name for name in directories if not _IGNORED_DIRECTORIES.fullmatch(name))
        found += [Path(place, name) for name in sorted(names) if not _IGNORED_FILES.fullmatch(name)]
        if len(found) >= MAX_FINGERPRINT_FILES:
            break
    return found[:MAX_FINGERPRINT_FILES]


def _look(path: Path, name: str, parts: list[tuple[str, int, int, int]]) -> None:
    try:
        info = path.stat()
    except OSError:
        return
    parts.append((name, info.st_size, info.st_mtime_ns, info.st_ino))
