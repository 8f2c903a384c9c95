"""The library trains, continues, measures, asks and exports a run by functions that return values."""

import email
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import sagetrain
from distributed import run_distributed
from forked import PATIENCE, Command
from prepare_inputs import TEXTS, write_jsonl
from runs import ROOT
from sagetrain import api
from sagetrain.cluster.launcher import free_port
from sagetrain.config.errors import CheckpointError, ConfigError, TrainingError

TOKENS = 2560


def settings(corpus: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return overrides of `quickstart` for ten steps of a small model on one rank."""
    return {
        "model": {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2},
        "data.train": [{"path": str(corpus / "train")}],
        "data.valid": [{"path": str(corpus / "valid")}],
        "data.seq_length": 32,
        "data.micro_batch_size": 4,
        "tokens_per_step": {"schedule": "constant", "tokens": 256},
        "lr_schedule.warmup_tokens": 256,
        "parallel.engine": "fsdp",  # What DeepSpeed remembers of an engine is never freed.
        "training.run_dir": run_dir,
        "training.total_tokens": TOKENS,
        "training.dtype": "fp32",
        "evaluation": {"every_tokens": 1280, "num_sequences": 4},
        "checkpoint.every_tokens": 1280,
        **changes,
    }


class Notes(api.Callback):
    """A callback that records which hooks were called."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def on_start(self, start: Any) -> None:
        self.seen.append(("start", start.position.step, start.main))
        self.engine = weakref.ref(start.engine)

    def on_step(self, position: Any, result: Any) -> None:
        self.seen.append(("step", position.step, position.tokens, result.applied))

    def on_row(self, position: Any, values: Any) -> None:
        self.seen.append(("row", position.step)) if "train/loss" in values else None

    def on_evaluate(self, position: Any, losses: Any) -> None:
        self.seen.append(("evaluate", position.step, *losses))

    def on_event(self, position: Any, event: Any) -> None:
        self.seen.append(("event", event.kind))

    def on_save(self, position: Any) -> None:
        self.seen.append(("save", position.step))

    def on_end(self, position: Any, finished: bool) -> None:
        self.seen.append(("end", position.step, finished))


def test_what_a_program_sets_in_torch_changes_no_number(tmp_path: Path, corpus: Path) -> None:
    def losses(name: str) -> list[float]:
        changes = settings(corpus, tmp_path / name, **{"training.total_tokens": 512})
        found, model = api.train("quickstart", changes).metrics, api.load_run(tmp_path / name)
        return [found["train/loss"], found["valid/loss"], *model.score([("import ", "os")])]

    expected = losses("plain")
    torch.set_default_dtype(torch.float16)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            assert losses("changed") == expected
            assert torch.get_default_dtype() is torch.float16 and torch.is_autocast_enabled("cpu")
    finally:
        torch.set_default_dtype(torch.float32)


class Broken(api.Callback):
    """A callback that fails in step 12 and counts the later calls."""

    after = 0

    def on_step(self, position: Any, result: Any) -> None:
        if position.step == 12:
            raise KeyError("mine")
        self.after += position.step > 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, api.TrainingResult, Notes]:
    """A run that a program trained in its own process, which printed nothing of its own and left no variable."""
    run_dir, notes = tmp_path_factory.mktemp("api") / "run", Notes()
    before, hook = {*os.environ}, sys.excepthook
    found = api.train("quickstart", settings(corpus, run_dir), callbacks=[notes])
    assert sys.excepthook is hook  # torch would name the rank once more for each run.
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & ({*os.environ} - before)
    return run_dir, found, notes


def test_training_returns_values_and_calls_every_hook(trained: tuple[Path, api.TrainingResult, Notes], capfd) -> None:
    run_dir, found, notes = trained
    assert (found.run_dir, found.step, found.tokens, found.finished) == (run_dir, 10, TOKENS, True)
    assert found.metrics["train/loss"] < 6.5 and "valid/loss" in found.metrics
    steps = [("step", number, 256 * number, True) for number in range(1, 11)]
    assert [each for each in notes.seen if each[0] == "step"] == steps
    assert [each for each in notes.seen if each[0] == "evaluate"] == [(*("evaluate", n), "valid/loss") for n in (5, 10)]
    assert [each for each in notes.seen if each[0] == "save"] == [("save", 5), ("save", 10)]
    assert ("row", 10) in notes.seen
    assert notes.seen[0] == ("start", 0, True) and notes.seen[-1] == ("end", 10, True)
    assert notes.engine() is None  # The memory of the run is free again.


def test_a_callback_that_fails_ends_the_run_with_a_checkpoint(
    trained: tuple[Path, api.TrainingResult, Notes], corpus: Path, tmp_path: Path, capfd
) -> None:
    run_dir = shutil.copytree(trained[0], tmp_path / "run")
    changes = settings(corpus, run_dir, **{"training.total_tokens": 2 * TOKENS})
    broken, notes, said = Broken(), Notes(), []
    with pytest.raises(
        TrainingError, match=r"the callback Broken failed in on_step: KeyError: 'mine'\. Started again"
    ) as e:
        api.train("quickstart", changes, callbacks=[notes, broken], say=said.append)
    assert "continues from step-00000013" in str(e.value) and isinstance(e.value.__cause__, Exception)
    assert (
        broken.after == 0 and ("event", "resume") in notes.seen and any("resumed from step-" in text for text in said)
    )
    del e
    assert api.train("quickstart", changes).step == 20
    assert notes.engine() is None
    assert "resumed" not in "".join(capfd.readouterr())


TWO_HOSTS = """
import os, sys
import sagetrain
from sagetrain.config.errors import ConfigError
overrides = {**eval(sys.argv[1]), "optimizer.lr": -1.0 if os.environ["RANK"] == "1" else 1e-3}
try:
    sagetrain.train("quickstart", overrides, own_process=True)
except ConfigError as error:
    print(error)
"""


def test_a_host_that_refuses_tells_the_others(tmp_path: Path, corpus: Path) -> None:
    """Two processes are hosts of one rank each. Without a word of the second one, the first would wait for minutes."""
    given = {key: str(value) if isinstance(value, Path) else value for key, value in settings(corpus, tmp_path).items()}
    hosts = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    hosts["MASTER_PORT"] = str(free_port())
    (tmp_path / "host.py").write_text(TWO_HOSTS)
    words = ["python", str(tmp_path / "host.py"), repr(given)]
    said = [tmp_path / f"said by {rank}" for rank in "01"]
    started = [
        Command(words, {**os.environ, **hosts, "RANK": str(rank)}, log, tmp_path, tmp_path / f"errors of {rank}")
        for rank, log in enumerate(said)
    ]
    for process in started:
        process.wait(PATIENCE)
    first, second = (log.read_text() for log in said)
    assert "optimizer.lr = -1.0" in second
    assert re.search(r"some hosts cannot take part.*\n.*\(rank 1\): .*optimizer.lr = -1.0", first, re.DOTALL), first


class FailsOn1(api.Callback):
    """A callback that fails on rank 1, in a hook."""

    def __init__(self, hook: str) -> None:
        if dist.get_rank() == 1:
            setattr(self, hook, self.fail)

    def fail(self, *told: Any) -> None:
        raise KeyError("mine")


def fails_late_on_1(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a cross-entropy, and after a few calls on rank 1 the mean of it."""
    counted[0] += 1
    reduction = "mean" if dist.is_initialized() and dist.get_rank() == 1 and counted[0] > 3 else "none"
    return F.cross_entropy(logits, labels, reduction=reduction)


class Brittle(torch.autograd.Function):
    """The identity, whose backward pass fails on rank 1 from the fourth call on."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        counted[0] += 1
        ctx.fails = dist.is_initialized() and dist.get_rank() == 1 and counted[0] > 3
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if ctx.fails:
            raise KeyError("mine")
        return grad


def fails_backward_on_1(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a cross-entropy whose backward pass fails late on rank 1."""
    return F.cross_entropy(Brittle.apply(logits), labels, reduction="none")


def fails_in_25_on_1(index: int) -> np.ndarray:
    """Return tokens, but not for one sequence of step 4."""
    if dist.is_initialized() and dist.get_rank() == 1 and 24 <= index < 32:
        raise KeyError("mine")
    return counting(index)


def fails_at_the_start_on_0(index: int) -> np.ndarray:
    """Return tokens, but not for a sequence that is looked at when a run begins."""
    if dist.is_initialized() and dist.get_rank() == 0 and index == 10:
        raise KeyError("mine")
    return counting(index)


def fails_at_once_on_1(index: int) -> np.ndarray:
    """Return no tokens on rank 1."""
    if dist.is_initialized() and dist.get_rank() == 1:
        raise KeyError("mine")
    return counting(index)


def full_disk(text: str) -> None:
    """Fail where rank 0 alone says its last line."""
    if text.startswith("finished"):
        raise OSError(28, "No space left on device")


counted = [0]


def rank_of_two(changes: dict[str, Any], folder: Path) -> list[Any]:
    """Return what each call of train gives or raises on this rank."""
    os.environ["MASTER_PORT"] = "29500"  # The ranks have met. This is only read.
    found: list[Any] = []
    cases: dict[str, dict[str, Any]] = {hook: {"callbacks": [FailsOn1(hook)]} for hook in ("on_step", "on_end")}
    cases |= {"loss": {"loss": fails_late_on_1}, "backward": {"loss": fails_backward_on_1}}
    cases |= {
        each.__name__: {"tokens": each} for each in (fails_in_25_on_1, fails_at_the_start_on_0, fails_at_once_on_1)
    }
    cases |= {"full": {"say": full_disk}}
    for name, given in {"plain": {}, **cases}.items():
        counted[0], own = 0, OWN if "tokens" in given else {}
        try:
            run = api.train("quickstart", {**changes, **own, "training.run_dir": folder / name}, **given)
            found.append((run.finished, dict(run.metrics)))
        except (ConfigError, TrainingError, OSError) as error:
            found.append(str(error))
    return found


def test_ranks_have_the_same_metrics_and_the_same_errors(tmp_path: Path, corpus: Path) -> None:
    """A function that fails on one rank is an error on all. The step in which a loss failed is not made."""
    changes = settings(corpus, tmp_path, **{"parallel.zero_stage": 1, "training.total_tokens": 1280})
    first, second = run_distributed(rank_of_two, 2, changes, tmp_path)
    assert first[:-1] == second[:-1]
    plain, step, end, loss, backward, tokens, begins, at_once, full = first
    assert plain[0] and {"train/loss", "valid/loss", "perf/tokens_per_second"} <= plain[1].keys()
    assert re.match(r"rank 1: the callback FailsOn1 failed in on_step: KeyError: 'mine'\. .* from step-00000002$", step)
    assert re.match(r"rank 1: the callback FailsOn1 failed in on_end: KeyError: 'mine'", end)
    said = r"rank 1: the loss \S+fails_late_on_1 failed: ValueError: returned \(\); return .* from step-00000002$"
    assert re.match(said, loss), loss
    said = r"rank 1: the loss \S+fails_backward_on_1 failed: KeyError: 'mine'\. .* from step-00000002$"
    assert re.match(said, backward), backward
    said = r"rank 1: tokens: fails_in_25_on_1\(\d+\) failed: KeyError: 'mine'\. .* begins anew: "
    assert re.match(said, tokens), tokens
    said = r"some hosts cannot .* \(rank 0\): tokens: fails_at_the_start_on_0\(10\) failed: KeyError: 'mine'$"
    assert re.match(said, begins, re.DOTALL), begins
    assert re.match(r"rank 1: tokens: fails_at_once_on_1\(\d+\) failed: KeyError: 'mine'\. ", at_once), at_once
    assert full == "[Errno 28] No space left on device"
    assert second[-1].startswith("rank 0: the end of the run failed: OSError: [Errno 28] No space"), second[-1]


def test_a_process_trains_one_run_at_a_time(tmp_path: Path, corpus: Path) -> None:
    """It catches signals in its main thread alone."""
    changes, said = settings(corpus, tmp_path / "run", **{"training.total_tokens": 512}), []

    class Trains(api.Callback):
        def on_step(self, position: Any, result: Any) -> None:
            for given in ({}, {"own_process": True}):
                thread = threading.Thread(target=self.train, args=(given,))
                thread.start()
                thread.join()

        def train(self, given: dict[str, Any]) -> None:
            with pytest.raises(ConfigError) as error:
                api.train("quickstart", changes, **given)
            said.append(str(error.value))

    assert api.train("quickstart", changes, callbacks=[Trains()]).finished
    assert "another call of train is under way" in said[0] and "own_process=True catches signals" in said[1]


def counting(index: int) -> np.ndarray:
    """Return the 33 tokens of a sequence that counts up from a start of its own."""
    return (np.random.default_rng(index).integers(40) + np.arange(33)) % 40


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a cross-entropy that gives every token some of the probability, at random how much."""
    return F.cross_entropy(logits, labels, label_smoothing=0.4 * torch.rand(()).item(), reduction="none")


OWN = {"model.vocab_size": 40, "data.train": [{"path": "none"}], "data.valid": [], "evaluation": {}}


def test_a_program_brings_its_tokens_and_its_loss(tmp_path: Path, corpus: Path) -> None:
    """Only the same tokens and the same loss continue the run. It ends as a run that was never stopped: the loss draws
    the same numbers."""
    own, said = OWN | {"lr_schedule.shape": "constant"}, []
    changes = settings(corpus, tmp_path / "run", **own)
    half = api.train(
        "quickstart", changes | {"training.total_tokens": 1280}, tokens=counting, loss=smoothed, say=said.append
    )
    assert half.finished and f"loss: {__name__}.smoothed" in said
    for given, message in (
        ({"tokens": counting}, rf"loss: checkpoint '{__name__}\.smoothed', this run None"),
        ({"tokens": lambda index: counting(index + 1), "loss": smoothed}, r"data\.train: none has changed since"),
        ({"loss": smoothed}, r"data\.train\.0\.path = \"none\": stands for no data"),
    ):
        with pytest.raises(ConfigError, match=message):
            api.train("quickstart", changes, **given)
    found = api.train("quickstart", changes, tokens=counting, loss=smoothed)
    straight = settings(corpus, tmp_path / "straight", **own)
    whole = api.train("quickstart", straight, tokens=counting, loss=smoothed)
    plain = api.train("quickstart", settings(corpus, tmp_path / "plain", **own), tokens=counting)
    assert (found.step, whole.step) == (10, 10)
    assert found.metrics["train/loss"] == whole.metrics["train/loss"]
    assert found.metrics["train/loss"] != plain.metrics["train/loss"]
    assert whole.metrics["train/loss"] < 3.7  # The first loss is ln 40.


def short(index: int) -> list[int]:
    return [1] * (32 + (index == 0))


@pytest.mark.parametrize(("given", "message"), [
    ({"tokens": lambda index: [0] * 32}, r"tokens: <lambda>\(0\) returned int64 \(32,\); return 33 tokens"),
    ({"tokens": lambda index: [41] * 33}, r"returned tokens from 41 to 41, outside of the vocabulary of 40"),
    ({"tokens": lambda index: [0.5] * 33}, r"returned float64 \(33,\)"),
    ({"tokens": lambda index: {}[index]}, r"tokens: <lambda>\(0\) failed: KeyError: 0"),
    ({"tokens": lambda index: api.Sample(counting(0), [9, 5])}, r"document_starts \[9, 5\]; they rise inside of"),
    ({"tokens": lambda index: api.Sample(counting(0), [], counted=np.ones(32, bool))}, "masks need token files"),
    ({"tokens": 5}, "tokens: 5 cannot be called"),
    ({"tokens": counting, "loss": 5}, "loss: 5 cannot be called"),
    ({"tokens": counting, "loss": lambda logits, labels: logits.mean()}, r"<lambda> returned \(\); return the loss of"),
    ({"tokens": counting, "loss": lambda logits, labels: labels * 1.0}, "finite and with a gradient"),
    ({"tokens": counting, "loss": api.by_sequence(lambda logits, labels: logits.mean(-1))},
     r"returned \(4, 4\); return the loss of each sequence: a tensor \[4\] for 4 sequences of 4 tokens, without"),
    ({"tokens": counting, "loss": lambda logits, labels: logits[labels]}, "failed on a trial: IndexError"),
])  # fmt: skip
def test_tokens_and_losses_that_cannot_be_used_are_refused(
    tmp_path: Path, corpus: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        api.train("quickstart", settings(corpus, tmp_path / "run", **OWN), **given)
    assert not (tmp_path / "run").exists()


def test_a_loss_of_sequences_is_refused_where_ranks_have_slices(tmp_path: Path, corpus: Path) -> None:
    changes = settings(corpus, tmp_path / "run", **OWN, **{"parallel.context_parallel_size": 2})
    whole = api.by_sequence(lambda logits, labels: logits.mean((1, 2)))
    with pytest.raises(ConfigError, match=r"parallel\.context_parallel_size = 2: gives .* whole .*\s+fix: set it to 1"):
        api.train("quickstart", changes, tokens=counting, loss=whole)


def test_tokens_and_token_files_exclude_each_other(tmp_path: Path, corpus: Path) -> None:
    changes = settings(corpus, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"a function gives the tokens of this run .* set data\.train: \[\{path"):
        api.train("quickstart", changes, tokens=counting)
    with pytest.raises((ConfigError, TrainingError), match=r"tokens: short\(\d+\) returned int64 \(32,\)"):
        api.train("quickstart", settings(corpus, tmp_path / "run", **OWN), tokens=short)


@pytest.fixture(scope="module")
def loaded(trained: tuple[Path, api.TrainingResult, Notes]) -> api.Model:
    return api.load_run(trained[0])


def test_a_model_generates_scores_evaluates_and_is_exported(trained: tuple[Path, Any, Any], loaded: api.Model) -> None:
    model = loaded
    assert re.fullmatch(rf"Model\({trained[0]}, step \d+, [\d,]+ tokens\)", repr(model))
    one, two = model.generate(["import ", "def"], max_tokens=5, temperature=0)
    assert (one.prompt, two.prompt, len(one.tokens)) == ("import ", "def", 5)
    assert model.generate("import ", max_tokens=5, temperature=0)[0].text == one.text
    likely, unlikely = model.score([("import ", one.text), ("import ", "🙂🙂")])
    assert unlikely < likely < 0
    (held,) = model.evaluate(num_sequences=4)
    assert held.sequences == 4 and 1 < held.loss < 7
    assert model.export(trained[0].parent / "hf").architecture == "Qwen3ForCausalLM"


MISTAKES: dict[str, Callable[[api.Model], object]] = {
    'prepare: request is "texts", and must be Request': lambda model: api.prepare("texts"),
    'Request: vocab_size is "1000", and must be int': lambda model: api.Request(["a"], output="b", vocab_size="1000"),
    "Request: sources is 3, and must be str": lambda model: api.Request(3, output="b"),
    'Chats: seq_length is "128", and must be int': lambda model: api.Chats("messages", "128"),
    "seq_length 1 is below 2": lambda model: api.Pairs("prompt", "completion", 1),
    "Chats: template 'chat.jinja' is no Jinja template: give its text": lambda model: api.Chats("m", 64, "chat.jinja"),
    "plan: gpus_per_host is 0, and must be a number from 1 on": lambda model: api.plan("1b", gpus_per_host=0),
    "plan: network_gbps is nan, and must be a number": lambda model: api.plan("1b", network_gbps=math.nan),
    "load_config: path is null, and must be str": lambda model: api.load_config(None),
    "plan: world_size is true, and must be int": lambda model: api.plan("quickstart", world_size=True),
    "train: config is 7, and must be RunConfig": lambda model: api.train(7),
    "train: say is true, and must be Callable": lambda model: api.train("quickstart", say=True),
    "load_run: run_dir is a Model, and must be str": lambda model: api.load_run(model),
    'generate: max_tokens is "3", and must be int': lambda model: model.generate("a", max_tokens="3"),
    "generate: max_tokens is 0, and must be a number from 1 on": lambda model: model.generate("a", max_tokens=0),
    "generate: top_k is -1, and must be a number from 0 on": lambda model: model.generate("a", top_k=-1),
    "evaluate: num_sequences is 0, and must be a number": lambda model: model.evaluate(num_sequences=0),
    "compare: seeds is 0, and must be a number from 1": lambda model: api.compare(
        ["325m"], variants={"a": {}}, seeds=0
    ),
    "compare: margin is nan, and must be": lambda model: api.compare(["325m"], variants={"a": {}}, margin=math.nan),
    "temperature 1e-09: neither 0 nor at least": lambda model: model.generate("a", temperature=1e-9),
    "top_p 1.5: not above 0": lambda model: model.generate("a", top_p=1.5),
    "prompt 2 of 2: not valid Unicode": lambda model: model.generate(["a", "b\ud800"]),
    "the context 'a' with '\\ud800': not valid Unicode": lambda model: model.score([("a", "\ud800")]),
    "variants ': ': is written 'NAME: KEY=VALUE'": lambda model: api.compare(["quickstart"], variants={"": {}}),
    "num_workers 0 is not from 1 to": lambda model: api.prepare(
        api.Request(["a"], output="b", vocab_size=1000, num_workers=0)
    ),
    "give either tokenizer or vocab_size to train one": lambda model: api.prepare(
        api.Request(["a"], output="b", vocab_size=1000, tokenizer="t.model")
    ),
    "tokenizer_sample 0 is below 1": lambda model: api.prepare(
        api.Request(["a"], output="b", vocab_size=1000, tokenizer_sample=0)
    ),
    "score: pairs is a list, and must be Sequence": lambda model: model.score(["import ", "os"]),
    'compare: configs is "quickstart", and must be Sequence': lambda model: api.compare("quickstart"),
    'load_run: linear is "FP8", and must be one of "bf16", "fp8", "int8" or None; did you mean "fp8"?': (
        lambda model: api.load_run(model.run_dir, linear="FP8")
    ),
    'load_run: linear is "auto", and must be one of "bf16"': lambda model: api.load_run(model.run_dir, linear="auto"),
    'load_run: attention is "xx", and must be one of "sdpa", "sage", "flash", "reference" or None': (
        lambda model: api.load_run(model.run_dir, attention="xx")
    ),
    'export: dtype is "fp32", and must be one of "float32", "bfloat16", "float16" or None': lambda model: model.export(
        "x", dtype="fp32"
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_an_argument_of_another_type_is_named(loaded: api.Model, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        MISTAKES[message](loaded)


def test_texts_are_prepared_planned_for_and_refused(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (texts := tmp_path / "texts").mkdir()
    write_jsonl(texts / "a.jsonl", TEXTS)
    (texts / "b.txt").write_text("left out")
    said = []
    request = api.Request([Path("~/texts")], output="~/train", vocab_size=350)
    assert (made := api.prepare(request, say=said.append)).vocab_size == 350 and made.train == tmp_path / "train"
    assert any("leaving out 1 other (.txt); glob chooses differently" in line for line in said)
    path = {"data.train": [{"path": tmp_path / "train"}], "data.valid": [], "training.run_dir": tmp_path / "run"}
    path |= {"optimizer.lr": np.float32(1e-3), "training.total_tokens": np.int64(10**9)}
    plan = api.plan("325m", path, world_size=8, gpu="h100")
    assert plan.chosen.prediction.world_size == 8
    assert api.plan(api.load_config("325m", path), world_size=8, gpu="h100").chosen == plan.chosen
    assert re.fullmatch(r"Plan\(325m on 8 x NVIDIA H100.*: 0 errors and .* tokens/s predicted\)", repr(plan))
    for call, said in (
        (lambda: api.load_config("325m", {"optimizer.lrr": 1}), r"optimizer\.lrr = 1: unknown key; did you mean"),
        (lambda: api.load_config("325m", "optimizer.lr=1"), r"overrides 'optimizer\.lr=1': give a mapping"),
        (lambda: api.load_config("325m", {"optimizer.lr": {1, 2}.__iter__}), "is no value of a configuration"),
        (lambda: api.plan("325m", gpu="h1000"), "gpu 'h1000' is not known: did you mean h100"),
        (lambda: api.train("325m", callbacks=[Notes]), r"is no sagetrain\.Callback"),
        (lambda: api.train(api.load_config("325m"), {"optimizer.lr": 1}), "a RunConfig has its values"),
        (lambda: api.train("325m", {"training.run_dir": tmp_path / "none"}), r"data\.train\.0\.path"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()
    (tmp_path / "train.bin").unlink()
    with pytest.raises(ConfigError, match=r"train\.bin does not exist; .*; overwrite=True does that in its place"):
        api.prepare(request)
    with pytest.raises(CheckpointError, match=rf"there is no folder {tmp_path}/nothing; name the folder of a run"):
        api.load_run("~/nothing")
    assert capfd.readouterr() == ("", "")


def test_the_guide_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Each Python block of docs/python.md runs, one after the other, on less text and with smaller numbers."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/python.md").read_text()
    known: dict[str, Any] = {}
    page = page.replace(
        "changes = {\n", 'changes = {"model.num_layers": 1, "model.hidden_size": 64, "model.head_dim": 32,\n'
    )
    page = page.replace('"python-stdlib", ', f'"{Path(email.__file__).parent}", glob="*.py", ')
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        code = block.replace('total_tokens": 20_000', 'total_tokens": 4096').replace("40_000", "8192")
        exec(code, known)
    assert len(known["watch"].losses) == 1 and not known["run"].finished and known["run"].tokens < 8192
    assert (tmp_path / "stdlib-hf/config.json").is_file()


def test_importing_costs_nothing_and_names_are_there() -> None:
    code = "import sys, sagetrain; assert 'pydantic' not in sys.modules; sagetrain.load_config('325m'); "
    code += "sagetrain.plan; sagetrain.Request; assert 'torch' not in sys.modules; print(*dir(sagetrain))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*api.__all__} <= {*done.stdout.split()}
    with pytest.raises(AttributeError, match="module 'sagetrain' has no attribute 'trian'"):
        sagetrain.trian  # noqa: B018
