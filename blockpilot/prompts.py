"""Prompts of a data set: from a JSON-lines file, a text file, or a data set of the Hub.

Knows files and the ``datasets`` library; nothing of tokens or chat templates. A file is the user's own, so whatever is
wrong in it is an error with its line; rows of a Hub data set that hold no user text are skipped and counted.
"""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.config import PromptSource, project_path
from blockpilot.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_PLAIN = "{prompt}"
_CONNECT_SECONDS = 5


@dataclass(frozen=True)
class PromptRow:
    """One conversation: its user turns in order."""

    id: str
    dataset: str
    turns: tuple[str, ...]


def load_prompts(name: str, source: PromptSource) -> list[PromptRow]:
    """All prompts of one source, in its order.

    Args:
        name: name of the data set, as in ``conf/dataset``; rows that name no data set of their own get it.
        source: where to read.

    Raises:
        UserError: the source is missing, unreachable, empty or malformed; says where (file and line) and why.
    """
    readers = {"jsonl": _read_jsonl, "txt": _read_txt, "hub": _read_hub}
    return readers[source.kind](name, source)[: source.limit]


def _read_jsonl(name: str, source: PromptSource) -> list[PromptRow]:
    path = _find_file(name, source)
    rows: list[PromptRow] = []
    first_line: dict[str, int] = {}
    for number, line in _lines(path):
        place = f"{path}, line {number}"
        row = _parse_row(line, place)
        given = row.get("id", f"{name}-{path.stem}-{number}")
        dataset = row.get("dataset", name)
        if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
            raise UserError(f"{place}: id={given!r} is not allowed; expected a non-empty string")
        if not isinstance(dataset, str) or not dataset:
            raise UserError(f"{place}: dataset={dataset!r} is not allowed; expected a non-empty string")
        earlier = first_line.setdefault(str(given), number)
        if earlier != number:
            raise UserError(f"{place}: id={given!r} is already used on line {earlier}; ids must differ")
        turns = tuple(_fill(source.template, turn, row, place) for turn in _row_turns(row, place))
        if _kept(row, source, place):
            rows.append(PromptRow(str(given), dataset, turns))
    return _not_empty(rows, path, source)


def _read_txt(name: str, source: PromptSource) -> list[PromptRow]:
    path = _find_file(name, source)
    rows = [
        PromptRow(
            f"{name}-{path.stem}-{number}", name, (_fill(source.template, line.strip(), {}, f"{path}, line {number}"),)
        )
        for number, line in _lines(path)
    ]
    return _not_empty(rows, path, source)


def _not_empty(rows: list[PromptRow], path: Path, source: PromptSource) -> list[PromptRow]:
    if not rows:
        raise UserError(f"{path}: the file holds no prompts{f' with only={source.only}' if source.only else ''}")
    return rows


def _kept(row: Mapping[str, Any], source: PromptSource, place: str) -> bool:
    """Whether the row's columns have the values that ``source.only`` keeps."""
    for column, values in (source.only or {}).items():
        if column not in row:
            raise UserError(f"{place}: only names {column!r}; the row has {', '.join(row)}")
        if str(row[column]) not in values:
            return False
    return True


def _find_file(name: str, source: PromptSource) -> Path:
    if not source.path:
        raise UserError(
            f"dataset.{name}: kind={source.kind} needs path, got {source.path!r}; set dataset.{name}.train.path=FILE"
        )
    path = project_path(source.path)
    if not path.is_file():
        raise UserError(f"dataset.{name}: there is no file {source.path!r}; looked in {_places(source.path)}")
    return path


def _places(path: str) -> str:
    """Every place where ``path`` is looked for: one if absolute, else working directory and project."""
    return " and ".join(dict.fromkeys((str(Path(path).expanduser().absolute()), str(project_path(path)))))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers (from 1) and texts of the lines that are not blank.

    Bytes are split before they are decoded, so that a bad one is reported with its line, and so that the separators
    only Python takes for line ends (such as U+2028, legal inside JSON strings) do not cut a line.
    """
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    for number, raw in enumerate(content.split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number}: not valid UTF-8 (byte {error.start + 1} of the line)") from None
        if line.strip():
            yield number, line


def _parse_row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate escape parses, but no tokenizer can read it
    except UnicodeEncodeError:
        raise UserError(f"{place}: holds half of a surrogate pair, which is not text") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: expected a JSON object with turns, got {_short(row)}")
    return row


def _row_turns(row: Mapping[str, Any], place: str) -> list[str]:
    if "turns" not in row and "prompt" not in row:
        raise UserError(f"{place}: has neither turns nor prompt; keys are {', '.join(row) or 'none'}")
    key = "turns" if "turns" in row else "prompt"
    turns = row[key] if key == "turns" else [row[key]]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{place}: turns must be a non-empty list of strings, got {_short(turns)}")
    for index, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            where = f"turns[{index}]" if key == "turns" else key
            raise UserError(f"{place}: {where} must be a non-empty string, got {_short(turn)}")
    return turns


def _short(value: object) -> str:
    """A JSON value as text fit for one line."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fill(template: str, prompt: str, columns: Mapping[str, Any], place: str) -> str:
    """The template around one turn; blank ends that empty columns leave are cut."""
    if template == _PLAIN:
        return prompt
    try:
        return template.format(**{**columns, "prompt": prompt}).strip()
    except KeyError as error:
        names = ", ".join(dict.fromkeys(("prompt", *columns)))
        raise UserError(f"{place}: template names {error.args[0]!r}; the row has {names}") from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise UserError(f"{place}: template={template!r} cannot be filled: {error}") from None


# --- the Hub


def _read_hub(name: str, source: PromptSource) -> list[PromptRow]:
    for key in ("repo", "split", "field"):
        if not getattr(source, key):
            raise UserError(f"dataset.{name}: kind=hub needs {key}, got {getattr(source, key)!r}")
    assert source.field is not None
    data = _load_hub(name, source)
    place = f"dataset.{name}: {source.repo}"
    data = data.select_columns(_needed_columns(source, data.column_names, place))  # the others can be large
    prefix = "-".join(part for part in (name, source.subset, source.split) if part)
    rows: list[PromptRow] = []
    skipped = 0
    for index, record in enumerate(data):
        if len(rows) == source.limit:
            break
        assert isinstance(record, dict)
        if not _kept(record, source, f"{place}, row {index}"):
            continue
        turns = _user_turns(record[source.field])
        if not turns:
            skipped += 1
            continue
        filled = tuple(_fill(source.template, turn, record, f"{place}, row {index}") for turn in turns)
        rows.append(PromptRow(f"{prefix}-{index}", name, filled))
    if not rows:
        kept = f" with only={source.only}" if source.only else ""
        raise UserError(f"{place}: no user text in column {source.field!r} of any of its {skipped} rows{kept}")
    if skipped:
        log.warning("%s: skipped %d rows without user text", place, skipped)
    return rows


def _needed_columns(source: PromptSource, columns: list[str], place: str) -> list[str]:
    assert source.field is not None
    try:
        named = {name for _, name, _, _ in string.Formatter().parse(source.template) if name} - {"prompt"}
        named |= set(source.only or {})
    except ValueError as error:
        raise UserError(f"{place}: template={source.template!r} is malformed: {error}") from None
    for column in (source.field, *sorted(named)):
        if column not in columns:
            raise UserError(f"{place} has no column {column!r}; expected one of {', '.join(columns)}")
    return [column for column in columns if column == source.field or column in named]


def _user_turns(value: object) -> list[str]:
    """User turns of a column's value: a string, a list of strings, or a list of chat messages; [] if it has none.

    Messages are ``{"role": "user", "content": ...}`` or, as ShareGPT has them, ``{"from": "human", "value": ...}``.
    """
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict) for item in items):
        messages = [item for item in items if isinstance(item, dict)]
        users = [message for message in messages if message.get("role", message.get("from")) in ("user", "human")]
        items = [message.get("content", message.get("value")) for message in users]
    turns = [item for item in items if isinstance(item, str) and item.strip()]
    return turns if len(turns) == len(items) else []


def _load_hub(name: str, source: PromptSource) -> Dataset:
    import datasets  # here, since importing it takes a second that jsonl and txt need not wait
    from datasets.exceptions import DatasetsError

    assert source.repo is not None
    folder = project_path(source.repo)
    local = folder.is_dir()
    reachable = local or _reachable(name, source)
    try:
        if local and ((folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()):
            loaded = datasets.load_from_disk(folder)  # what save_to_disk wrote; load_dataset refuses it
        else:
            with _offline(not reachable):
                loaded = datasets.load_dataset(str(folder) if local else source.repo, source.subset, split=source.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if not reachable:
            reason = "the Hub cannot be reached and the local cache has no copy of it"
        raise UserError(_unloaded(name, source, reason)) from error
    if isinstance(loaded, datasets.DatasetDict):
        if source.split not in loaded:
            raise UserError(_unloaded(name, source, f"the folder has the splits {', '.join(map(str, loaded))}"))
        loaded = loaded[source.split]
    assert isinstance(loaded, datasets.Dataset)
    return loaded


def _reachable(name: str, source: PromptSource) -> bool:
    """Whether the Hub answers at all; asked first because ``load_dataset`` retries for half a minute when it does not.

    Raises:
        UserError: the Hub answers that there is no such data set, or none for this user.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    assert source.repo is not None
    try:
        HfApi().dataset_info(source.repo, timeout=_CONNECT_SECONDS)
    except HFValidationError:
        raise UserError(
            f"dataset.{name}: repo={source.repo!r} is neither a folder nor a Hub id; looked in {_places(source.repo)}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(_unloaded(name, source, "the Hub has no such data set, or it needs a login")) from None
    except HfHubHTTPError:
        return True  # it answers; load_dataset says what is wrong
    except Exception:  # no network: whatever the client's HTTP library raises
        return False
    return True


@contextmanager
def _offline(active: bool) -> Iterator[None]:
    """While active, ``datasets`` reads its local cache and asks nobody."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or active
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _unloaded(name: str, source: PromptSource, reason: str) -> str:
    subset = f" subset {source.subset!r}," if source.subset else ""
    return (
        f"dataset.{name}: repo={source.repo!r},{subset} split {source.split!r} could not be loaded: {reason}; "
        f"to use local prompts set dataset=jsonl dataset.jsonl.train.path=FILE, or repo=FOLDER with a copy of it"
    )
