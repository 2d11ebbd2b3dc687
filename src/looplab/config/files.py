"""Config files: JSON, YAML, TOML and INI, distinguished by their suffix.

`read_config` returns plain data; `read_document` returns a structure that keeps comments and order when written back.
Every problem with a file is a LabError with its name and line. Files are written atomically.
"""

from __future__ import annotations

import configparser
import contextlib
import copy
import errno
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.config.paths import child, leaves, show
from looplab.errors import LabError
from looplab.untrusted import UntrustedError, check_depth, check_int, mend, mend_text, read_bounded

if TYPE_CHECKING:
    from ruamel.yaml import YAML

_FORMATS = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".ini": "ini", ".cfg": "ini"}
_PLAIN = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = (dict, list, tuple)
# Not orjson: the standard library formats floats like `repr`, which no package upgrade can change.
_CANONICAL = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"))
_TOO_DEEP = "is nested too deeply, or an anchor contains itself"
MAX_BYTES = 256 << 20
"""Maximum size of a config file."""
MAX_NODES = 1_000_000
"""Maximum number of values of a YAML file after expanding its aliases; a few lines can expand to billions."""
_INI_INT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_INI_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_ALIAS = re.compile(r"\*[^\s\[\]{},]")
_counter = itertools.count()


class NotAMapping(LabError):
    """A file has a list or a single value where a mapping of keys to values is expected."""


def read_config(path: Path) -> dict[str, Any]:
    """Read a config as plain data: dict, list, str, int, float, bool, None. Dates become ISO text, keys become text.

    Raises:
        LabError: The file is missing, unreadable or not a mapping.
    """
    form, text = _read_text(path)
    with _bounded(path):
        if form == "json":
            return _mapping(path, text, _parse_json(path, text))
        if form == "toml":
            return _plain_in(path, _parse_toml(path, text))
        if form == "ini":
            return _plain_in(path, _parse_ini(path, text))
        return _plain_in(path, _mapping(path, text, _parse_yaml(path, text, "safe")))


def read_document(path: Path) -> Document:
    """Read a config into a structure that keeps comments and order; raises as `read_config` does."""
    form, text = _read_text(path)
    with _bounded(path):
        if form == "json":
            return Document(path, form, _mapping(path, text, _parse_json(path, text)))
        if form == "toml":
            return Document(path, form, _parse_toml_document(path, text))
        if form == "ini":
            return Document(path, form, _plain_in(path, _parse_ini(path, text)))
        data = _mapping(path, text, _parse_yaml(path, text, "rt"))
        _plain_in(path, data)  # rejects early what cannot become plain data
        return Document(path, form, data, _yaml_style(text))


@contextlib.contextmanager
def _bounded(path: Path) -> Iterator[None]:
    """Turn errors about unbounded data into a LabError that names the file."""
    try:
        yield
    except RecursionError:
        raise LabError(_TOO_DEEP, file=path) from None
    except UntrustedError as error:
        raise LabError(str(error), file=path) from None


@dataclass(frozen=True, slots=True)
class YamlStyle:
    """Layout of a YAML file, used to write it back in the same style."""

    mapping: int = 2
    """Spaces of indentation of a nested mapping."""
    dash: int = 0
    """Spaces before the dash of a nested list."""
    after_dash: int = 2
    """Width of the dash and the spaces after it."""
    head: str | None = None
    """Comments above the leading `---`; None: the document has no leading `---`."""


@dataclass(frozen=True, slots=True)
class Document:
    """A config file that can be edited and written back with its comments."""

    path: Path
    """The file it was read from."""
    form: str
    """`json`, `yaml`, `toml` or `ini`; an INI file loses its comments."""
    data: Any
    """The round-trip structure, which behaves like dicts and lists."""
    style: YamlStyle = YamlStyle()
    """Layout of a YAML file."""

    def plain(self) -> dict[str, Any]:
        """Return the data as `read_config` would."""
        return _plain_in(self.path, self.data)

    def with_data(self, data: Any) -> Document:
        """Return the document with other data, such as the result of edits."""
        return replace(self, data=data)

    def line_of(self, path: tuple[str | int, ...]) -> int | None:
        """Return the line (from 1) of a key or list item; None: unknown, as in JSON and TOML."""
        node, line = self.data, None
        for part in path:
            key = child(node, str(part))
            lines = getattr(node, "lc", None)
            if key is None or lines is None:
                return None
            known = (lines.data or {}).get(key)
            line = None if known is None else int(known[0]) + 1
            node = node[key]
        return line

    def text(self) -> str:
        """Return the document in its own format."""
        return _dump(self.data, self.form, self.path, self.style).decode()

    def save(self, path: Path) -> None:
        """Write the document; a path with the suffix of another format gets the plain data in that format."""
        form = _form(path)
        write_atomic(path, _dump(self.data if form == self.form else self.plain(), form, path, self.style))


def dump_config(path: Path, data: Any) -> bytes:
    """Return plain data as bytes in the format of the path's suffix."""
    return _dump(data, _form(path), path, YamlStyle())


def write_atomic(path: Path | str, content: bytes, *, sync: bool = True, mode: int = 0o666) -> None:
    """Write a file atomically: readers see the old content or the new; with `sync` it survives a power failure."""
    folder, name = os.path.split(path)
    prefix = f"{folder}/.tmp-" if folder else ".tmp-"
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    while True:
        temporary = f"{prefix}{os.getpid()}-{next(_counter)}"
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            break
        except FileExistsError:
            continue  # left behind by a process with the same PID, or in use on another machine
    try:
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(handle, rest) :]
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # report the first error
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = str(path)  # a failed write has no file name, a failed replace the temporary one
        raise
    if sync:
        sync_folder(folder or ".")


def sync_file(path: str | Path) -> None:
    """Flush the content of a file to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: str | Path) -> None:
    """Flush the entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts do not support it
            raise
    finally:
        os.close(handle)


def dump_json(data: Any, *, finite: bool = False) -> bytes:
    """Return plain data as JSON, indented by two spaces, with its key order, NaN, infinities and large ints.

    Args:
        data: Plain data.
        finite: The caller guarantees that there are no NaN and infinities.
    """
    import orjson

    try:
        content = orjson.dumps(
            data,
            option=orjson.OPT_INDENT_2
            | orjson.OPT_APPEND_NEWLINE
            | orjson.OPT_PASSTHROUGH_DATACLASS
            | orjson.OPT_PASSTHROUGH_DATETIME,
        )
    except TypeError:
        return _slow_json(data)
    # orjson writes null for values that are not finite; most data has no null, so the walk is rare.
    if not finite and b"null" in content and has_non_finite(data):
        return _slow_json(data)
    return content


def _slow_json(data: Any) -> bytes:
    try:
        return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate can only be written escaped
        return (json.dumps(data, indent=2) + "\n").encode()


def has_non_finite(data: Any) -> bool:
    """Return whether plain data contains NaN or an infinity."""
    stack: list[Any] = [[data]]
    while stack:
        node = stack.pop()
        for value in node.values() if isinstance(node, dict) else node:
            if type(value) is float:
                if value - value != 0.0:  # NaN unless the value is finite
                    return True
            elif isinstance(value, _CONTAINERS):
                stack.append(value)
    return False


def canonical_json(data: Any) -> bytes:
    """Return canonical JSON for hashing: sorted keys, no spaces; 1 and 1.0 differ.

    Raises:
        TypeError: A key is not text; different data could then have the same JSON.
    """
    import orjson

    try:
        orjson.dumps(data)  # accepts only text keys, and is much faster than a walk
    except TypeError:  # a key, or a value that it does not support
        _check_keys(data)
    return _CANONICAL.encode(data).encode("utf-8", "surrogatepass")


def _check_keys(data: Any) -> None:
    """Raise TypeError if a key is not text."""
    stack: list[Any] = [[data]]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            for key in node:
                if not isinstance(key, str):
                    raise TypeError(f"a key must be text, not {key!r}")
            node = node.values()
        stack.extend([value for value in node if isinstance(value, _CONTAINERS)])


def hash_config(config: Mapping[str, Any]) -> str:
    """Return the hash that identifies a config in the ledger."""
    return hashlib.sha256(canonical_json(config)).hexdigest()[:16]


def plain(data: Any) -> Any:
    """Return a plain copy: wrappers of the YAML and TOML libraries are removed, dates and keys become text."""
    if type(data) is str:
        return mend_text(data)
    if type(data) in _PLAIN:
        return data if type(data) is not int else check_int(data)
    if isinstance(data, dict):
        result: dict[str, Any] = {}
        for key, value in data.items():
            text = mend_text(key) if type(key) is str else _key_text(key)
            if text in result:
                raise ValueError(f"the key {text!r} occurs twice, once as text and once as another type")
            result[text] = plain(value)
        return result
    if isinstance(data, list | tuple):
        return [plain(item) for item in data]
    if hasattr(data, "unwrap"):  # a bool in a TOML list is wrapped
        return plain(data.unwrap())
    if isinstance(data, str):
        return mend_text(str(data))
    for kind in (bool, int, float):
        if isinstance(data, kind):
            return plain(kind(data))
    if hasattr(data, "isoformat"):
        return data.isoformat()
    raise TypeError(f"a config cannot contain a {type(data).__name__}")


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return mend_text(str(key))
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    if hasattr(key, "isoformat"):
        return str(key.isoformat())
    raise TypeError("a key must be text or a number, not a list or a mapping")


def _plain_in(path: Path, data: Any) -> dict[str, Any]:
    try:
        result: dict[str, Any] = plain(check_depth(data))
    except UntrustedError:
        raise
    except (TypeError, ValueError) as error:
        raise LabError(str(error), file=path) from None
    return result


def copy_document(data: Any) -> Any:
    """Return a deep copy of a document's data with its comments; keys merged by YAML's `<<` become ordinary keys."""
    data = copy.deepcopy(data)
    stack = [data]
    while stack:
        node = stack.pop()
        if hasattr(node, "_yaml_merge"):
            del node._yaml_merge  # its keys were copied into the mapping; otherwise both would be written
        stack.extend(node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
    return data


def put(parent: Any, key: str | int, value: Any) -> None:
    """Set a child, or add it at the end.

    The YAML reader attaches the comment lines below a block to the block's last child. They usually describe what
    follows, so they stay below the new child.
    """
    keys = _keys(parent)
    if isinstance(parent, list) and key == len(parent):
        parent.append(value)
    else:
        parent[key] = value
    if keys and key not in keys and not isinstance(value, dict | list):
        _move_comment_below(parent, keys[-1], key)


def take_out(parent: Any, key: str | int) -> None:
    """Delete a child; the comment lines below it stay if there is a previous child to attach them to."""
    keys = _keys(parent)
    if at := keys.index(key):
        _move_comment_below(parent, key, keys[at - 1], needs="#")
    del parent[key]


def _keys(node: Any) -> list[Any]:
    return list(node if isinstance(node, dict) else range(len(node)))


def _move_comment_below(parent: Any, source: Any, target: Any, *, needs: str = "") -> None:
    """Move the comment and blank lines below one child of a YAML node below another, if they contain `needs`."""
    if not hasattr(parent, "ca"):
        return
    comments, slot = _comments_of_last(parent, source)
    inline, _, below = comments[slot].value.partition("\n") if comments[slot] else ("", "", "")
    if not below or needs not in below:
        return
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.tokens import CommentToken

    comments[slot].value = inline + "\n"
    if not inline:
        comments[slot] = None
    comments, slot = _comments_of_last(parent, target)
    if comments[slot] is None:
        comments[slot] = CommentToken("\n", CommentMark(0), None)
    comments[slot].value += below


def _comments_of_last(node: Any, key: Any) -> tuple[list[Any], int]:
    """Return the comments of a child's innermost last node, to which the lines below the child are attached."""
    while hasattr(inner := node[key], "ca") and inner and not inner.fa.flow_style():
        node, key = inner, _keys(inner)[-1]
    return node.ca.items.setdefault(key, [None] * 4), 2 if isinstance(node, dict) else 0


def _form(path: Path) -> str:
    form = _FORMATS.get(path.suffix.lower())
    if form is None:
        kind = f"the suffix {path.suffix!r} is not a config format" if path.suffix else "a config needs a suffix"
        raise LabError(kind, file=path, hint="use .json, .yaml, .yml, .toml or .ini")
    return form


def _read_text(path: Path) -> tuple[str, str]:
    """Return the format and the text of a config file."""
    form = _form(path)
    try:
        raw = read_bounded(path, MAX_BYTES).removeprefix(b"\xef\xbb\xbf")
    except FileNotFoundError:
        raise LabError("there is no such file", file=path, hint=_similar_name(path)) from None
    except UntrustedError as error:
        raise LabError(str(error), file=path) from None
    except OSError as error:
        raise LabError(f"cannot be read: {error.strerror}", file=path) from None
    try:
        return form, raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise LabError(f"is not UTF-8: byte 0x{raw[error.start]:02x}", file=path, line=line) from None


def _similar_name(path: Path) -> str | None:
    from difflib import get_close_matches

    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"there is no folder {path.parent} either"
    near = get_close_matches(path.name, names, 1)
    return f"did you mean {near[0]}?" if near else None


def _mapping(path: Path, text: str, data: Any) -> dict[str, Any]:
    if isinstance(data, dict):
        return data
    if data is None and not re.search(r"^[^#\s]", text, re.MULTILINE):
        raise LabError("is empty", file=path, hint="expected a mapping of keys to values")
    kind = "a list" if isinstance(data, list) else "a single value"
    first = re.search(r"^(?!---|[ \t]*#|[ \t\r]*$)", text, re.MULTILINE)
    line = text.count("\n", 0, first.start()) + 1 if first else 1
    raise NotAMapping(f"has {kind} at the top level", file=path, line=line, hint="expected a mapping of keys to values")


def _parse_json(path: Path, text: str) -> Any:
    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            keys = [key for key, _ in pairs]
            raise _duplicate_key_error(path, text, next(key for key in keys if keys.count(key) > 1))
        return data

    try:
        return mend(json.loads(text, object_pairs_hook=mapping))
    except json.JSONDecodeError as error:
        raise LabError(f"broken JSON: {error.msg}", file=path, line=error.lineno) from None
    except UntrustedError:
        raise
    except ValueError as error:
        raise LabError(f"broken JSON: {error}", file=path) from None


def _duplicate_key_error(path: Path, text: str, key: str) -> LabError:
    """Return the error for a key that occurs twice; JSON is YAML, whose parser knows the line."""
    error = LabError(f"the key {key!r} occurs twice", file=path, hint="keep one of the two")
    try:
        _parse_yaml(path, text, "safe")
    except LabError as found:
        return found if found.message == error.message else error
    return error


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        line = int(at[1]) if at else text.rstrip().count("\n") + 1
        message = re.sub(r" \(at [^()]*\)$", "", str(error))
        raise LabError(f"broken TOML: {message}", file=path, line=line) from None


def _parse_ini(path: Path, text: str) -> dict[str, Any]:
    """Return the sections of an INI file; numbers are converted, everything else stays text."""
    parser = _ini_parser()
    try:
        parser.read_string(text, str(path))
    except configparser.Error as error:
        line = getattr(error, "lineno", None) or next((number for number, _ in getattr(error, "errors", ())), None)
        message = str(getattr(error, "message", error)).splitlines()[0]
        raise LabError(f"broken INI: {message}", file=path, line=line) from None
    return {
        section: {key: None if value is None else _ini_value(value) for key, value in parser.items(section)}
        for section in parser.sections()
    }


def _ini_parser() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(allow_no_value=True, default_section="\0")  # DEFAULT is one of the sections
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # keys keep their case
    return parser


def _ini_value(text: str) -> int | float | str:
    """Return a number if writing it back means the same; `007` and `1_000` stay text."""
    for kind, pattern in ((int, _INI_INT), (float, _INI_FLOAT)):
        if pattern.fullmatch(text):
            return kind(text)
    return text


def _parse_toml_document(path: Path, text: str) -> Any:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    check_depth(_parse_toml(path, text))  # tomllib has better error messages
    try:
        return tomlkit.parse(text)
    except TOMLKitError as error:
        raise LabError(f"broken TOML: {error}", file=path, line=getattr(error, "line", None)) from None


def _parse_yaml(path: Path, text: str, kind: str) -> Any:
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        if _ALIAS.search(text):
            # Before anything is built: merging by `<<` expands aliases while it reads.
            _check_aliases(_yaml(kind).compose(text))
        return _yaml(kind).load(text)
    except DuplicateKeyError as error:
        key = re.match(r'found duplicate key "?(.*?)"? with value', str(error.problem), re.DOTALL)
        name = key[1] if key else "?"
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise LabError(f"the key {name!r} occurs twice", file=path, line=line, hint="keep one of the two") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(str(part) for part in (error.context, error.problem) if part)
        raise LabError(f"broken YAML: {what}", file=path, line=mark.line + 1 if mark else None) from None
    except YAMLError as error:
        position = getattr(error, "position", None)
        line = None if position is None else text.count("\n", 0, position) + 1
        what = getattr(error, "reason", None) or str(error)
        raise LabError(f"broken YAML: {what}", file=path, line=line) from None
    except (RecursionError, UntrustedError):
        raise
    except Exception as error:  # noqa: BLE001 (the parser raises anything: AssertionError for %YAML 1.9, for example)
        raise LabError(f"broken YAML: {error or type(error).__name__}", file=path) from None


def _check_aliases(root: Any) -> None:
    """Raise UntrustedError if the document has too many nodes after expanding its aliases."""
    sizes: dict[int, int] = {}  # by id of the node; the tree keeps the nodes alive

    def size(node: Any) -> int:
        if not isinstance(getattr(node, "value", None), list):
            return 1
        known = sizes.get(id(node))
        if known is not None:
            return known
        sizes[id(node)] = MAX_NODES + 1  # for a node that contains itself
        total = 1
        for item in node.value:
            total += sum(map(size, item)) if isinstance(item, tuple) else size(item)
            if total > MAX_NODES:
                raise UntrustedError(
                    f"has more than {MAX_NODES:,} values when its aliases are expanded, or an anchor contains itself"
                )
        sizes[id(node)] = total
        return total

    size(root)


def _yaml(kind: str, *, quote: bool = False) -> YAML:
    """Return a YAML 1.2 reader (`safe`), or a reader and writer that keeps comments (`rt`).

    Args:
        kind: `safe` or `rt`.
        quote: Quote text that a YAML 1.1 reader would misread.
    """
    from ruamel.yaml import YAML

    yaml = YAML(typ=kind, pure=True)
    yaml.Constructor = _yaml_constructor(kind)
    if kind == "rt":
        yaml.Representer = _yaml_representer(quote)
        yaml.preserve_quotes = True
        yaml.width = 1 << 20
    return yaml


@cache
def _yaml_constructor(kind: str) -> type:
    """Return a constructor for JSON-compatible values and dates; any other tag is an error with its line."""
    from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor, SafeConstructor

    base = SafeConstructor if kind == "safe" else RoundTripConstructor
    constructor: Any = type("Constructor", (base,), {})

    def construct_date(self: Any, node: Any) -> Any:
        try:
            return base.construct_yaml_timestamp(self, node)
        except ValueError as error:
            raise ConstructorError(None, None, f"{node.value} is not a date: {error}", node.start_mark) from None

    for tag in (None, *(f"tag:yaml.org,2002:{name}" for name in ("binary", "omap", "pairs", "set"))):
        constructor.add_constructor(tag, SafeConstructor.construct_undefined)
    # An anchored bool would otherwise become a subclass of int.
    constructor.add_constructor("tag:yaml.org,2002:bool", SafeConstructor.construct_yaml_bool)
    constructor.add_constructor("tag:yaml.org,2002:timestamp", construct_date)
    made: type = constructor
    return made


# Text in YAML 1.2 that a YAML 1.1 reader, which most trainers use, reads as a bool or a number.
_YAML_1_1 = re.compile(
    r"(?i)(y|n|yes|no|on|off)|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[-+]?0b[01_]+|[-+]?0[0-7_]+"
)


@cache
def _yaml_representer(quote: bool) -> type:
    """Return a representer whose numbers, and with `quote` texts, mean the same in YAML 1.1 and 1.2."""
    from ruamel.yaml.representer import RoundTripRepresenter

    class Representer(RoundTripRepresenter):
        pass

    def represent_text(self: Representer, data: str) -> Any:
        style = None
        if not data.isprintable():
            style = '"'
        elif quote and _YAML_1_1.fullmatch(data):
            style = "'"
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_float(self: Representer, data: float) -> Any:
        if not math.isfinite(data):
            return self.represent_scalar("tag:yaml.org,2002:float", _YAML_NON_FINITE[repr(data)])
        text = repr(data)
        if "e" in text and "." not in text:
            text = text.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", text)

    def represent_null(self: Representer, data: None) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")

    Representer.add_representer(str, represent_text)
    Representer.add_representer(float, represent_float)
    Representer.add_representer(type(None), represent_null)
    return Representer


_YAML_NON_FINITE = {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}


def _yaml_style(text: str) -> YamlStyle:
    """Infer the layout from the first nested mapping and the first nested list of the file."""
    mapping = dash = after_dash = None
    above: int | None = None  # indentation of the previous line if it is only a key
    for line in text.splitlines():
        content = line.lstrip(" ")
        if not content or content.startswith("#"):
            continue
        indent = len(line) - len(content)
        if above is not None:
            item = re.match(r"- +(?=[^ #])", content)
            if item and dash is None:
                dash, after_dash = indent - above, len(item[0])
            elif mapping is None and not content.startswith("-") and indent > above:
                mapping = indent - above
        above = indent if re.match(r"[^-].*:[ ]*(#.*)?$", content) else None
    head = re.match(r"((?:[ \t]*(?:#.*)?\r?\n)*)---\s", text)
    return YamlStyle(mapping or 2, dash or 0, after_dash or 2, head[1] if head else None)


def _dump(data: Any, form: str, path: Path, style: YamlStyle) -> bytes:
    if form == "json":
        return dump_json(data)
    if form == "toml":
        return _dump_toml(data, path)
    if form == "ini":
        return _dump_ini(data, path)
    from io import StringIO

    yaml = _yaml("rt", quote=type(data) is dict)  # a document keeps its own quotes
    yaml.indent(mapping=style.mapping, sequence=style.dash + style.after_dash, offset=style.dash)
    yaml.explicit_start = None if style.head is None else True
    stream = StringIO()
    stream.write(style.head or "")
    yaml.dump(data, stream)
    return stream.getvalue().encode()


def _dump_toml(data: Any, path: Path) -> bytes:
    import tomlkit

    empty = [place for place, value in leaves(data) if value is None]
    if empty:
        raise LabError(
            f"{show(empty[0])} is null, which TOML does not support",
            file=path,
            hint="leave the key out, or use JSON or YAML",
        )
    return tomlkit.dumps(data).encode()


def _dump_ini(data: Any, path: Path) -> bytes:
    from io import StringIO

    parser = _ini_parser()
    for section, values in data.items():
        if not isinstance(values, dict) or any(isinstance(value, _CONTAINERS) for value in values.values()):
            raise LabError(
                f"{section} is not a section of single values, and INI has nothing else",
                file=path,
                hint="use JSON, YAML or TOML",
            )
        parser.add_section(section)
        for key, value in values.items():
            parser.set(section, key, None if value is None else str(value))
    stream = StringIO()
    parser.write(stream)
    return stream.getvalue().encode()
