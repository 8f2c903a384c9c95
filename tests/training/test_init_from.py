"""training.init_from begins a new run with the weights of another run, which stays as it is."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

import tiny
from distributed import run_distributed
from runs import finish, log_of, sagetrain
from sagetrain.checkpoint.manifest import KINDS
from sagetrain.checkpoint.on_disk import folder_name
from sagetrain.checkpoint.reading import Reader
from sagetrain.config import ConfigError
from sagetrain.corpus.tokenizer_training import train_tokenizer
from sagetrain.inference.diagnose import diagnose
from sagetrain.inference.evaluate import evaluate_texts
from sagetrain.inference.load import load_run
from sagetrain.interop.exporting import export
from sagetrain.interop.importing import import_folder
from sagetrain.training import init_from
from started_from import SHORT, configured

# The values are the (tensor parallel, context parallel, ZeRO stage) of two ranks.
LAYOUTS = {"fp32": [(1, 1, 3), (1, 2, 0), (2, 1, 1)], "bf16": [(2, 1, 3), (1, 1, 2)]}


def full(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    reader = Reader(folder)
    return {name: reader.local(name, kind, 0, 1) for name in reader.tensors}


def save(root: Path, engine, step: int) -> Path:
    return tiny.save(root, engine.groups, tiny.run_state(step, 64 * step, optimizer_steps=step), engine.owned())


def start_everywhere(root: str, dtype: str) -> tuple[list[float], dict]:
    """Train three steps, save, and take three more. Then start from that checkpoint at every layout, without and with
    moments. Return what was loaded, as the first rank finds it, and the losses of three steps."""
    first = tiny.engine(tiny.config(1, dtype), tiny.join(2, 1))
    for step in range(3):
        tiny.global_step(first, step)
    source, results = save(Path(root) / "first/checkpoints", first, 3), {}
    theirs = [full(source, kind) for kind in KINDS if first.groups.rank == 0]
    for *sizes, stage in LAYOUTS[dtype]:
        for moments in (False, True):
            name = f"{sizes}-{stage}-{moments}"
            training = {"init_from": str(Path(root, "first") if moments else source), "init_moments": moments}
            cfg = tiny.config(stage, dtype, training=training)
            engine = tiny.engine(cfg, tiny.join(*sizes), seed=99)
            record = init_from.start_from(cfg.training, engine, Path(root), lambda text: None)
            again = save(Path(root) / name, engine, 1)
            torch.distributed.barrier()
            ours = [full(again, kind) for kind in KINDS if first.groups.rank == 0]
            found = [all(a[name].equal(b[name]) for name in b) for a, b in zip(ours, theirs, strict=True)]
            empty = not any(value.any() for kind in ours[1:] for value in kind.values())
            losses = [tiny.global_step(engine, step).loss for step in range(3, 6)]
            results[(*sizes, stage, moments)] = record, found, empty, losses
    return [tiny.global_step(first, step).loss for step in range(3, 6)], results


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_and_moments_at_every_layout(tmp_path: Path, dtype: str) -> None:
    losses, results = run_distributed(start_everywhere, 2, str(tmp_path), dtype)[0]
    tolerance = {"rel": 1e-5 if dtype == "fp32" else 2e-2}
    for (*_, moments), (record, found, empty, after) in results.items():
        assert found == [True, moments, moments] and empty != moments
        assert record.step == 3 and record.optimizer_steps == (3 if moments else 0)
        assert after[0] == pytest.approx(losses[0], **tolerance)
        if moments and dtype == "fp32":  # Adam's count of steps is loaded as well.
            assert after == pytest.approx(losses, **tolerance)
    if dtype == "fp32":
        without = results[(2, 1, 1, False)][-1]
        assert abs(without[2] - losses[2]) > 1e-3 * losses[2]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The folder of a run of two ranks, tensor parallel."""
    folder = tmp_path_factory.mktemp("first")
    finish("ranks", configured(folder / "run.yaml", corpus, folder / "run", parallel={"tensor_parallel_size": 2}))
    return folder / "run"


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_new_phase_starts_with_weights_and_goes_on_alone(first: Path, corpus: Path, tmp_path: Path) -> None:
    before, source = digests(first), shutil.copytree(first, tmp_path / "source")
    sections = {
        "training": {"init_from": str(source), "total_tokens": 1280, "seed": 5},
        "model": {"rope_theta": 40000.0},
        "data": {"train": [{"path": str(corpus / "valid")}], "seq_length": 64, "micro_batch_size": 2},
        "optimizer": {"lr": 1e-30},  # The weights at the end are those of the start.
        "checkpoint": {"every_tokens": 256},
    }
    config = configured(tmp_path / "run.yaml", corpus, tmp_path / "run", **sections)
    finish("sagetrain", config)
    assert "weights of " in log_of(config) and "(1,280 tokens seen)" in log_of(config)
    loaded, old = load_run(tmp_path / "run", print), load_run(first, print)
    assert (loaded.step, loaded.tokens) == (5, 1280)
    for name, value in loaded.model.state_dict().items():
        torch.testing.assert_close(value, old.model.state_dict()[name], rtol=1e-6, atol=1e-9)
    assert digests(source) == before
    record = json.loads((tmp_path / "run/init_from.json").read_text())
    manifest = source / "checkpoints" / folder_name(5) / "manifest.json"
    assert record["checkpoint"] == str(manifest.parent) and record["step"] == 5
    assert record["manifest (SHA-256)"] == hashlib.sha256(manifest.read_bytes()).hexdigest()

    shutil.rmtree(source)
    sections["training"]["total_tokens"] = 2560
    config = configured(tmp_path / "run.yaml", corpus, tmp_path / "run", **sections)
    finish("sagetrain", config)
    assert "resumed from step-00000005" in log_of(config)
    state = Reader(tmp_path / "run/checkpoints" / folder_name(10)).manifest["state"]
    assert state["init_from"] == record and state["identity"]["training.init_from"] == str(source)
    sections["training"]["init_from"] = str(first)
    other = sagetrain("train", configured(tmp_path / "other.yaml", corpus, tmp_path / "run", **sections))
    assert other.returncode == 2 and "training.init_from: checkpoint" in other.stderr


def test_moments_go_along_when_asked(first: Path, corpus: Path, tmp_path: Path) -> None:
    training = {"init_from": str(first / "checkpoints" / folder_name(5)), "init_moments": True}
    config = configured(tmp_path / "run.yaml", corpus, tmp_path / "run", training=SHORT["training"] | training)
    finish("sagetrain", config)
    state = Reader(tmp_path / "run/checkpoints" / folder_name(5)).manifest["state"]
    assert (state["step"], state["optimizer_steps"], state["init_from"]["optimizer_steps"]) == (5, 10, 5)


def test_what_was_imported_can_be_trained_and_evaluated(first: Path, corpus: Path, tmp_path: Path) -> None:
    export(first, tmp_path / "hf")
    special = {"bos_token_id": 0, "eos_token_id": [2, 0]}
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(special))
    import_folder(tmp_path / "hf", tmp_path / "imported")
    training = SHORT["training"] | {"init_from": str(tmp_path / "imported")}
    sections = {"training": training, "optimizer": {"lr": 1e-30}, "attention": {"backend": "sdpa"}}
    config = configured(tmp_path / "run.yaml", corpus, tmp_path / "run", **sections)
    finish("sagetrain", config)
    with pytest.raises(ConfigError, match="an imported model has no data to be diagnosed on"):
        diagnose(load_run(tmp_path / "imported", print), [])
    data = str(corpus / "valid")
    losses = [evaluate_texts(load_run(run, print), [data], 32)[0] for run in (tmp_path / "run", first)]
    # Training used INT8 and rows that pad the vocabulary.
    assert losses[0].loss == pytest.approx(losses[1].loss, abs=2e-3)

    export(tmp_path / "run", tmp_path / "again")  # The special tokens stay those of the model.
    assert json.loads((tmp_path / "again/generation_config.json").read_text()) == special
    training["init_moments"] = True
    refused = sagetrain("train", configured(tmp_path / "b.yaml", corpus, tmp_path / "b", **sections))
    assert refused.returncode == 2 and "has weights alone" in refused.stderr
    training |= {"init_from": None, "init_moments": False}
    refused = sagetrain("train", configured(tmp_path / "c.yaml", corpus, tmp_path / "imported", **sections))
    assert refused.returncode == 2 and "holds an imported model" in refused.stderr


@pytest.mark.parametrize(("sections", "message"), [
    ({"model": {"num_key_value_heads": 1}}, "model.num_key_value_heads: 2 there, 1 here"),
    ({"model": {"ffn_hidden_size": 96}}, "model.ffn_hidden_size: 64 there, 96 here"),
    ({"model": {"vocab_size": 600}}, "vocab_size: 512 there, 600 here"),
    ({"attention": {"qk_norm": "after_rope"}}, "attention.qk_norm: 'before_rope' there, 'after_rope' here"),
    ({"training": {"init_from": "/nowhere"}}, 'training.init_from = "/nowhere": no checkpoint there'),
])  # fmt: skip
def test_what_does_not_fit(first: Path, corpus: Path, tmp_path: Path, sections: dict, message: str) -> None:
    training = SHORT["training"] | {"init_from": str(first)} | sections.pop("training", {})
    config = configured(tmp_path / "run.yaml", corpus, tmp_path / "run", training=training, **sections)
    refused = sagetrain("train", config)
    assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_is_refused(first: Path, corpus: Path, tmp_path: Path) -> None:
    data = shutil.copytree(corpus, tmp_path / "data")
    for each in data.glob("*.json"):
        each.unlink()
    (data / "tokenizer.model").write_bytes(train_tokenizer([Path(__file__).read_text()], 512))
    training = SHORT["training"] | {"init_from": str(first)}
    refused = sagetrain("train", configured(tmp_path / "run.yaml", data, tmp_path / "run", training=training))
    assert refused.returncode == 2 and "tokenizer: " in refused.stderr and "(SHA-256)" in refused.stderr
