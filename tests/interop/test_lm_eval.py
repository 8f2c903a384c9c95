"""Downstream tasks: the real lm-evaluation-harness runs small tasks with files of their own, and our model computes in
float64."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import tiny
from distributed import run_distributed
from runs import finish, rows_of, sagetrain, write_config
from sagetrain.checkpoint.state import Texts
from sagetrain.config import ConfigError, RunConfig
from sagetrain.config.schema import EvaluationConfig
from sagetrain.inference.generate import Sampling, finished, generate
from sagetrain.inference.load import TrainedRun, at_context, in_training, load_run
from sagetrain.inference.samples import completed
from sagetrain.inference.score import Scorer, scorer_of
from sagetrain.interop import lm_eval, looks
from sagetrain.interop.lm_eval import HarnessTasks, harness_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.training import inputs

QUESTIONS = [
    {"context": "def get(self, ", "choices": ["name):\n", "!!!!", "zzzz zz"], "gold": 0},
    {"context": "import ", "choices": ["%%%", "re\n"], "gold": 1},
    {"context": "", "choices": ["class Message:", "~~"], "gold": 0},
    {"context": "self._" * 30, "choices": ["x", "headers = []\n" * 2], "gold": 1},
]
TEXT = "def get_payload(self, i=None, decode=False):\n    return self._payload\n" * 3
TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(pair: Path) -> TrainedRun:
    return load_run(pair, print, attention="reference")


@pytest.fixture(scope="module")
def tasks(loaded: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """YAML files of tasks with their data beside them."""
    folder = tmp_path_factory.mktemp("tasks")
    (answer,) = [done.text for done, _ in generate(loaded, ["import "], Sampling(6, 0, stop=("\n",))) if done.finish]
    rows = {
        "choose": QUESTIONS,
        "read": [{"text": TEXT}, {"text": "x"}],
        "write": [{"prompt": "import ", "answer": answer}, {"prompt": "import ", "answer": "another"}],
    }
    for name, task in TASKS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **where, **task}))
    return {name: folder / f"{name}.yaml" for name in TASKS}


def exact(loaded: TrainedRun, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the log-likelihood by one forward pass for each token, with the softmax in float64."""
    total, greedy = 0.0, True
    tokens = [*context, *continuation][-33:]
    for place in range(len(tokens) - len(continuation), len(tokens)):
        with torch.no_grad():
            logits = loaded.model(torch.tensor([tokens[:place]]))[0, -1, :512].double()
        total += logits.log_softmax(-1)[tokens[place]].item()
        greedy &= logits.argmax().item() == tokens[place]
    return total, greedy


def asked(*args: object) -> Instance:
    return Instance(request_type="", doc={}, arguments=args, idx=0)


def test_log_likelihoods_are_those_of_float64(loaded: TrainedRun) -> None:
    encode, eos = loaded.tokenizer.encode, loaded.tokenizer.eos_id
    pairs = [(each["context"], choice) for each in QUESTIONS for choice in each["choices"]]
    likely = next(text for _, text in generate(loaded, ["import"], Sampling(1, 0)))
    pairs.append(("import", likely))
    found = harness_of(loaded).loglikelihood([asked(*pair) for pair in pairs])
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        before = encode(context.rstrip()) or [eos]
        expected = exact(loaded, before, encode(context + continuation)[len(encode(context.rstrip())) :])
        assert (total, greedy) == (pytest.approx(expected[0], rel=1e-5), expected[1])
    assert found[-1][1] and not all(greedy for _, greedy in found)


def test_a_text_longer_than_the_context_is_scored_in_pieces(loaded: TrainedRun) -> None:
    """Each token is scored once. The harness's windows begin where the previous one ended."""
    tokens, eos = loaded.tokenizer.encode(TEXT), loaded.tokenizer.eos_id
    assert len(tokens) > 64
    expected = 0.0
    for first in range(0, len(tokens), 32):
        part = tokens[first : first + 32]
        # The last window has more context before it.
        context = [eos, *tokens][max(0, first + len(part) - 32) : first + 1]
        expected += exact(loaded, context, part)[0]
    (found,) = harness_of(loaded).loglikelihood_rolling([asked(TEXT)])
    assert found == pytest.approx(expected, rel=1e-5)


def test_tasks_run_in_the_harness(
    loaded: TrainedRun,
    tasks: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # git finds no repository in this folder.
    harness = harness_of(loaded)
    found = HarnessTasks([str(path) for path in tasks.values()]).measure(harness, errors=True)
    right = 0
    for each in QUESTIONS:
        scores = harness.loglikelihood([asked(each["context"], choice) for choice in each["choices"]])
        right += max(range(len(scores)), key=lambda i: scores[i][0]) == each["gold"]
    assert found["choose"]["acc"] == right / len(QUESTIONS) and found["choose"]["acc_stderr"] >= 0
    nats = -sum(harness.loglikelihood_rolling([asked(TEXT), asked("x")]))
    assert found["read"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / (len(TEXT) + 1))
    assert found["write"]["exact_match"] == 0.5
    (one,) = HarnessTasks([str(tasks["write"])], limit=1).measure(harness).values()
    assert one["exact_match"] == 1.0
    assert "git" not in capfd.readouterr().err


def test_a_group_has_its_own_score(loaded: TrainedRun, tasks: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tasks["choose"].parent
    mean = {"metric": "acc", "aggregation": "mean", "weight_by_size": False}
    for name, group in (("both", ["choose", "again"]), ("all", ["both"])):
        tree = {"group": name, "task": group, "aggregate_metric_list": [mean]}
        (folder / f"{name}.yaml").write_text(json.dumps(tree))
    again = json.loads(tasks["choose"].read_text()) | {"task": "again"}
    (folder / "again.yaml").write_text(json.dumps(again))
    own = TaskManager(None, folder, False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_defaults: own)
    for asks in (["both"], ["all"], ["both", "read"]):
        found = HarnessTasks(asks).measure(harness_of(loaded))
        assert found["both"]["acc"] == found["choose"]["acc"] == found["again"]["acc"]
        assert set(found) == {"choose", "again", "both", *asks}


@pytest.mark.parametrize(("wanted", "limit", "temperature"), [
    ({"max_new_tokens": 12}, 12, 0),
    ({"max_tokens": "7"}, 7, 0),
    ({"max_gen_toks": None}, 256, 0),
    ({"temperature": 0.7}, 256, 0.7),
    ({"do_sample": True}, 256, 1.0),
    ({"do_sample": False, "temperature": None}, 256, 0),
    ({"do_sample": False, "temperature": 0.7}, 256, 0),
])  # fmt: skip
def test_arguments_of_generation_are_read_as_in_the_harness(wanted: dict, limit: int, temperature: float) -> None:
    for until in ("\n", ["\n"], ("\n", "")):
        found = lm_eval._sampling({"until": until, **wanted})
        assert (found.max_tokens, found.temperature, found.stop) == (limit, temperature, ("\n",))
    assert lm_eval._sampling({"until": None, **wanted}).stop == ()


def test_white_space_alone_is_no_context(loaded: TrainedRun) -> None:
    """The harness makes it part of the answer, whose first token counts too."""
    (blank,), (none,) = (harness_of(loaded).loglikelihood([asked(*pair)]) for pair in (("\n", "im"), ("", "\nim")))
    assert blank == none


def test_a_long_context_costs_short_texts_nothing(loaded: TrainedRun) -> None:
    """An imported model may have sequences of 131,072 tokens."""
    short, long = (scorer_of(run, loaded.tokenizer) for run in (loaded, at_context(loaded, 131_072)))
    assert (long.seq_length, long.micro_batch_size, long.context) == (2048, 4, 131_072)
    pairs = [(loaded.tokenizer.encode("def get(self, "), loaded.tokenizer.encode("name):\n"))]
    ((found, _),), ((expected, _),) = long(pairs), short(pairs)
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_end_of_a_prompt_fits_where_it_cuts_a_character(loaded: TrainedRun) -> None:
    """Half a character is read as U+FFFD, which takes three tokens when it is encoded again."""
    harness = harness_of(loaded)
    for count in range(20, 40):
        for limit in (1, 2, 3):
            end = harness._end("猫" * count, limit)
            assert len(loaded.tokenizer.encode(end)) <= 32 - limit and end.strip("猫") in ("", "\ufffd")


def test_generated_text_ends_where_it_is_asked_to(loaded: TrainedRun) -> None:
    wanted = {"until": [" "], "max_gen_toks": 20}
    prompts = ["import ", "def get(self, " * 30]  # The second prompt is cut to the part that fits.
    found = harness_of(loaded).generate_until([asked(prompt, wanted) for prompt in prompts])
    (alone,) = [done.text for done, _ in generate(loaded, ["import "], Sampling(20, 0, stop=(" ",))) if done.finish]
    assert found[0] == alone and not any(" " in text for text in found)
    sampled = [harness_of(loaded).generate_until([asked("import ", {"do_sample": True, "temperature": t})])
               for t in (0.5, 2.0)]  # fmt: skip
    assert sampled[0] != sampled[1]


def test_what_cannot_be_asked_is_said(
    loaded: TrainedRun, tasks: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be asked tasks"):
        harness_of(replace(loaded, tokenizer=None))
    with pytest.raises(ConfigError, match=r"a text of \d+ tokens is to be scored at once, more than the context of 32"):
        harness_of(loaded).loglikelihood([asked("a", TEXT)])
    broken = tmp_path / "broken.yaml"
    broken.write_text(tasks["read"].read_text().replace("read.jsonl", "none.jsonl"))
    with pytest.raises(ConfigError, match=r"tasks .*broken\.yaml cannot be loaded: .*none\.jsonl"):
        HarnessTasks([str(broken)])
    # The harness's own 14,000 tasks would take seconds to list.
    own = TaskManager(None, tasks["read"].parent, False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_defaults: own)
    with pytest.raises(
        ConfigError, match=r"task chose: lm_eval has none of this name.* did you mean choose\? `lm-eval"
    ):
        HarnessTasks(["read", "chose"])
    cfg = tiny.config(1, evaluation={"tasks": ["read", "chose"]})
    (found,) = [each for each in inputs.findings(cfg, None) if each.key == "evaluation.tasks"]
    assert found.level == "error" and "did you mean choose?" in str(found)


def test_a_task_that_no_file_names_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness need not list its tasks for that, which takes seconds. A tag may stand in a file without suffix."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_defaults: pytest.fail("the tasks are listed"))
    with pytest.raises(ConfigError, match=r"task helaswag: lm_eval has none .* did you mean hellaswag, .*lists them"):
        HarnessTasks(["bertaqa", "helaswag"])


def test_the_command_prints_a_table_or_json(pair: Path, tasks: dict[str, Path]) -> None:
    names, guess = f"{tasks['choose']}, {tasks['read']}", tasks["read"].with_name("guess.yaml")
    # The harness resamples for the error of a perplexity, and prints so.
    tree = json.loads(tasks["read"].read_text()) | {"task": "guess", "metric_list": [{"metric": "perplexity"}]}
    guess.write_text(json.dumps(tree | {"output_type": "loglikelihood", "doc_to_target": "{{text[:9]}}"}))
    result = sagetrain("eval", pair, "--tasks", names, "--tasks", guess, "--limit", 2, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["tasks"]["guess"]["perplexity"] > 1
    assert 0 <= found["tasks"]["choose"]["acc"] <= 1 and found["tasks"]["read"]["bits_per_byte"] > 0
    table = sagetrain("eval", pair, "--tasks", names, "--limit", 2).stdout
    assert f"{found['tasks']['choose']['acc']:.4f}" in table and "standard error" in table
    for options, message in (
        (["--tasks", names, "--stride", 8], "--tasks bring text"),
        (["--limit", 3], "--limit is"),
        (["--tasks", ""], "task : lm_eval has none"),
    ):
        refused = sagetrain("eval", pair, *options)
        assert refused.returncode == 2 and f"error: {message}" in refused.stderr


def test_the_harness_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sagetrain.interop.lm_eval", None)  # The import fails then.
    with pytest.raises(ConfigError, match=r"--tasks: the lm-evaluation-harness .*pip install 'sagetrain\[lm-eval\]'"):
        looks.load_harness("--tasks")


EXPERTS = {"experts": {"number": 8, "per_token": 2, "ffn_size": 16, "dense_layers": 1}}
SPREAD = [(1, 1, 1, 1, 4), (1, 2, 2, 1, 2), (2, 1, 0, 1, 4), (4, 1, 1, 1, 2), (1, 1, 1, 2, 2)]
"""Layouts of four ranks that have experts between them, as `at` reads them."""

# -- while training --------------------------------------------------------------------------------------------------


def at(layout: tuple[int, ...], more: dict) -> tuple[RunConfig, ParallelGroups]:
    """Return configuration and groups at (tp_size, cp_size, stage, pp_size, ep_size). more: of the model."""
    tp_size, cp_size, stage, pp_size, ep_size = (*layout, 1, 1)[:5]
    parallel = {"engine": "fsdp", "expert_parallel_size": ep_size, "sequence_parallel": tp_size > 1}
    model = {"num_attention_heads": 4, **more}
    cfg = tiny.config(stage, model=model, data={"micro_batch_size": 2}, parallel=parallel)
    groups = tiny.join(tp_size, cp_size, pp_size, ep_size)
    return tiny.on(cfg, groups), groups


def whole(cfg: RunConfig) -> Transformer:
    """Return the model of a configuration without a layout."""
    return tiny.model(cfg.model_copy(update={"parallel": tiny.config(1).parallel}), ParallelGroups.single())


def scores_of(layouts: list[tuple[int, ...]], more: dict) -> list[list[tuple[float, bool]]]:
    """Return the scores of one model's answers to the same questions, in a context of a sequence and in one of 40
    tokens: first in float64 without a layout, then at each layout of `at`. more: of the model."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, tiny.VOCAB, (size,), generator=draw).tolist() for size in (3, 30, 9, 2, 17, 5, 16, 4)]
    pairs = [(text[: len(text) // 3 + 1], text[len(text) // 3 + 1 :]) for text in texts]
    pairs = [(context, continuation[-tiny.SEQ :]) for context, continuation in pairs]
    contexts, found = (tiny.SEQ, 40), []
    for layout in layouts:
        cfg, groups = at(layout, more)
        engine = tiny.engine(cfg, groups)
        how = engine.logits, groups, engine.device, tiny.SEQ, 2, tiny.VOCAB
        found.append([score for most in contexts for score in Scorer(*how, most)(pairs)])
    model = whole(cfg)
    expected = []
    for most, (context, continuation) in product(contexts, pairs):
        text = torch.tensor([*context, *continuation][-most - 1 :])
        with torch.no_grad():
            likely = model(text[None, :-1])[0].double().log_softmax(-1)[-len(continuation) :]
        wanted = text[-len(continuation) :]
        greedy = bool((likely.argmax(-1) == wanted).all())
        expected.append((likely.gather(-1, wanted[:, None]).sum().item(), greedy))
    return [expected, *found]


def test_answers_do_not_depend_on_the_layout() -> None:
    """Ranks share the questions, the vocabulary, the sequences or the weights, those of experts as well."""
    layouts = [(1, 1, 3), (2, 1, 1), (1, 2, 1)]
    of_two, of_four = [(1, 1, 3), (1, 2, 1), (1, 1, 3, 1, 2)], SPREAD
    worlds = ((4, layouts, {}), (2, of_two, EXPERTS), (4, of_four, EXPERTS))
    ways = [(case, run_distributed(scores_of, *case)) for case in worlds]
    for (_, layouts, _), (expected, *found) in ((case, of_rank) for case, every in ways for of_rank in every):
        for layout, scores in zip(layouts, found, strict=True):
            assert [total for total, _ in scores] == pytest.approx([total for total, _ in expected], abs=1e-4), layout
            assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]


class Letters:
    """A tokenizer whose tokens are the bytes of ASCII."""

    vocab_size, eos_id = tiny.VOCAB, -1

    def encode(self, text: str) -> list[int]:
        return list(text.encode("ascii"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("ascii")


TEXTS = Texts([], [], tiny.SEQ)
HOW = [Sampling(20, temperature=0), Sampling(8, temperature=1.0, top_p=0.9, stop=("\n", "q"))]
PROMPTS = ["a", "some text", "b", "a", "a full context.."]


def off(as_whole: Callable, model: Transformer) -> Callable:
    """Return what calls a model on a rank that computes other bits than the first one of its group."""
    return lambda *tokens, **how: 2 - as_whole(model)(*tokens, **how)


def texts_of(layouts: list[tuple[int, ...]], more: dict) -> list[list[list[str]]]:
    """Return the texts that a model in training generates for the prompts: first without a layout, then at each layout
    of `at`. more: of the model."""
    found, letters, signs = [], Letters(), []
    for layout in layouts:
        cfg, groups = at(layout, more)
        engine = tiny.engine(cfg, groups)
        completed(in_training(cfg, engine, letters, TEXTS), lambda: None, PROMPTS[:1], HOW[0])
        with torch.no_grad():
            for own in engine.owned():
                for values in (own.weight, *own.copies):
                    values.mul_(1.5)
        engine.weights_changed()
        if groups.ep_size > groups.tp_size and groups.ep_rank:
            engine.as_whole = partial(off, engine.as_whole)
        run = in_training(cfg, engine, letters, TEXTS)
        found.append([completed(run, lambda: signs.append(1), PROMPTS, how) for how in HOW])
    model = whole(cfg)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    run = TrainedRun(cfg, model, letters, tiny.VOCAB, 0, 0, torch.device("cpu"), TEXTS)
    assert len(signs) > 20
    return [[[done.text for done in finished(run, PROMPTS, how)] for how in HOW], *found]


def test_generated_text_does_not_depend_on_the_layout() -> None:
    """Ranks share the prompts and the vocabulary, and those with experts between them share texts. Under context
    parallelism each rank has whole texts. The weights are the present ones, not those of the first call."""
    worlds = ((4, [(1, 1, 2), (2, 2, 1)], {}), (2, [(1, 1, 2, 1, 2)], EXPERTS), (4, SPREAD, EXPERTS))
    for size, layouts, more in worlds:
        for expected, *found in run_distributed(texts_of, size, layouts, more):
            assert len({*expected[0], *expected[1]}) > 6 and expected[1][0] != expected[1][3]
            for layout, texts in zip(layouts, found, strict=True):
                assert texts == expected, layout


def test_tasks_are_asked_while_training(tasks: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    """Tasks run at their own pace and at the end, where the results are those of `sagetrain eval`. Losses stay the
    same."""
    plain = {"training": {"total_tokens": 2048}, "attention": {"backend": "sdpa"}}
    names = [str(path) for path in tasks.values()]
    asking = {"tasks": names, "tasks_every_tokens": 1000, "tasks_limit": 3, "samples_every_tokens": 1000}
    rows = []
    for name, evaluation in (("with", {"num_sequences": 8, **asking}), ("without", {"num_sequences": 8})):
        config = write_config(tmp_path / f"{name}.yaml", corpus, tmp_path / name, **plain, evaluation=evaluation)
        finish("sagetrain", config)
        rows.append(rows_of(tmp_path / name))
    asked, _ = rows
    assert [row["step"] for row in asked if "eval/choose/acc" in row] == [4, 8]
    (losses, same) = ([row["train/loss"] for row in each if "train/loss" in row] for each in rows)
    assert losses == same
    last = next(row for row in reversed(asked) if "eval/choose/acc" in row)
    trained = load_run(tmp_path / "with", print)
    found = HarnessTasks(names, limit=3).measure(harness_of(trained))
    assert last["eval/choose/acc"] == found["choose"]["acc"]
    assert last["eval/write/exact_match"] == found["write"]["exact_match"]
    assert last["eval/read/bits_per_byte"] == pytest.approx(found["read"]["bits_per_byte"], rel=1e-6)


def test_tasks_that_training_cannot_ask_are_refused_before_it(tasks: dict[str, Path], loaded: TrainedRun) -> None:
    data = loaded.cfg.data.model_copy(update={"tokenizer": "none"})
    for name, message in (
        ("write", r"evaluation\.tasks: write: generated text takes .* set parallel\.zero_stage: 2"),
        ("read", r"tokenizer none: No such file"),
    ):
        evaluation = EvaluationConfig(tasks=[str(tasks[name])])
        with pytest.raises(ConfigError, match=message):
            lm_eval.tasks_while_training(evaluation, data, None)
    together, inline = tasks["write"].with_name("together.yaml"), {"task": "again", **TASKS["write"]}
    together.write_text(json.dumps({"group": "together", "task": [inline, {"task": "scored", **TASKS["read"]}]}))
    # plan has not loaded the tasks' data.
    tasks["write"].with_suffix(".jsonl").unlink()
    asked = [str(each) for each in (together, tasks["read"], tasks["write"])]
    for stage, said in ((2, []), (3, ["evaluation.tasks: again, write: generated text takes a pass over all weights"])):
        cfg = tiny.config(1, parallel={"zero_stage": stage}, evaluation={"tasks": asked})
        found = [each for each in inputs.findings(cfg, None) if each.key == "evaluation.tasks"]
        assert [each.message.partition(" for every")[0] for each in found] == said
    together.write_text(json.dumps(inline | {"output_type": "words"}))
    (broken,) = [each for each in inputs.findings(cfg, None) if each.key == "evaluation.tasks"]
    assert "task again: output_type is words; it must be one of loglikelihood, " in broken.message
    together.write_text("task: [")
    (broken,) = [each for each in inputs.findings(cfg, None) if each.key == "evaluation.tasks"]
    assert "together.yaml" in broken.message and "cannot be loaded: while parsing" in broken.message
