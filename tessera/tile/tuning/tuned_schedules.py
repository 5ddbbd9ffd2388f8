"""Tuned schedules on disk: one JSON file per kernel, types, extents and GPU (the schema:
docs/reference/schedules.md).

    cache = TuningCache(folder)        cache.find(key)    cache.store(entry)
    cache.export(path)                 cache.load(path)   all entries in one file, and back

Nothing in a file is executed, and a schedule is taken from it only if it is one of the candidates.
A damaged file is a warning, and the kernel is tuned again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from tessera import config
from tessera.errors import ArgumentError, TesseraError, user_line
from tessera.lazy_dataclass import dataclass
from tessera.tile.ir.schedule import Schedule

ENTRY, EXPORT, VERSION = "tessera.schedule", "tessera.schedules", 1
# Field -> type, of a key and of an entry: the schema that docs/reference/schedules.md describes.
KEY: dict[str, type | tuple] = {
    "kernel": str, "hash": str, "shapes": dict, "types": dict, "constants": dict, "space": str,
    "arch": str, "gpu": str, "metric": str, "bench": str, "user": str}
FIELDS: dict[str, type | tuple] = {
    "schema": str, "version": int, "key": dict, "schedule": dict, "measured_ms": (int, float)}
OPTIONAL: dict[str, type | tuple] = {"trials": list, "estimate_us": (int, float, type(None))}
LOCK_POLL_S = 0.05


class TuningCacheWarning(RuntimeWarning):
    """A file of the cache that cannot be read or written."""


@dataclass(frozen=True)
class TunedSchedule:
    """A tuned schedule. key: what it holds for; trials: what else was measured, as plain data."""

    key: dict[str, Any]
    schedule: Schedule
    measured_ms: float
    estimate_us: float | None = None
    trials: list[dict[str, Any]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return digest(self.key)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": ENTRY, "version": VERSION, "key": self.key,
                "schedule": self.schedule.to_dict(), "measured_ms": self.measured_ms,
                "estimate_us": self.estimate_us, "trials": self.trials}

    @staticmethod
    def from_dict(document: Any, where: str) -> TunedSchedule:
        """Raises ArgumentError naming `where` and what is wrong."""
        _require(document, FIELDS, OPTIONAL, where)
        _require_version(document, ENTRY, where)
        _require(document["key"], KEY, {}, f"{where}, key")
        try:
            schedule = Schedule.from_dict(document["schedule"], source="tuned")
        except ArgumentError as err:
            raise ArgumentError(f"{where}, schedule: {err.message}", where=user_line()) from None
        return TunedSchedule(document["key"], schedule, float(document["measured_ms"]),
                             document.get("estimate_us"), document.get("trials", []))


def digest(key: dict[str, Any]) -> str:
    """The name of an entry: a hash of its key, the same on every machine."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def _require(document: Any, fields: dict[str, Any], optional: dict[str, Any], where: str) -> None:
    if not isinstance(document, dict):
        raise ArgumentError(f"{where} is no JSON object but {type(document).__name__}",
                            where=user_line())
    for name, kind in fields.items():
        if not isinstance(document.get(name), kind) or isinstance(document.get(name), bool):
            raise ArgumentError(f"{where}: the field {name!r} is {document.get(name)!r}",
                                hint=f"it must be {_words(kind)}", where=user_line())
    for name, value in document.items():
        if name not in fields and name not in optional:
            raise ArgumentError(f"{where}: unknown field {name!r}",
                                hint=f"fields: {', '.join([*fields, *optional])}",
                                where=user_line())
        if name in optional and not isinstance(value, optional[name]):
            raise ArgumentError(f"{where}: the field {name!r} is {value!r}", where=user_line())


def _words(kind: type | tuple) -> str:
    words = {str: "text", int: "an integer", dict: "an object", list: "a list", float: "a number"}
    return words[kind if isinstance(kind, type) else kind[-1]]


def _require_version(document: dict[str, Any], schema: str, where: str) -> None:
    if document["schema"] != schema:
        raise ArgumentError(f"{where} is {document['schema']!r}, not {schema!r}",
                            where=user_line())
    if document["version"] != VERSION:
        raise ArgumentError(f"{where} has version {document['version']}, this Tessera reads "
                            f"{VERSION}", hint="tune again, or use the Tessera that wrote it",
                            where=user_line())


@dataclass(frozen=True)
class TuningCache:
    """A folder of entries."""

    folder: Path

    @staticmethod
    def of(cache: Any) -> TuningCache | None:
        """cache=None: below the cache folder of the settings; a path; False: none."""
        if cache is False:
            return None
        if cache is None or cache is True:
            return TuningCache(Path(config.get("cache_dir")) / "sched")
        if isinstance(cache, str | os.PathLike) and os.fspath(cache):
            return TuningCache(Path(cache).expanduser())
        raise ArgumentError(f"cache={cache!r}: a folder, None for the default one, or False",
                            where=user_line())

    def path(self, key: dict[str, Any]) -> Path:
        return self.folder / f"{_safe(key['kernel'])}-{digest(key)}.json"

    def find(self, key: dict[str, Any]) -> TunedSchedule | None:
        """The entry for a key. A file that is damaged is named in a warning."""
        path = self.path(key)
        try:
            found = TunedSchedule.from_dict(json.loads(path.read_text()), str(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TesseraError) as err:
            _warn(f"the tuned schedule in {path} cannot be read ({_first_line(err)}): the kernel "
                  "is tuned again")
            return None
        if found.key != key:
            _warn(f"{path} holds another kernel's schedule: the kernel is tuned again")
            return None
        return found

    def store(self, entry: TunedSchedule) -> None:
        """Writes beside its place and renames, so that readers see whole files. A folder that
        cannot be written is a warning: the choice holds in this process."""
        try:
            self._make()
            write_whole(self.path(entry.key), _json(entry.to_dict()))
        except OSError as err:
            _warn(f"the tuned schedule of {entry.key['kernel']} cannot be kept: {err}")

    def _make(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def entries(self, kernel: str | None = None) -> list[TunedSchedule]:
        """All sound entries, or those of one kernel."""
        found = []
        pattern = "*.json" if kernel is None else f"{_safe(kernel)}-*.json"
        for path in sorted(self.folder.glob(pattern)):
            try:
                found.append(TunedSchedule.from_dict(json.loads(path.read_text()), str(path)))
            except (OSError, ValueError, TesseraError) as err:
                _warn(f"{path} is left out: {_first_line(err)}")
        return [e for e in found if kernel is None or e.key["kernel"] == kernel]

    def export(self, path: Any) -> int:
        """Writes all entries to one file; how many."""
        return export(path, self.entries())

    def load(self, path: Any) -> int:
        """Adds the entries of an exported file, replacing those of the same keys; how many."""
        found = read_export(path)
        for entry in found:
            self.store(entry)
        return len(found)

    def clear(self) -> int:
        """Removes all entries; how many there were."""
        files = list(self.folder.glob("*.json"))
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    @contextlib.contextmanager
    def tuning(self, limit_s: float) -> Iterator[None]:
        """One process at a time tunes with a folder: the others wait and find its result.

        The lock goes with its process. After limit_s a waiting process goes on by itself, and so
        does one that cannot write here.
        """
        try:
            self._make()
            lock = open(self.folder / ".tuning", "a")  # noqa: SIM115  closed below
        except OSError:
            yield
            return
        with lock:
            _wait(lock, limit_s)
            yield  # closing the file gives the lock back


def _wait(lock: Any, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                return
            time.sleep(LOCK_POLL_S)
        except OSError:  # a file system without locks
            return


def export(path: Any, entries: Iterable[TunedSchedule]) -> int:
    """One file of entries, to be carried elsewhere; how many."""
    found = list(entries)
    target = _path(path)
    document = {"schema": EXPORT, "version": VERSION,
                "entries": [e.to_dict() for e in sorted(found, key=lambda e: e.digest)]}
    try:
        write_whole(target, _json(document))
    except OSError as err:
        raise ArgumentError(f"{target} cannot be written: {err.strerror}",
                            where=user_line()) from None
    return len(found)


def read_export(path: Any) -> list[TunedSchedule]:
    """The entries of an exported file. Raises ArgumentError for one that is not sound."""
    source = _path(path)
    try:
        document = json.loads(source.read_text())
    except OSError as err:
        raise ArgumentError(f"{source} cannot be read: {err.strerror}",
                            where=user_line()) from None
    except ValueError as err:
        raise ArgumentError(f"{source} is no JSON: {_first_line(err)}", where=user_line()) from None
    _require(document, {"schema": str, "version": int, "entries": list}, {}, str(source))
    _require_version(document, EXPORT, str(source))
    return [TunedSchedule.from_dict(e, f"{source}, entry {i}") for i,
            e in enumerate(document["entries"])]


def write_whole(path: Path, text: str) -> None:
    """A file that is there as a whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _json(document: Any) -> str:
    return json.dumps(document, indent=1, sort_keys=True)


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ArgumentError(f"{path!r} is no path", where=user_line())
    return Path(path).expanduser()


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)


def _first_line(err: Exception) -> str:
    return (err.message if isinstance(err, TesseraError) else str(err)).splitlines()[0]


def _warn(text: str) -> None:
    warnings.warn(text, TuningCacheWarning, stacklevel=2)


__all__ = ["TunedSchedule", "TuningCache", "TuningCacheWarning", "digest", "export",
           "read_export", "write_whole"]
