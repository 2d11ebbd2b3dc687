"""Every backend keeps the promises of the conformance suite; the transformers loop equals transformers itself."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import looplab
from looplab.errors import LabError
from looplab.recipes.esm.esm.backends import Completion, Injection, SamplingParams, make_backend
from looplab.recipes.esm.esm.backends.draw import draw, log_softmax, uniform
from looplab.recipes.esm.esm.backends.toy import LAYERS, WIDTH, ToyBackend, _mind_directions, make_problem

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
torch.set_num_threads(1)

MODEL = Path(looplab.__file__).parent / "recipes/esm/model"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"esm_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CONFORMANCE, CHECKPOINTS = load("conformance"), load("checkpoints")
GREEDY = SamplingParams(64)
ROUNDING = 1e-3
"""Tolerance of states and log-probabilities. Kernels of x86 in float32 differ by up to 1e-4 in the states, which a strong
injection makes as large as 100, and by 2e-5 in the log-probabilities; an error of the arithmetic is 1e-2 or more."""


COARSE_ROUNDING = 0.5
"""The same in bfloat16, whose numbers have 8 bits: log-probabilities differ by up to 0.1."""


def toy_subject(_: Callable[..., Path], max_num_seqs: int = 64) -> Any:
    prompts = (*(make_problem(n).question for n in (0, 7, 30, 401, 2)), make_problem(3, slips=True).question)
    strong = Injection(_mind_directions()[2], 2, 3.0)
    return CONFORMANCE.Subject(ToyBackend(max_num_seqs), prompts, strong, begin=5, tolerance=1e-6)


def toy_in_pairs_subject(checkpoint: Callable[..., Path]) -> Any:
    return toy_subject(checkpoint, max_num_seqs=2)


def checkpoint_subject(folder: Path, **more: Any) -> Any:
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    backend = HFBackend(str(folder), **more)
    vector = np.random.default_rng(0).normal(size=backend.width).astype(np.float32)
    strong = Injection(vector, 0, 30.0)
    if backend.core.dtype == torch.float32:
        return CONFORMANCE.Subject(backend, CHECKPOINTS.PROMPTS, strong, begin=3, tolerance=ROUNDING)
    return CONFORMANCE.Subject(
        backend, CHECKPOINTS.PROMPTS, strong, begin=3, tolerance=COARSE_ROUNDING, relative=0.05, coarse=True
    )


def llama_subject(checkpoint: Callable[..., Path]) -> Any:
    return checkpoint_subject(checkpoint("llama"))


def qwen_subject(checkpoint: Callable[..., Path]) -> Any:
    return checkpoint_subject(checkpoint("qwen2"))


def hooked_llama_subject(checkpoint: Callable[..., Path]) -> Any:
    return checkpoint_subject(checkpoint("llama"), fast=False)


def gpt2_subject(checkpoint: Callable[..., Path]) -> Any:
    return checkpoint_subject(checkpoint("gpt2"))


def llama_in_pairs_subject(checkpoint: Callable[..., Path]) -> Any:
    return checkpoint_subject(checkpoint("llama"), max_num_seqs=2)


def llama_bfloat16_subject(checkpoint: Callable[..., Path]) -> Any:
    return checkpoint_subject(checkpoint("llama"), dtype="bfloat16", max_num_seqs=4)


def gpt2_bfloat16_subject(checkpoint: Callable[..., Path]) -> Any:
    return checkpoint_subject(checkpoint("gpt2"), dtype="bfloat16")


SUBJECTS = (
    toy_subject, toy_in_pairs_subject, llama_subject, llama_in_pairs_subject, llama_bfloat16_subject, qwen_subject,
    hooked_llama_subject, gpt2_subject, gpt2_bfloat16_subject,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = CHECKPOINTS.save_model(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return make


@pytest.fixture(scope="module", params=SUBJECTS, ids=lambda make: make.__name__.removesuffix("_subject"))
def subject(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Any:
    return request.param(checkpoint)


@pytest.mark.parametrize("promise", CONFORMANCE.PROMISES, ids=lambda promise: promise.__name__)
def test_the_backend_satisfies_the_contract(subject: Any, promise: Callable[[Any], None]) -> None:
    promise(subject)


def test_the_same_calls_on_the_same_batch_have_the_same_bits(subject: Any) -> None:
    """What resuming rests on: the same shapes in the same order, in one process or another."""

    def run() -> list[Any]:
        count = len(subject.prompts)
        rows = range(count)
        session = subject.backend.start_session(subject.prompts, rows)
        wishes = [subject.strong if row % 2 else None for row in rows]
        completions = session.generate(rows, range(3, 3 + count), [None] * count, None, GREEDY)
        states = session.hidden_states(rows, range(subject.backend.n_layers))
        completions += session.generate(rows, [4] * count, wishes, None, GREEDY, commit=False)
        completions += session.generate(rows, [9] * count, wishes[::-1], None, CONFORMANCE.WARM)
        return [[(completion.tokens, completion.logprobs) for completion in completions], states.tobytes()]

    first = run()
    subject.backend.start_session(subject.prompts[:3], range(3)).generate(range(3), [7] * 3, [None] * 3, None, GREEDY)
    assert run() == first


# Limits of a batch, and devices.


def rows_at_once(backend: Any, run: Callable[[Any], Any]) -> tuple[Any, list[int]]:
    """What a call gives, and the number of rows of each of its forward passes."""
    sizes: list[int] = []

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def count(tokens: Any, *rest: Any, **more: Any) -> Any:
            sizes.append(len(tokens))
            return forward(tokens, *rest, **more)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in ("step", "prefill"):
            patch.setattr(backend.core, name, counted(getattr(backend.core, name)))
        return run(backend), sizes


@pytest.mark.parametrize("fast", [True, False])
def test_no_more_rows_are_computed_at_once_than_max_num_seqs(checkpoint: Callable[..., Path], fast: bool) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    prompts = [*CHECKPOINTS.PROMPTS, *CHECKPOINTS.PROMPTS[:1] * 4]
    rows = range(len(prompts))
    vector = np.random.default_rng(0).normal(size=64).astype(np.float32)
    wishes = [Injection(vector, 0, 5.0) if row % 3 else None for row in rows]

    def run(backend: Any) -> list[Any]:
        session = backend.start_session(prompts, rows)
        first = session.generate(rows, [4] * len(rows), [None] * len(rows), None, GREEDY)
        states = session.hidden_states(rows[::-1], [1, 0])[::-1]
        probes = session.generate(rows, [3] * len(rows), wishes[::-1], None, GREEDY, commit=False)
        last = session.generate(rows[::-1], [6] * len(rows), wishes, None, GREEDY)[::-1]
        assert [session.tokens(row) for row in rows] == [
            one.tokens + other.tokens for one, other in zip(first, last, strict=True)
        ]
        session.close()
        return [states, first, probes, last]

    whole, sizes = rows_at_once(HFBackend(str(checkpoint("llama")), fast=fast), run)
    assert max(sizes) == len(prompts)
    for limit in (1, 4):
        found, sizes = rows_at_once(HFBackend(str(checkpoint("llama")), fast=fast, max_num_seqs=limit), run)
        assert max(sizes) == limit
        np.testing.assert_allclose(found[0], whole[0], rtol=0, atol=ROUNDING)
        for mine, theirs in zip(found[1:], whole[1:], strict=True):
            CONFORMANCE.assert_same(mine, theirs, ROUNDING)


def test_the_toy_answers_the_same_however_many_rows_it_computes_at_once() -> None:
    problems = [make_problem(n).question for n in range(30)]

    def run(limit: int) -> list[Any]:
        session = ToyBackend(limit).start_session(problems, range(30))
        first = session.generate(range(30), [9] * 30, [None] * 30, "\n\n", SamplingParams(64, temperature=1.0))
        wish = Injection(_mind_directions()[2], 2, 3.0)
        second = session.generate([29, 3, 7], [40] * 3, [wish, None, wish], None, GREEDY)
        return [
            first,
            second,
            session.hidden_states([9, 29, 0], [1]).tobytes(),
            [session.text(row) for row in range(30)],
        ]

    whole = run(64)
    assert all(run(limit) == whole for limit in (1, 7, 29))


def test_rows_that_wait_for_their_turn_leave_the_device(checkpoint: Callable[..., Path]) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend, HFSession

    moves: list[tuple[int, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("park", "resume"):
            move = getattr(HFSession, name)
            patch.setattr(
                HFSession, name, lambda self, name=name, move=move: moves.append((id(self), name)) or move(self)
            )
        session = HFBackend(str(checkpoint("llama")), max_num_seqs=2).start_session(CHECKPOINTS.PROMPTS[:4], range(4))
        session.generate(range(4), [2] * 4, [None] * 4, None, GREEDY)
        session.hidden_states([2], [0])
    first, second = (id(part) for part in session._parts)
    assert moves == [
        (first, "park"), (second, "park"), (first, "resume"), (first, "park"), (second, "resume"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_pass_stays_on_the_device_and_in_the_type_of_the_model(kind: str, dtype: str, tmp_path: Path) -> None:
    """On the device `meta`, which has shapes but no numbers, every tensor that is made elsewhere is an error."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from looplab.recipes.esm.esm.backends.cache import KVCache
    from looplab.recipes.esm.esm.backends.llama import LlamaCore, is_llama
    from looplab.recipes.esm.esm.backends.module import ModuleCore

    CHECKPOINTS.save_model(tmp_path, kind)
    with torch.device("meta"), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=getattr(torch, dtype))
        tokens, lengths = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, dtype=torch.long)
        steering = {0: (torch.zeros(2, dtype=torch.long), torch.zeros(2, 64))}
    cores: list[Any] = [ModuleCore(model)]
    with torch.inference_mode():
        cores += [LlamaCore(model, 64)] if is_llama(model.config) else []
        for core in cores:
            assert str(core.device) == "meta"
            cache = KVCache(core.n_layers, 3, 32)
            results = [core.prefill(tokens, lengths, cache, 0)]
            results.append(core.step(tokens[:, 0], lengths, 8, cache, 0, steering, True))
            cache.grow(90)
            assert cache.data is not None
            assert (str(cache.data.device), str(cache.data.dtype)) == ("meta", f"torch.{dtype}")
            for logits, states in results:
                assert (str(logits.device), logits.dtype) == ("meta", torch.float32)
                assert states.shape == (3, core.n_layers, 64)


# The transformers loop against transformers.


def reference(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    return model, tokenizer


def hf_greedy(model: Any, tokenizer: Any, prompts: list[str], limit: int) -> list[Completion]:
    """The greedy answers of `generate`, padded on the left, up to the end of the text."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=limit,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logprobs = torch.stack(out.logits, dim=1).log_softmax(-1).amax(-1).tolist()
    found = []
    for row, tokens in enumerate(out.sequences[:, batch["input_ids"].shape[1] :].tolist()):
        ended = tokenizer.eos_token_id in tokens
        end = tokens.index(tokenizer.eos_token_id) + 1 if ended else limit
        found.append(Completion(tokens[:end], "", logprobs[row][:end], "eos" if ended else "length"))
    return found


@pytest.fixture(params=["llama", "qwen2", "gpt2", "tiny"])
def model_folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    if request.param != "tiny":
        return checkpoint(request.param)
    if not (MODEL / "model.safetensors").exists():
        pytest.skip("the checkpoint of the recipe is not there")
    return MODEL


def prompts_for(folder: Path) -> list[str]:
    if folder != MODEL:
        return list(CHECKPOINTS.PROMPTS)
    from looplab.recipes.esm.esm.tiny.task import examples

    return [example.question for example in examples("steerable", "test", 40, 1)]


def test_greedy_tokens_equal_those_of_generate(model_folder: Path) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    prompts = prompts_for(model_folder)
    expected = hf_greedy(*reference(model_folder), prompts, 48)
    for fast in (True, False):
        session = HFBackend(str(model_folder), fast=fast).start_session(prompts, [0] * len(prompts))
        completions = session.generate(range(len(prompts)), [48] * len(prompts), [None] * len(prompts), None, GREEDY)
        CONFORMANCE.assert_same(completions, expected, ROUNDING)


def test_the_fast_forward_pass_matches_the_module(checkpoint: Callable[..., Path]) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend
    from looplab.recipes.esm.esm.backends.llama import LlamaCore

    for kind in ("llama", "qwen2"):
        model, tokenizer = reference(checkpoint(kind))
        backend = HFBackend(str(checkpoint(kind)))
        assert isinstance(backend.core, LlamaCore)
        prompt = CHECKPOINTS.PROMPTS[1]
        tokens = tokenizer([prompt, prompt], return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            out = model(input_ids=tokens, output_hidden_states=True)
        states = backend.start_session([prompt], [0]).hidden_states([0], range(2))
        size = float(out.hidden_states[1].abs().max())
        np.testing.assert_allclose(states[0, 0] / size, out.hidden_states[1][0, -1] / size, rtol=0, atol=1e-4)
        logprobs = torch.log_softmax(out.logits[0, -1], -1)
        completion = backend.start_session([prompt], [0]).generate([0], [1], [None], None, GREEDY)[0]
        assert completion.logprobs[0] == pytest.approx(float(logprobs.max()), abs=ROUNDING)


def test_an_injection_equals_a_hook_on_the_whole_sequence(model_folder: Path) -> None:
    """The ground truth: no cache at all, the vector added at each steered position in every forward."""
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    model, tokenizer = reference(model_folder)
    backend = HFBackend(str(model_folder))
    prompt = prompts_for(model_folder)[1]
    rng = np.random.default_rng(3)
    wishes = [
        Injection(rng.normal(size=backend.width).astype(np.float32), 0, 2.0),
        Injection(rng.normal(size=backend.width).astype(np.float32), 1, -3.0),
    ]
    session = backend.start_session([prompt], [0])
    completions = [session.generate([0], [6], [wish], None, GREEDY)[0] for wish in wishes]
    found = CONFORMANCE.joined(*(completion for completion in completions if completion.tokens))

    tokens, logprobs = tokenizer(prompt)["input_ids"], []
    start = len(tokens)
    places = {start - 1: wishes[0], start + 5: wishes[1]}

    def hook(number: int) -> Callable[..., Any]:
        def add(_module: Any, _inputs: Any, output: Any) -> Any:
            x = (output[0] if isinstance(output, tuple) else output).clone()
            for place, wish in places.items():
                if wish.layer == number and place < x.shape[1]:
                    x[:, place] += torch.from_numpy(wish.scale * wish.vector)
            return (x, *output[1:]) if isinstance(output, tuple) else x

        return add

    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    for number, layer in enumerate(layers):
        layer.register_forward_hook(hook(number))
    with torch.inference_mode():
        for _ in range(12):
            logprob, token = model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1).max(-1)
            tokens.append(int(token))
            logprobs.append(float(logprob))
            if tokens[-1] in backend.eos_tokens:
                break
    assert session.tokens(0) == found.tokens
    finish = "eos" if tokens[-1] in backend.eos_tokens else "length"
    CONFORMANCE.assert_same([found], [Completion(tokens[start:], "", logprobs, finish)], ROUNDING)


def test_rows_differ_between_batches_only_by_rounding(checkpoint: Callable[..., Path]) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    backend = HFBackend(str(checkpoint("llama")))
    tokenizer = CHECKPOINTS.WORDS
    rng = np.random.default_rng(1)
    prompts = [" ".join(rng.choice(tokenizer, size=size)) for size in rng.integers(1, 20, size=48)]

    def run(chosen: list[int]) -> tuple[Any, list[Completion]]:
        session = backend.start_session([prompts[n] for n in chosen], chosen)
        rows = range(len(chosen))
        states = session.hidden_states(rows, range(2))
        return states, session.generate(rows, [20] * len(chosen), [None] * len(chosen), None, GREEDY)

    states, completions = run(list(range(48)))
    for chosen in ([0], [5, 3], [47, 1, 20, 9, 30, 31, 2], list(range(47, -1, -2))):
        found = run(chosen)
        np.testing.assert_allclose(found[0], states[chosen], rtol=0, atol=ROUNDING)
        CONFORMANCE.assert_same(found[1], [completions[n] for n in chosen], ROUNDING)


def test_rows_finish_at_different_times_and_leave_the_batch(checkpoint: Callable[..., Path]) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    backend = HFBackend(str(checkpoint("llama")))
    count = len(CHECKPOINTS.PROMPTS)
    whole = backend.start_session(CHECKPOINTS.PROMPTS, range(count))
    expected = whole.generate(range(count), [40] * count, [None] * count, None, GREEDY)
    sizes: list[int] = []
    step = backend.core.step
    backend.core.step = lambda tokens, *rest: sizes.append(len(tokens)) or step(tokens, *rest)  # type: ignore[method-assign]
    session = backend.start_session(CHECKPOINTS.PROMPTS, range(count))
    limits = [3, 40, 1, 17, 9, 17]
    completions = session.generate(range(count), limits, [None] * count, None, GREEDY)
    assert [len(completion.tokens) for completion in completions] == limits
    assert sum(sizes) == sum(limit - 1 for limit in limits)  # the first token comes from the prefill
    for row in range(count):
        rest = session.generate([row], [40 - limits[row]], [None], None, GREEDY)[0]
        CONFORMANCE.assert_same([CONFORMANCE.joined(completions[row], rest)], [expected[row]], ROUNDING)


def test_a_prompt_that_occurs_often_is_prefilled_once(checkpoint: Callable[..., Path]) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    backend = HFBackend(str(checkpoint("llama")))
    seen: list[int] = []
    prefill = backend.core.prefill
    backend.core.prefill = lambda tokens, *rest: seen.append(len(tokens)) or prefill(tokens, *rest)  # type: ignore[method-assign]
    session = backend.start_session([CHECKPOINTS.PROMPTS[0]] * 5 + [CHECKPOINTS.PROMPTS[1]] * 3, range(8))
    assert sum(seen) == 2
    completions = session.generate(range(8), [9] * 8, [None] * 8, None, GREEDY)
    CONFORMANCE.assert_same(completions, [completions[0]] * 5 + [completions[5]] * 3, ROUNDING)


def test_an_answer_longer_than_the_cache_continues(checkpoint: Callable[..., Path]) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    backend = HFBackend(str(checkpoint("llama")), max_model_len=300)
    session = backend.start_session(CHECKPOINTS.PROMPTS[:2], [0, 1])
    completions = session.generate([0, 1], [999, 999], [None, None], None, GREEDY)
    lengths = [len(tokens) for tokens in backend.tokenizer.encode(CHECKPOINTS.PROMPTS[:2], 300)]
    assert [length + len(completion.tokens) for length, completion in zip(lengths, completions, strict=True)] == [
        300,
        300,
    ]
    assert {completion.finish for completion in completions} == {"length"}
    expected = hf_greedy(*reference(checkpoint("llama")), list(CHECKPOINTS.PROMPTS[:2]), 120)
    begun = [Completion(completion.tokens[:120], "", completion.logprobs[:120], "length") for completion in completions]
    CONFORMANCE.assert_same(begun, expected, ROUNDING)


def test_a_row_that_has_ended_generates_nothing(checkpoint: Callable[..., Path]) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    backend = HFBackend(str(checkpoint("llama")))
    free = backend.start_session(CHECKPOINTS.PROMPTS[:1], [0]).generate([0], [10], [None], None, GREEDY)[0]
    backend.eos_tokens = frozenset({free.tokens[6]})
    first = free.tokens.index(free.tokens[6])
    session = backend.start_session(CHECKPOINTS.PROMPTS[:1], [0])
    completion = session.generate([0], [10], [None], None, GREEDY)[0]
    assert (completion.tokens, completion.finish) == (free.tokens[: first + 1], "eos")
    after = session.generate([0], [10], [None], None, GREEDY)[0]
    assert (after.tokens, after.text, after.finish) == ([], "", "eos")


def test_a_token_may_contain_text_beyond_the_delimiter(checkpoint: Callable[..., Path]) -> None:
    """Words of the tokenizer, forced through: the piece keeps what the last token brought."""
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    backend = HFBackend(str(checkpoint("llama")))
    script = [*backend.tokenizer.encode(["one"], 99)[0], *backend.tokenizer.encode(["\n\nSo"], 99)[0]]
    core, step, prefill = backend.core, backend.core.step, backend.core.prefill
    queue: Iterator[int] = iter([*script, 6, 6])

    def forced(result: tuple[Any, Any]) -> tuple[Any, Any]:
        logits = torch.full_like(result[0], -30.0)
        logits[:, next(queue)] = 0.0
        return logits, result[1]

    core.step = lambda *given: forced(step(*given))  # type: ignore[method-assign]
    core.prefill = lambda *given: forced(prefill(*given))  # type: ignore[method-assign]
    session = backend.start_session(["now"], [0])
    completion = session.generate([0], [20], [None], "\n\n", GREEDY)[0]
    assert (completion.text, completion.finish, completion.tokens) == ("one\n\nSo", "delimiter", script)


def test_a_delimiter_may_end_within_a_character(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from looplab.recipes.esm.esm.backends.checkpoint import TokenizerWrapper

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({byte: n for n, byte in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=plain), chat=False)
    tokens = tokenizer.encode(["好的。"], 99)[0]
    assert len(tokens) == 9
    assert tokens[-1] in tokenizer.delimiter_tokens("。")
    assert tokenizer.text([], tokens) == "好的。"
    assert "。" not in tokenizer.text([], tokens[:-1])


def test_a_missing_model_is_reported(tmp_path: Path) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    with pytest.raises(LabError, match="no model folder"):
        HFBackend(str(tmp_path / "absent"))
    with pytest.raises(LabError, match=r"config\.json"):
        HFBackend(str(tmp_path))


def test_prompts_that_are_too_long_are_reported(checkpoint: Callable[..., Path]) -> None:
    from looplab.recipes.esm.esm.backends.hf import HFBackend

    backend = HFBackend(str(checkpoint("llama")), max_model_len=16)
    with pytest.raises(LabError, match="max_model_len allows 15"):
        backend.start_session(["one " * 40], [0])
    with pytest.raises(LabError, match="empty"):
        backend.start_session([""], [0])
    with pytest.raises(LabError, match="chat template"):
        HFBackend(str(checkpoint("llama")), chat=True)


def test_the_fingerprint_is_of_weights_and_tokenizer(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from looplab.recipes.esm.esm.backends.checkpoint import fingerprint

    folder = checkpoint("llama")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert fingerprint(tmp_path) == fingerprint(folder) != fingerprint(checkpoint("qwen2"))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert fingerprint(tmp_path) != fingerprint(folder)


def test_a_backend_is_created_by_name(checkpoint: Callable[..., Path]) -> None:
    def settings(backend: str) -> Any:
        return SimpleNamespace(
            backend=backend,
            name_or_path=str(checkpoint("llama")),
            dtype="float32",
            device="cpu",
            threads=1,
            max_model_len=64,
            max_num_seqs=4,
            gpu_memory_utilization=0.5,
            tensor_parallel_size=1,
        )

    made: list[Any] = [make_backend(settings(name)) for name in ("toy", "transformers")]
    assert [(backend.name, backend.max_num_seqs) for backend in made] == [("toy", 4), ("transformers", 4)]
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(LabError, match="vLLM cannot be imported"):
            make_backend(settings("vllm"))
    with pytest.raises(LabError, match=r"unknown model\.backend 'tensorrt'"):
        make_backend(settings("tensorrt"))


# The toy.


def toy_accuracy(wish: Injection | None, slips: bool = False) -> float:
    problems = [make_problem(n, slips) for n in range(120)]
    rows = range(120)
    session = ToyBackend().start_session([p.question for p in problems], rows)
    session.generate(rows, [64] * 120, [None] * 120, "\n\n", GREEDY)
    session.generate(rows, [64] * 120, [wish] * 120, None, GREEDY)
    return float(np.mean([session.text(row).rpartition("#### ")[2] == p.gold for row, p in enumerate(problems)]))


def test_the_toy_can_be_steered_but_not_out_of_slips() -> None:
    good = Injection(_mind_directions()[3], 3, 2.0)
    other = np.random.default_rng(1).normal(size=WIDTH).astype(np.float32)
    other -= other @ _mind_directions()[3] * _mind_directions()[3]
    random = Injection(other / np.linalg.norm(other), 3, 2.0)
    assert toy_accuracy(None) == toy_accuracy(random) < 0.6
    assert toy_accuracy(good) == 1.0
    assert toy_accuracy(None, slips=True) == toy_accuracy(good, slips=True)


def test_the_mean_difference_of_toy_states_is_a_direction_that_helps() -> None:
    problems = [make_problem(n) for n in range(60)]
    rows = range(60)
    session = ToyBackend().start_session([p.question for p in problems], rows)
    session.generate(rows, [64] * 60, [None] * 60, "\n\n", SamplingParams(64, temperature=1.0))
    states = session.hidden_states(rows, range(LAYERS))
    session.generate(rows, [64] * 60, [None] * 60, None, SamplingParams(64, temperature=1.0))
    right = np.array([session.text(row).endswith(f"#### {p.gold}") for row, p in enumerate(problems)])
    vector = states[right, 3].mean(axis=0) - states[~right, 3].mean(axis=0)
    assert toy_accuracy(Injection(vector, 3, 1.0)) > toy_accuracy(None) + 0.3


# Drawing.


@given(st.integers(0, 2**63), st.integers(0, 99), st.integers(0, 9999))
def test_a_uniform_number_is_in_range_and_repeatable(seed: int, salt: int, position: int) -> None:
    value = uniform(seed, salt, position)
    assert 0 <= value < 1
    assert value == uniform(seed, salt, position)


def test_samples_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], dtype=np.float32)).repeat(4000, axis=0)
    plain, logprobs = draw(logits, range(4000), [0] * 4000, SamplingParams(1, temperature=1.0))
    shares = np.bincount(plain, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(logprobs, log_softmax(logits)[0][plain], atol=1e-6)
    nucleus, _ = draw(logits, range(4000), [0] * 4000, SamplingParams(1, temperature=1.0, top_p=0.7))
    np.testing.assert_allclose(np.bincount(nucleus, minlength=4) / 4000, [0.625, 0.375, 0, 0], atol=0.03)
    cold, _ = draw(logits, range(4000), [0] * 4000, SamplingParams(1, temperature=0.1))
    assert np.mean(cold == 0) > 0.98


@given(st.floats(0.0, 1.0), st.floats(0.05, 5.0), st.integers(0, 10**6))
def test_top_p_keeps_the_likeliest_tokens_and_never_none(top_p: float, temperature: float, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(1, 20)).astype(np.float32) * 3
    token, _ = draw(logits, [seed], [1], SamplingParams(1, temperature=temperature, top_p=top_p))
    weights = np.exp(log_softmax(logits / temperature))[0]
    assert weights[weights > weights[token[0]]].sum() <= max(top_p, 0) + 1e-9
