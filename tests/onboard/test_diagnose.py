"""The end of a failed log becomes a sentence and what to do. The texts are those that programs print."""

from __future__ import annotations

import pytest

from looplab.onboard.diagnose import FailedProgram, diagnose, last_line

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/p/train.py", line 12, in <module>\n    main()\n'
TORCH = '  File "/venv/lib/python3.11/site-packages/torch/cuda/__init__.py", line 522, in _lazy_init\n    raise E\n'
CHAINED = "\n\nThe above exception was the direct cause of the following exception:\n\n"

CASES = [
    # kind, what it prints, words of the sentence
    ("package", TRACEBACK + "ModuleNotFoundError: No module named 'flashy_kernels'", "pip install flashy_kernels"),
    ("package", TRACEBACK + "ModuleNotFoundError: No module named 'sklearn.svm'", "pip install scikit-learn"),
    ("package", TRACEBACK + "ModuleNotFoundError: No module named 'cv2'", "pip install opencv-python"),
    (
        "package",
        TRACEBACK + "gymnasium.error.DependencyNotInstalled: Box2D is not installed, you can install it by run "
        '`pip install swig` followed by `pip install "gymnasium[box2d]"`',
        'pip install swig; pip install "gymnasium[box2d]"',
    ),
    (
        "package",
        TRACEBACK + "ImportError: Using the `Trainer` with `PyTorch` requires `accelerate>=1.1.0`: Please run "
        "`pip install transformers[torch]` or `pip install 'accelerate>=1.1.0'`",
        "pip install transformers[torch]",
    ),
    ("package", TRACEBACK + "ImportError: cannot import name 'Adam' from 'optim' (/x/optim.py)", "another version"),
    ("package", TRACEBACK + "AttributeError: module 'numpy' has no attribute 'bool'", "numpy has no bool"),
    (
        "library",
        TRACEBACK + "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "libcudart.so.12",
    ),
    (
        "syntax",
        '  File "/home/me/p/train.py", line 7\n    def f(:\n          ^\nSyntaxError: invalid syntax',
        "/home/me/p/train.py, line 7",
    ),
    ("gpu", TRACEBACK + TORCH + "AssertionError: Torch not compiled with CUDA enabled", "needs a GPU"),
    ("gpu", TRACEBACK + TORCH + "RuntimeError: Found no NVIDIA driver on your system. Please check that", "GPU"),
    ("gpu", TRACEBACK + TORCH + "RuntimeError: No CUDA GPUs are available", "GPU"),
    (
        "gpu",
        TRACEBACK + TORCH + "RuntimeError: Cannot access accelerator device when none is available.",
        "it needs a GPU, but finds none",
    ),
    (
        "gpu",
        TRACEBACK + "lightning.fabric.utilities.exceptions.MisconfigurationException: No supported gpu backend found!",
        "GPU",
    ),
    (
        "gpu",
        TRACEBACK + "RuntimeError: Unable to initialize backend 'cuda': FAILED_PRECONDITION: No visible GPU devices.",
        "GPU",
    ),
    ("gpu", "ERROR: CUDA is not available. This training script requires a GPU (tested on A100 80GB).", "GPU"),
    (
        "memory",
        TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total",
        "memory of the GPU",
    ),
    (
        "memory",
        TRACEBACK + "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
        "4770354232 bytes.",
        "memory",
    ),
    (
        "memory",
        TRACEBACK + "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor with "
        "shape[1,64,288,800]",
        "memory",
    ),
    (
        "memory",
        TRACEBACK + "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 40000000000000 bytes. Error code 12 (Cannot allocate memory)",
        "memory of this machine",
    ),
    (
        "memory",
        TRACEBACK + "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 728. TiB for an array with shape",
        "memory of this machine",
    ),
    ("stdin", "How many neighbours [5]: " + TRACEBACK + "EOFError: EOF when reading a line", "How many neighbours [5]"),
    ("stdin", "data?: " + TRACEBACK + "click.exceptions.Abort", "asks for input"),
    (
        "account",
        TRACEBACK + "wandb.errors.errors.UsageError: No API key configured. Use `wandb login` to log in.",
        "WANDB_MODE: offline",
    ),
    (
        "network",
        "Downloading https://datasets.example.invalid/v2/housing.csv.gz to data/housing.csv.gz\n"
        + TRACEBACK
        + "urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>",
        "https://datasets.example.invalid/v2/housing.csv.gz",
    ),
    (
        "network",
        TRACEBACK + "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='data.example.invalid', port=443): "
        "Max retries exceeded with url: /x (Caused by NameResolutionError(\"HTTPSConnection(host='data.example.invalid'"
        ", port=443): Failed to resolve 'data.example.invalid' ([Errno -2] Name or service not known)\"))",
        "data.example.invalid",
    ),
    (
        "network",
        TRACEBACK
        + "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub"
        + CHAINED
        + TRACEBACK
        + "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the "
        "cached files.\nCheck your internet connection or see how to run the library in offline mode at "
        "'https://huggingface.co/docs/transformers/installation#offline-mode'.",
        "https://huggingface.co,",
    ),
    (
        "network",
        TRACEBACK + "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file "
        "on the Hub and we cannot find the requested files in the local cache.",
        "huggingface.co",
    ),
    ("network", TRACEBACK + "httpx.ConnectError: [Errno -2] Name or service not known", "needs the network"),
    ("http", TRACEBACK + "urllib.error.HTTPError: HTTP Error 404: Not Found", "a download failed: 404"),
    ("exists", TRACEBACK + "FileExistsError: [Errno 17] File exists: 'results/exp1'", "results/exp1"),
    (
        "exists",
        TRACEBACK + "ValueError: Output directory (./out) already exists and is not empty. Use "
        "--overwrite_output_dir to overcome.",
        "./out",
    ),
    (
        "needs",
        "usage: train.py [-h] --data DATA [--lr LR]\ntrain.py: error: the following arguments are required: --data",
        "looplab init train.py --data …",
    ),
    (
        "needs",
        "usage: train.py [-h] data\ntrain.py: error: the following arguments are required: data",
        "train.py data",
    ),
    (
        "needs",
        "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: Missing option '--data'.",
        "looplab init train.py --data …",
    ),
    (
        "needs",
        "Usage: train.py [OPTIONS] {data}\nTry 'train.py --help' for help.\n"
        "╭─ Error ──────────────────────────╮\n│ Missing argument 'data'.         │\n"
        "╰──────────────────────────────────╯",
        "train.py needs data",
    ),
    (
        "needs",
        "╭─ Required options ──────╮\n│ Missing from train.py:  │\n│     --data STR          │\n"
        "│         (required)      │\n╰─────────────────────────╯",
        "train.py needs --data",
    ),
    (
        "needs",
        "FATAL Flags parsing error: flag --data=None: Flag --data must have a value other than None.\n"
        "Pass --helpshort or --helpfull to see help on flags.",
        "train.py needs --data",
    ),
    (
        "needs",
        "ERROR: The function received no value for the required argument: data\nUsage: train.py DATA <flags>",
        "train.py needs data",
    ),
    (
        "needs",
        "Error executing job with overrides: []\n"
        + TRACEBACK
        + "omegaconf.errors.MissingMandatoryValue: Missing mandatory value: data.path\n    full_key: data.path\n"
        "    object_type=dict\n\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.",
        "looplab try --set data.path=…",
    ),
    ("option", "usage: main.py [-h]\nmain.py: error: unrecognized arguments: --no-dry-run", "--no-dry-run"),
    (
        "option",
        "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\n"
        "Error: No such option '--lrr'. Did you mean '--lr'?",
        "--lrr (perhaps --lr)",
    ),
    (
        "option",
        "╭─ Unrecognized options ─────────────────╮\n│ Unrecognized options: --lrr, 1         │\n"
        "╰────────────────────────────────────────╯",
        "--lrr, 1",
    ),
    ("option", "FATAL Flags parsing error: Unknown command line flag 'lrr'. Did you mean: lr ?", "lrr (perhaps lr)"),
    (
        "option",
        "Usage: t.py [OPTIONS]\n╭─ Error ─────────────╮\n│ Got unexpected extra argument(s) (train) │\n╰─────╯",
        "does not know train",
    ),
    ("option", "ERROR: Could not consume arg: --lrr\nUsage: train.py x -", "--lrr"),
    (
        "option",
        "Could not override 'lrr'.\nTo append to your config use +lrr=1\nKey 'lrr' is not in struct. Did you mean: 'lr'?\n"
        "    full_key: lrr\n    object_type=dict",
        "lrr (perhaps lr)",
    ),
    ("value", "usage: t.py [-h]\nt.py: error: argument --lr: invalid float value: 'a'", "argument --lr: invalid float"),
    ("value", "Usage: t.py\n\nError: Invalid value for '--lr': 'a' is not a valid float.", "'--lr': 'a'"),
    ("value", "│ Error parsing --lr: could not convert string to float: 'a' │", "--lr: could not convert"),
    ("value", "FATAL Flags parsing error: flag --lr=a: could not convert string to float: 'a'", "flag --lr=a"),
    (
        "distributed",
        TRACEBACK + "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable "
        "RANK expected, but not set",
        "torchrun",
    ),
    ("port", TRACEBACK + "OSError: [Errno 98] Address already in use", "port"),
    ("display", TRACEBACK + "_tkinter.TclError: no display name and no $DISPLAY environment variable", "MPLBACKEND"),
    ("disk", TRACEBACK + "OSError: [Errno 28] No space left on device", "disk is full"),
    ("permission", TRACEBACK + "PermissionError: [Errno 13] Permission denied: '/data/out'", "/data/out"),
    ("file", TRACEBACK + "FileNotFoundError: [Errno 2] No such file or directory: 'data/x.csv'", "data/x.csv"),
    ("program", "train.sh: line 3: python3.7: command not found", "python3.7 is not installed"),
    (
        "exception",
        TRACEBACK + TORCH + "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x4 and 3x2)",
        "(1x4 and 3x2) (train.py:12)",
    ),
]


@pytest.mark.parametrize(("kind", "printed", "words"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_an_error_is_named_with_what_to_do(kind: str, printed: str, words: str) -> None:
    for text in (printed, f"epoch 1: loss 0.5\n{printed}\n"):
        found = diagnose(FailedProgram(text, code=1, script="train.py"))
        assert found is not None
        assert found.kind == kind
        assert words in str(found)
        assert "\n" not in str(found)


def test_a_warning_before_another_error_is_not_the_diagnosis() -> None:
    warned = "UserWarning: CUDA is not available, using the CPU\nWARNING: no GPU found\n"
    found = diagnose(FailedProgram(warned + TRACEBACK + "ValueError: bad shape", code=1))
    assert found is not None
    assert (found.kind, found.what) == ("exception", "ValueError: bad shape (train.py:12)")


def test_the_cause_is_found_behind_the_launcher_and_later_exceptions() -> None:
    cause = TRACEBACK + "ModuleNotFoundError: No module named 'apex'\n"
    wrapped = TRACEBACK + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    later = "\nDuring handling of the above exception, another exception occurred:\n\n" + TRACEBACK + "ValueError: no"
    for text in (cause + wrapped, cause + later):
        found = diagnose(FailedProgram(text, code=1))
        assert found is not None
        assert found.kind == "package"


@pytest.mark.parametrize(
    ("setting", "advice"),
    [("device", "--set device=cpu"), ("trainer.accelerator", "accelerator=cpu"), ("cuda", "cuda=false"),
     ("no-cuda", "no-cuda=true"), ("use_cpu", "use_cpu=true"), ("gpus", "gpus=0")],
)  # fmt: skip
def test_the_setting_for_the_device_is_named(setting: str, advice: str) -> None:
    found = diagnose(FailedProgram("RuntimeError: No CUDA GPUs are available", code=1, settings=["lr", setting]))
    assert found is not None
    assert advice in found.remedy


def test_the_batch_size_is_named_when_memory_is_not_enough() -> None:
    for failure in (
        FailedProgram("torch.OutOfMemoryError: CUDA out of memory.", code=1, settings=["lr", "train.batch_size"]),
        FailedProgram("", signal=9, settings=["lr", "train.batch_size"]),
    ):
        found = diagnose(failure)
        assert found is not None
        assert found.kind == "memory"
        assert "`train.batch_size` smaller" in found.remedy


def test_a_module_of_the_project_is_not_looked_for_in_a_package_index() -> None:
    found = diagnose(
        FailedProgram(TRACEBACK + "ModuleNotFoundError: No module named 'utils.io'", code=1, own={"utils"})
    )
    assert found is not None
    assert "pip" not in str(found)
    assert "PYTHONPATH" in found.remedy


def test_a_missing_file_is_explained_by_where_the_script_is_started() -> None:
    text = TRACEBACK + "FileNotFoundError: [Errno 2] No such file or directory: 'data/x.csv'"
    in_run_dir, in_lab = (diagnose(FailedProgram(text, code=1, in_run_dir=where)) for where in (True, False))
    assert in_run_dir is not None
    assert in_lab is not None
    assert "cwd: run" in in_run_dir.remedy
    assert "launch.cwd" in in_lab.remedy


def test_nothing_is_made_up() -> None:
    assert diagnose(FailedProgram("epoch 1: loss 0.5\n", code=3)) is None
    assert diagnose(FailedProgram("", code=1)) is None


def test_the_last_line_is_one_that_says_something() -> None:
    assert last_line("loss 0.5\n╰──────────╯\n\n") == "loss 0.5"
    assert last_line("") == ""
