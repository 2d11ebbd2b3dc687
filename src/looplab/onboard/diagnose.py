"""Why a training failed: the end of its log, as one sentence and what to do about it."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

from looplab.onboard.knobs import words_of
from looplab.untrusted import clean_line

LINES = 200
"""Last lines of a log that are looked at."""
LAST = 20
"""Last lines of a program that printed no traceback."""
MAX_LINE = 200
"""Characters of a printed line that are shown."""

PACKAGES = {
    "absl": "absl-py",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "Box2D": "gymnasium[box2d]",
    "Crypto": "pycryptodome",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "git": "gitpython",
    "hydra": "hydra-core",
    "ignite": "pytorch-ignite",
    "mpl_toolkits": "matplotlib",
    "pkg_resources": "setuptools",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "skopt": "scikit-optimize",
    "yaml": "pyyaml",
}
"""Packages whose modules have another name."""
WRAPPERS = {"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "RayTaskError", "SystemExit"}
"""Exceptions that say that another process, or another exception, failed."""
CHAIN = ("The above exception was the direct cause", "During handling of the above exception")
EXCEPTION = re.compile(r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: (?P<message>.*)|:?)$")
FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a run failed."""

    kind: str
    """`package`, `gpu`, `memory`, …"""
    what: str
    """What happened, as a sentence without its full stop."""
    remedy: str = ""
    """What to do; may be empty."""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


@dataclass(frozen=True, slots=True)
class FailedProgram:
    """A run that failed, with what is known about it."""

    text: str
    """The end of its output."""
    code: int | None = None
    signal: int | None = None
    script: str = "the script"
    settings: Collection[str] = ()
    """Names of its settings."""
    own: Collection[str] = ()
    """Modules of its own project."""
    in_run_dir: bool = False
    """Whether it was started in its run folder."""
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        lines = [_plain(line) for line in self.text.splitlines()[-LINES:]]
        object.__setattr__(self, "lines", [line for line in lines if line.strip()])

    def setting(self, *words: str) -> str | None:
        """Return the setting with one of these words in its name, the earliest word first; None: there is none."""
        for word in words:
            for name in self.settings:
                if word in words_of(name.rpartition(".")[2]):
                    return name
        return None


def diagnose(failure: FailedProgram) -> Diagnosis | None:
    """Return why a run failed; None if it is not known."""
    exceptions = list(_exceptions(failure.lines))
    for exception in exceptions:
        if found := _first(failure, exception):
            return found
    if not exceptions and (found := _first(failure, "\n".join(failure.lines[-LAST:]))):
        return found
    if failure.signal is not None:
        return _signal(failure)
    if exceptions:
        where = _where(failure.lines)
        return Diagnosis(
            "exception",
            clean_line(exceptions[0].split("\n")[0], MAX_LINE) + (f" ({where})" if where else ""),
        )
    if failure.code in (126, 127) and failure.lines:
        return Diagnosis("program", clean_line(failure.lines[-1], MAX_LINE), "check launch.command in lab.yaml")
    return None


def last_line(text: str) -> str:
    """Return the last informative line; empty: there is none."""
    lines = [line for line in map(_plain, text.splitlines()) if re.search(r"\w", line)]
    return clean_line(lines[-1].strip(), MAX_LINE) if lines else ""


def _plain(line: str) -> str:
    """Return a line without the frame that rich draws around messages."""
    bare = re.sub(r"^\s*│ ?|\s*│\s*$", "", line)
    return re.sub(r"^\s*[╭╰─━╮╯]+\s?|\s?[╭╰─━╮╯]+\s*$", "", bare).rstrip()


def _exceptions(lines: list[str]) -> Iterator[str]:
    """Yield the exception that ended the program, then those that it wraps; each with the lines that follow it."""
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    bounds = [*starts, len(lines)]
    if not starts:
        # A syntax error of the script itself has no traceback, and some programs hide theirs.
        for i in reversed(range(len(lines))):
            found = EXCEPTION.match(lines[i])
            if (
                found
                and found["message"]
                and found["name"].rpartition(".")[2].endswith(("Error", "Exception"))
                and not _is_log(lines[i])
            ):
                yield "\n".join(lines[i:])
                return
        return
    for begin, end in reversed(list(zip(starts, bounds[1:], strict=True))):
        block = lines[begin:end]
        for i in range(1, len(block)):
            found = EXCEPTION.match(block[i])
            if found is None or (i + 1 < len(block) and block[i + 1].startswith("  File ")):
                continue
            rest = block[i:]
            is_chained = any(line.startswith(CHAIN) for line in rest)
            rest = [line for line in rest if not line.startswith(CHAIN)]
            yield "\n".join(rest)
            name = found["name"].rpartition(".")[2]
            break
        else:
            continue
        before = [line for line in lines[:begin] if line.startswith(CHAIN)]
        if not (before or is_chained or name in WRAPPERS):
            return


def _is_log(line: str) -> bool:
    return bool(re.match(r"(INFO|WARNING|ERROR|DEBUG|FATAL|CRITICAL)\b", line))


def _where(lines: list[str]) -> str | None:
    """Return the last place in the traceback that is not in an installed package."""
    frames = [found for line in lines if (found := FRAME.match(line))]
    ours = [found for found in frames if not re.search(r"site-packages|/lib/python3|<", found["file"])]
    return f"{PurePath(ours[-1]['file']).name}:{ours[-1]['line']}" if ours else None


def _first(failure: FailedProgram, text: str) -> Diagnosis | None:
    for kind, pattern, describe in CASES:
        found = pattern.search(text)
        if found is not None:
            what, remedy = describe(failure, found)
            return Diagnosis(kind, clean_line(what, 2 * MAX_LINE), clean_line(remedy, 2 * MAX_LINE))
    return None


# -- what each case says

Description = Callable[[FailedProgram, re.Match[str]], tuple[str, str]]


def _package(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    module = found["module"].split(".")[0]
    if module in failure.own:
        return (
            f"{failure.script} does not find {found['module']}, a module of the project",
            "start it as its README does (python -m …), or set launch.env: {PYTHONPATH: …} in lab.yaml",
        )
    package = PACKAGES.get(module, module)
    return f"the package {module} is not installed for this Python", f"install it: pip install {_quoted(package)}"


def _quoted(package: str) -> str:
    return f"'{package}'" if "[" in package else package


def _advised(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    wanted = re.findall(r"pip install ((?:-U )?[\w'\"\[\],.<>=-]+)", found[0])
    what = re.split(r"[,:;.]\s|\W*pip install", found["message"])[0]
    return f"a package is missing: {what}", "; ".join(f"pip install {one.rstrip('.,')}" for one in wanted)


def _syntax(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    frames = [frame for line in failure.lines if (frame := FRAME.match(line))]
    where = f" in {frames[-1]['file']}, line {frames[-1]['line']}" if frames else ""
    return f"{found['name']}{where}: {found['message']}", "correct the file, or use the Python it was written for"


def _gpu(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    name = failure.setting("device", "accelerator", "cuda", "gpu", "gpus", "cpu")
    what = "it needs a GPU, but finds none"
    if name is None:
        return what, (
            "run it on a machine with a GPU; if it has an option for its device (`--device cpu`), add that to "
            "launch.command in lab.yaml"
        )
    words = words_of(name)
    if {"no", "disable", "cpu"} & set(words):
        value = "true"
    elif {"device", "accelerator"} & set(words):
        value = "cpu"
    else:
        value = "0" if "gpus" in words else "false"
    return what, f"its device is set by `{name}`: looplab try --set {name}={value}"


def _memory(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    where = "of the GPU" if re.search(r"CUDA|cuda|GPU|HIP", found.string) else "of this machine"
    name = failure.setting("batch", "bs", "minibatch")
    less = f"make `{name}` smaller: looplab try --set {name}=…" if name else "make the batch or the model smaller"
    return f"the memory {where} was not enough", less


def _stdin(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    asked = next(
        (
            line
            for line in reversed(failure.lines)
            if re.search(r"[?:\]>]\s*(Traceback.*)?$", line) and "File" not in line
        ),
        "",
    )
    asked = re.sub(r"\s*(Traceback \(most.*|Aborted!.*|EOFError.*)$", "", asked).strip()
    return "it asks for input, but a run has no stdin" + (
        f" (it printed: {clean_line(asked, 80)})" if re.search(r"\w", asked) else ""
    ), "pass these values as options or in a file; a script that asks for input cannot run unattended"


def _network(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    text = "\n".join(failure.lines)
    host = re.search(r"host='([\w.-]+)'|Cannot connect to host ([\w.-]+)|resolve '([\w.-]+)'", found.string)
    urls = re.findall(r"https?://[^\s'\"<>)\]]+", found.string) or re.findall(r"https?://[^\s'\"<>)\]]+", text)
    urls = [url for url in urls if "/docs/" not in url]
    place = next(filter(None, host.groups())) if host else urls[-1] if urls else None
    if place is None and re.search("hub", found.string, re.IGNORECASE):
        place = "huggingface.co"
    return f"it needs the network{f': {place}' if place else ''}, and could not reach it", (
        "download once where there is a network, and point the script at the files"
    )


def _http(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    urls = re.findall(r"https?://[^\s'\"<>)\]]+", "\n".join(failure.lines))
    where = f" ({urls[-1]})" if urls else ""
    if found["code"] in ("401", "403"):
        return f"a download was denied: {found['code']}{where}", "log in or ask for access, then try again"
    return f"a download failed: {found['code']}{where}", "the address may have changed: get the files by hand"


def _exists(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    path = next((text for text in found.groupdict().values() if text), None)
    if failure.in_run_dir:
        return (
            f"its output {path or 'folder'} already exists",
            "pass {out_dir} for it and set launch.output_dir: absent in lab.yaml: a path that does not exist yet",
        )
    return (
        f"its output {path or 'folder'} already exists: a second run collides with the first",
        "set launch.cwd: run in lab.yaml, or pass {out_dir} for it with launch.output_dir: absent",
    )


def _needs(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    names = re.sub(r"\s+and\s+", ", ", found["names"]).strip().strip("'\".")
    usage = _usage(failure)
    words = " ".join(
        name.split("/")[0].split(" ")[0] + (" …" if name.startswith("-") else "")
        for name in names.replace("'", "").split(", ")
    )
    return f"{failure.script} needs {names}" + (f" ({usage})" if usage else ""), (
        f"add it to launch.command in lab.yaml, or start over: looplab init {failure.script} {words}"
    )


def _usage(failure: FailedProgram) -> str:
    start = next((i for i, line in enumerate(failure.lines) if re.match(r"usage:", line, re.IGNORECASE)), None)
    if start is None:
        return ""
    parts = [failure.lines[start]]
    for line in failure.lines[start + 1 :]:
        if not line.startswith("  "):
            break
        parts.append(line.strip())
    return clean_line(" ".join(parts), 120)


def _unknown_option(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    meant = re.search(
        r"Did you mean:? (.+?)\s*\??$|Possible options: ([^)]+)|Perhaps you meant:\s*(\S+)", found.string, re.M
    )
    near = next(filter(None, meant.groups()), "") if meant else ""
    return f"{failure.script} does not know {found['names'].strip().strip(chr(39))}" + (
        f" (perhaps {near.strip().strip(chr(39))})" if near else ""
    ), "correct `base` or launch.config in lab.yaml; `looplab plan --commands` shows the command"


def _bad_value(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    return f"{failure.script} refuses a value: {found['message'].rstrip('.')}", (
        "correct it in the base config; `looplab plan --commands` shows the command"
    )


def _no_file(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
    path = found["path"]
    if path.startswith(("/", "~")):
        return f"there is no {path}", "create it, or give the script another path"
    if failure.in_run_dir:
        return f"there is no {path} in the run folder, where it is started", (
            "remove `cwd: run` from lab.yaml, or give the script an absolute path"
        )
    return (
        f"there is no {path} where it is started",
        "create it, or set launch.cwd in lab.yaml to the folder that has it",
    )


def _said(what: str, remedy: str) -> Description:
    """Return a description with the groups of the match filled in."""

    def describe(failure: FailedProgram, found: re.Match[str]) -> tuple[str, str]:
        groups = {name: text or "" for name, text in found.groupdict().items()}
        return what.format(script=failure.script, **groups), remedy.format(script=failure.script, **groups)

    return describe


def _signal(failure: FailedProgram) -> Diagnosis:
    number = failure.signal or 0
    try:
        name = signals.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signals.SIGKILL:
        batch = failure.setting("batch", "bs")
        return Diagnosis(
            "memory",
            "it was killed from outside (SIGKILL), most likely because the memory of this machine was not enough",
            f"make `{batch}` smaller" if batch else "make the batch or the model smaller",
        )
    if number in (signals.SIGSEGV, signals.SIGABRT, signals.SIGBUS, signals.SIGILL, signals.SIGFPE):
        return Diagnosis(
            "crash", f"it crashed ({name}) in compiled code", "to see where, set PYTHONFAULTHANDLER=1 in launch.env"
        )
    return Diagnosis("signal", f"it was killed from outside by {name}")


Case = tuple[str, re.Pattern[str], Description]


def _case(kind: str, pattern: str, describe: Description) -> Case:
    return kind, re.compile(pattern, re.MULTILINE), describe


CASES: tuple[Case, ...] = (
    _case("package", r"ModuleNotFoundError: No module named '(?P<module>[^']+)'", _package),
    _case("package", r"(?:Error|NotInstalled|Exception): (?P<message>.*pip install [\s\S]*)", _advised),
    _case(
        "package",
        r"ImportError: cannot import name '(?P<name>\w+)' from '?(?P<module>[\w.]+)",
        _said("{module} has no {name}: the script was written for another version of it", "install that version"),
    ),
    _case(
        "package",
        r"AttributeError: module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'",
        _said("{module} has no {name}: the script was written for another version of it", "install that version"),
    ),
    _case(
        "library",
        r"(?:ImportError|OSError): (?P<file>[\w.+-]+\.so[\w.]*): cannot open shared object file",
        _said("the library {file} is missing on this machine", "install it, or another build of the package"),
    ),
    _case("syntax", r"^(?P<name>SyntaxError|IndentationError|TabError): (?P<message>.*)", _syntax),
    _case(
        "memory",
        r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|HIP out of memory|(?:torch\.|cuda\.)OutOfMemoryError"
        r"|RESOURCE_EXHAUSTED|OOM when allocating|can't allocate memory|Cannot allocate memory"
        r"|Unable to allocate [\d.]+ ?\w*B|^MemoryError|bad_alloc|killed by signal: Killed|insufficient shared memory",
        _memory,
    ),
    _case(
        "gpu",
        r"Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|CUDA error: (?:invalid device"
        r"|no CUDA-capable)|torch\.cuda\.is_available\(\) is False|No supported gpu backend|no CUDA-capable device"
        r"|No visible GPU|(?i:unable to initialize backend '(?:cuda|gpu|rocm|tpu))|Unknown backend:? '?(?:cuda|gpu)"
        r"|requires a GPU|requires? (?:a )?CUDA|CUDA (?:is )?(?:not available|unavailable)|no GPU (?:found|available)"
        r"|cudaErrorNoDevice|GPU Tree Learner was not enabled|CUDA Tree Learner was not enabled|CUDA_HOME environment"
        r"|Cannot assign a device for operation.*GPU|no NVIDIA GPU|support (?:device )?GPU is not enabled"
        r"|setup doesn't support bf16/gpu|GPU is required|Cannot access accelerator device when none is available",
        _gpu,
    ),
    _case(
        "account",
        r"api_key not configured|No API key configured|wandb\.errors\.(?:errors\.)?(?:UsageError|AuthenticationError)"
        r".*(?:key|log ?in)",
        _said(
            "it logs to Weights & Biases, but nobody is logged in",
            "set launch.env: {{WANDB_MODE: offline}} in lab.yaml; looplab reads the offline files",
        ),
    ),
    _case(
        "stdin",
        r"^EOFError|EOF when reading a line|^click\.exceptions\.Abort|^Aborted[.!]|asks on stdin|Inappropriate ioctl",
        _stdin,
    ),
    _case("http", r"(?:HTTP Error |HTTPError: |HTTPStatusError.*')(?P<code>[45]\d\d)\b", _http),
    _case("http", r"(?:GatedRepo|RepositoryNotFound)Error: (?P<code>4\d\d)\b", _http),
    _case(
        "network",
        r"Name or service not known|Temporary failure in name resolution|nodename nor servname|getaddrinfo failed"
        r"|Max retries exceeded|couldn't connect to '|Couldn't reach |[Cc]onnection refused|Network is unreachable"
        r"|locate the file on the Hub|[Oo]ffline mode is enabled|OfflineModeIsEnabled|Cannot connect to host"
        r"|No route to host|CERTIFICATE_VERIFY_FAILED|[Cc]onnection (?:timed out|reset)|Error downloading"
        r"|Failed to (?:get url|download|resolve)|ConnectTimeout|ConnectError|ProxyError|URLError",
        _network,
    ),
    _case("exists", r"FileExistsError: (?:\[Errno 17\] )?(?:File exists: )?'?(?P<path>[^'\n]+)", _exists),
    _case(
        "exists",
        r"(?i:output|directory|folder|path|experiment|run)\b[^\n]{0,20}?[(`'\"](?P<path>[^)`'\"\n]+)[)`'\"][^\n]{0,40}"
        r"(?:already exists|exists and is not empty|is not empty)",
        _exists,
    ),
    _case(
        "exists",
        r"(?i:output|directory|folder|experiment)\b[^\n]{0,20}?(?P<path>[\w./-]+/[\w./-]*|\w+)? "
        r"(?:already exists|is not empty)",
        _exists,
    ),
    _case("needs", r"error: the following arguments are required: (?P<names>.+)", _needs),
    _case("needs", r"Error: Missing (?:option|argument|parameter) (?P<names>.+?)\.?$", _needs),
    _case("needs", r"^\s*Missing (?:option|argument|parameter) (?P<names>'[^']+'(?: / '[^']+')*)", _needs),
    _case("needs", r"Missing from [^\n]*:\n\s*(?P<names>--?[\w.-]+|[A-Z_]+)", _needs),
    _case("needs", r"flag (?P<names>--[\w-]+)=None: Flag .* must have a value", _needs),
    _case("needs", r"received no value for the required argument: (?P<names>\S+)", _needs),
    _case(
        "needs",
        r"MissingMandatoryValue: Missing mandatory value: (?P<name>\S+)",
        _said("the config has no value for {name}", "give it one in the base config: looplab try --set {name}=…"),
    ),
    _case("option", r"error: (?:unrecognized arguments|unrecognised arguments): (?P<names>.+)", _unknown_option),
    _case("option", r"(?i:no such option):? (?P<names>'?-[\w-]+'?)", _unknown_option),
    _case("option", r"Unrecognized options: (?P<names>.+)", _unknown_option),
    _case("option", r"Got unexpected extra argument(?:s|\(s\))? \((?P<names>.+)\)", _unknown_option),
    _case("option", r"Unknown command line flag (?P<names>'\S+')", _unknown_option),
    _case("option", r"ERROR: Could not consume arg: (?P<names>\S+)", _unknown_option),
    _case("option", r"Could not override (?P<names>'[^']+')", _unknown_option),
    _case("value", r"error: (?P<message>argument .*)", _bad_value),
    _case("value", r"Error: (?P<message>Invalid value.*)", _bad_value),
    _case("value", r"^\s*(?P<message>Invalid value.*)", _bad_value),
    _case("value", r"(?P<message>Error parsing --.*)", _bad_value),
    _case("value", r"Flags parsing error: (?P<message>.*)", _bad_value),
    _case("value", r"^\S+: error: (?P<message>.+)", _bad_value),
    _case(
        "distributed",
        r"env:// rendezvous: environment variable (?P<name>\w+) expected",
        _said(
            "it must be started with torchrun ({name} is not set)",
            "put torchrun and its options before the script in launch.command, in lab.yaml",
        ),
    ),
    _case(
        "port",
        r"EADDRINUSE|Address already in use",
        _said(
            "its network port is in use, most likely by another run",
            "give each run its own port (MASTER_PORT=0 in launch.env), or use one slot: slots: 1",
        ),
    ),
    _case(
        "display",
        r"no display name and no \$DISPLAY|could not connect to display|No available video device|cannot open display"
        r"|Unable to open display",
        _said(
            "it opens a window, but a run has no display",
            "set launch.env: {{MPLBACKEND: Agg, SDL_VIDEODRIVER: dummy}} in lab.yaml, or turn its plots off",
        ),
    ),
    _case(
        "disk", r"No space left on device|Disk quota exceeded", _said("the disk is full", "free space, then try again")
    ),
    _case(
        "permission",
        r"(?:PermissionError: \[Errno 13\] Permission denied: '|Read-only file system: ')(?P<path>[^']+)",
        _said("it has no permission to read or write {path}", "pass {{out_dir}} for its output, in launch.command"),
    ),
    _case("file", r"FileNotFoundError: .*No such file or directory: b?'(?P<path>[^']+)'", _no_file),
    _case("file", r"FileNotFoundError: (?P<message>[^\n]*?)(?P<path>[\w.-]*/[\w./-]+|\w+\.\w+)", _no_file),
    _case(
        "program",
        r"(?P<name>[\w./+-]+): (?:command )?not found$",
        _said("{name} is not installed on this machine", "install it, or correct launch.command in lab.yaml"),
    ),
    _case(
        "program",
        r"cannot start (?P<name>\S+)|there is no program '?(?P<name2>[\w./-]+)",
        _said("{name}{name2} cannot be started", "correct launch.command in lab.yaml"),
    ),
)
"""Kind, what its error looks like, and what to say. The first match counts."""
