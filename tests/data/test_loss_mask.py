"""The loss mask, from the token file to the update: the loss is the mean over the counted tokens of the whole step."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from distributed import run_distributed
from llama_reference import reference_loss
from prepare_inputs import quiet
from runs import finish, log_of, rows_of
from sagetrain.checkpoint.on_disk import folder_name
from sagetrain.checkpoint.reading import Reader
from sagetrain.config import ConfigError
from sagetrain.config.schema import DataSource
from sagetrain.corpus.records import Pairs
from sagetrain.corpus.token_writer import TokenFileWriter
from sagetrain.data import verify
from sagetrain.data.batch import MASKED, Batch
from sagetrain.data.loader import Loader
from sagetrain.data.token_file import TokenFile, token_path
from sagetrain.inference.evaluate import evaluate, evaluate_texts, together
from sagetrain.inference.load import load_run
from sagetrain.parallel.metrics import total_over_ranks
from sagetrain.parallel.topology import ParallelGroups, Topology
from started_from import configured
from streams import stream_of

LENGTHS = [5, 3, 16, 9, 7, 8, 11, 4, 20, 6, 15, 13, 2, 9, 16, 17]
SEQUENCES = 10  # There are ten sequences of tiny.SEQ tokens, and one token more.


def write(path: Path, masked: bool = True, seed: int = 0) -> DataSource:
    """Write documents of which less and less counts: a third of the first ones, nothing at the end."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, tiny.VOCAB, sum(LENGTHS)).astype(np.int32)
    counted = rng.random(len(tokens)) < np.linspace(0.6, 0.0, len(tokens))
    counted[-2 * tiny.SEQ :] = False
    writer = TokenFileWriter(path).begin(tiny.VOCAB, masked=masked)
    writer.add(tokens, np.array(LENGTHS), counted=counted if masked else None)
    writer.finish()
    recorded = {"sha256": writer.sha256} | ({"mask_sha256": writer.mask_sha256} if masked else {})
    writer.publish(recorded)
    return DataSource(path=str(path))


@pytest.fixture
def source(tmp_path: Path) -> DataSource:
    return write(tmp_path / "a")


# -- files -------------------------------------------------------------------------------------------------------------


def test_samples_and_batches_say_what_counts(source: DataSource) -> None:
    file = TokenFile(source.path)
    file.validate(deep=True)
    mask, tokens = file.counted(0, file.num_tokens), file.tokens(0, file.num_tokens)
    stream = stream_of([source], tiny.SEQ, seed=7)
    assert stream.masked and stream.num_windows == SEQUENCES
    whole = stream.counted(0, SEQUENCES)
    assert whole == mask[1 : SEQUENCES * tiny.SEQ + 1].sum() > 0
    seen = 0
    for batch in Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=2).step_batches(0, SEQUENCES * tiny.SEQ):
        for row, index in enumerate(batch.sample_ids):
            _, window = stream.locate(index)
            place = slice(window * tiny.SEQ + 1, (window + 1) * tiny.SEQ + 1)
            expected = np.where(mask[place], tokens[place], MASKED)
            assert batch.labels[row].tolist() == expected.tolist()
        own = int((batch.labels >= 0).sum())
        seen += own
        assert batch.divisor == max(1, own) == stream.counted(batch.sample_ids[0], 2) or not own
        ranks = [ParallelGroups(Topology(2, 1, 2), rank) for rank in range(2)]
        slices = [batch.inputs(torch.device("cpu"), rank) for rank in ranks]
        assert torch.equal(torch.cat([each["labels"] for each in slices], 1), batch.labels)
        assert all(each["divisor"] == batch.divisor / 2 for each in slices)
    assert seen == whole


def test_a_source_without_a_mask_counts_beside_a_masked_one(tmp_path: Path, source: DataSource) -> None:
    other = write(tmp_path / "b", masked=False, seed=1)
    stream = stream_of([source, other], tiny.SEQ, seed=7)
    for index in range(12):
        counted = stream.sample(index).counted
        assert (counted is None) == (stream.locate(index)[0] == 1)
        assert stream.counted(index, 1) == (tiny.SEQ if counted is None else counted.sum())
    plain = stream_of([other], tiny.SEQ, seed=7)
    assert not plain.masked and plain.counted(0, 4) is None
    (batch,) = Loader(plain, dp_rank=0, dp_size=1, micro_batch_size=2).step_batches(0, 2 * tiny.SEQ)
    assert batch.divisor is None and "divisor" not in batch.inputs(torch.device("cpu"))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_reads_its_own_masks_and_ahead_in_threads(source: DataSource, num_workers: int, monkeypatch) -> None:
    """A rank does not read the masks of the whole step, and does not read in training's thread, because masks lie on
    network file systems."""
    reads: list[tuple[int, str]] = []
    read = TokenFile.counted
    monkeypatch.setattr(
        TokenFile, "counted",
        lambda file, start, stop: reads.append((start, threading.current_thread().name)) or read(file, start, stop),
    )  # fmt: skip
    stream, step = stream_of([source], tiny.SEQ, seed=7), 4 * tiny.SEQ
    shares = []
    for rank in range(2):
        loader = Loader(stream, dp_rank=rank, dp_size=2, micro_batch_size=1, num_workers=num_workers)
        reads.clear()
        shares.append([loader.counted(4 * number, step, step if number < 2 else None) for number in range(3)])
        # After a step back to a checkpoint, counts that were made ahead are of no use.
        shares[-1].append(loader.counted(0, step))
        loader.close()
        starts = {stream.locate(index)[1] * tiny.SEQ + 1 for index in range(12) if index % 2 == rank}
        assert {start for start, _ in reads} == starts and len(reads) == 6 + 2
        assert {thread.startswith("loader") for _, thread in reads} == {num_workers > 0}
    whole = [stream.counted(first, 4) for first in (0, 4, 8, 0)]
    assert [sum(own) for own in zip(*shares, strict=True)] == whole and len(set(whole)) > 1


def test_another_mask_is_other_data(tmp_path: Path, source: DataSource) -> None:
    def known() -> tuple[str, dict[str, str]]:
        stream = stream_of([source], tiny.SEQ, seed=0)
        return stream.fingerprint, verify.verify({"data.train": stream}, deep=False, say=print)

    order, content = known()
    mask = token_path(source.path, ".mask")
    data = bytearray(mask.read_bytes())
    data[20] ^= 1
    mask.write_bytes(data)
    other_order, other_content = known()
    assert order != other_order and verify.changed(content, other_content)
    with pytest.raises(ConfigError, match=r"the \.mask does not have the checksum that was recorded"):
        TokenFile(source.path).validate(deep=True)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda mask: mask.unlink(), r"a\.mask, which says what counts in the loss, does not exist"),
    (lambda mask: mask.write_bytes(mask.read_bytes()[:-1]), r"a\.mask has 160 bytes and the \.bin 161 tokens"),
    (lambda mask: mask.write_bytes(bytes([7]) + mask.read_bytes()[1:]), r"byte 0 of the \.mask is 7, not 0 or 1"),
    (lambda mask: mask.write_bytes(bytes(161)), r"by its \.mask no token counts in the loss"),
])  # fmt: skip
def test_a_mask_that_does_not_fit_is_named(source: DataSource, spoil, message: str) -> None:
    spoil(token_path(source.path, ".mask"))
    with pytest.raises(ConfigError, match=rf"token file .*a: .*{message}"):
        TokenFile(source.path).validate(deep=True)


def test_records_are_not_cut_by_another_sequence_length(tmp_path: Path, source: DataSource) -> None:
    token_path(source.path, ".json").write_text('{"seq_length": 16}')
    assert stream_of([source], 32, seed=0).num_windows == SEQUENCES // 2
    said = r"prepared for sequences of 16 tokens \(--seq-length\), and data.seq_length \(eval: --context\) 8 would"
    with pytest.raises(ConfigError, match=said):
        stream_of([source], 8, seed=0)


def test_text_in_the_place_of_records_leaves_no_mask(tmp_path: Path, source: DataSource) -> None:
    write(Path(source.path), masked=False)
    assert not token_path(source.path, ".mask").exists() and not TokenFile(source.path).masked


# -- steps -------------------------------------------------------------------------------------------------------------

STEP, EVALUATED = 4, 5  # STEP and EVALUATED are numbers of sequences.
LAYOUTS = {1: [(1, 1, 0)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 0), (1, 1, 2), (1, 1, 3)]}
"""Tensor parallel size, context parallel size and ZeRO stage of each layout, keyed by world size."""


def steps(path: str, layouts: list[tuple[int, int, int]]) -> list[dict]:
    """Return, for each layout, the loss, norm and gradient of a step whose sequences count unevenly, and of a step in
    which nothing counts. The gradient is the change of the weights by SGD at a learning rate of 1."""
    tiny.SGD.use()
    found = []
    for tp_size, cp_size, stage in layouts:
        groups = tiny.join(tp_size, cp_size)
        engine = tiny.engine(tiny.config(stage, optimizer={"clip_grad": 0.0}), groups)
        stream = stream_of([DataSource(path=path)], tiny.SEQ, seed=7)
        loader = Loader(stream, dp_rank=groups.dp_rank, dp_size=groups.dp_size, micro_batch_size=1)

        def weights(engine=engine) -> dict[str, torch.Tensor]:
            return {s.name: s.weight.double().clone() for s in engine.owned() if len(s.weight)}

        def step(counted: int, batches, engine=engine, groups=groups):
            return engine.step(batches, STEP // groups.dp_size, 1.0, counted=counted)

        before, held_out = weights(), engine.evaluate(loader.eval_batches(EVALUATED))
        counted = total_over_ranks(loader.counted(0, STEP * tiny.SEQ), tp_size * cp_size, torch.device("cpu"))
        result = step(counted, loader.step_batches(0, STEP * tiny.SEQ))
        after = weights()
        moved = {}
        for s in engine.owned():
            if len(s.weight):
                moved[s.name] = (s.spec.dim, s.start, s.stop, before[s.name] - after[s.name])
        empty = list(loader.step_batches(0, STEP * tiny.SEQ))
        for batch in empty:
            batch.labels.fill_(MASKED)
        nothing = step(0, empty)
        still = all(torch.equal(after[name], value) for name, value in weights().items())
        found.append(
            {
                "case": f"tp {tp_size}, cp {cp_size}, ZeRO {stage}",
                "valid": held_out["valid/loss"],
                "loss": result.loss,
                "norm": result.grad_norm,
                "moved": moved,
                "tp": (groups.tp_rank, groups.tp_size),
                "nothing": (nothing.loss, nothing.grad_norm, nothing.applied, still),
            }
        )
    return found


def test_the_loss_is_the_mean_over_counted_tokens_of_a_step(tmp_path: Path, source: DataSource) -> None:
    """Runs with tensor, context and data parallelism and accumulation are compared with a float64 model of one rank,
    gradients too."""
    cfg = tiny.config(0)
    model = tiny.model(cfg, tiny.ParallelGroups.single())
    truth = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    stream = stream_of([source], tiny.SEQ, seed=7)
    (batch,) = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=STEP).step_batches(0, STEP * tiny.SEQ)
    each = (batch.labels >= 0).sum(1)
    assert len(set(each.tolist())) > 2, "a mean of the sequences' means would be the same"

    def reference(batch: Batch) -> torch.Tensor:
        documents = (batch.positions == 0).cumsum(1).tolist()
        what = batch.tokens, batch.labels, batch.positions, documents
        return reference_loss(truth, cfg.model, cfg.attention.qk_norm, *what)

    loss = reference(batch)
    loss.backward()
    (batch,) = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=EVALUATED).eval_batches(EVALUATED)
    valid = reference(batch).item()
    norm = torch.stack([p.grad.square().sum() for p in truth.values()]).sum().sqrt().item()
    for world, layouts in LAYOUTS.items():
        for rank in run_distributed(steps, world, source.path, layouts):
            for found in rank:
                case = f"world {world}, {found['case']}"
                assert found["loss"] == pytest.approx(loss.item(), rel=2e-6), case
                assert found["valid"] == pytest.approx(valid, rel=2e-6), case
                assert found["norm"] == pytest.approx(norm, rel=2e-5), case
                assert found["nothing"] == (0.0, 0.0, True, True), case
                assert found["moved"], case
                for name, (tp_dim, start, stop, moved) in found["moved"].items():
                    tp_rank, tp_size = found["tp"]
                    whole = truth[name].grad
                    own = whole if tp_dim is None else whole.chunk(tp_size, tp_dim)[tp_rank]
                    expected = own.flatten()[start:stop]
                    error = (moved - expected).norm() / norm  # A weight of 1 moves in steps of 6e-8.
                    assert error < 2e-6, f"{case}: gradient of {name} off by {error:.1e}"


def test_fine_tuning_resumes_exactly(tmp_path: Path, corpus: Path) -> None:
    """A run is fine-tuned on records to its end. Its second half is then repeated from the checkpoint between."""
    with (tmp_path / "records.jsonl").open("w") as file:
        for number in range(200):
            record = {"ask": f"def f{number}(", "say": f"x):\n    return x + {number}\n"}
            file.write(json.dumps(record) + "\n")
    data = tmp_path / "data"
    quiet(
        [str(tmp_path / "records.jsonl")], data / "train", tokenizer=corpus / "tokenizer.model",
        records=Pairs("ask", "say", 32), valid_fraction=0.2,
    )  # fmt: skip
    sections = {"checkpoint": {"every_tokens": 512, "keep_last": 9}, "training": {"total_tokens": 1024}}
    config = configured(tmp_path / "run.yaml", data, tmp_path / "run", **sections)
    finish("sagetrain", config)
    rows = rows_of(tmp_path / "run")
    stream = stream_of([DataSource(path=str(data / "train"))], 32, seed=0)
    shares = [row["train/counted_share"] for row in rows if "train/loss" in row]
    assert shares == [stream.counted(8 * step, 8) / 256 for step in range(4)]
    assert 0.2 < min(shares) < 0.9
    trained = load_run(tmp_path / "run", print)
    held_out = together(evaluate(trained, 8))
    assert held_out.sequences == 8 > held_out.tokens // 32
    valid = [row["valid/loss"] for row in rows if "valid/loss" in row][-1]
    assert held_out.loss == pytest.approx(valid, abs=1e-4) and held_out.bits_per_byte is None
    (texts,) = evaluate_texts(trained)
    file = TokenFile(data / "valid")
    assert held_out.tokens < texts.tokens == file.counted(0, file.num_tokens).sum()

    whole = Reader(tmp_path / "run/checkpoints" / folder_name(4))
    weights = {name: whole.local(name, "weight", 0, 1) for name in whole.tensors}

    shutil.rmtree(whole.folder)
    finish("sagetrain", config)
    assert "resumed from step-00000002" in log_of(config)
    again = Reader(tmp_path / "run/checkpoints" / folder_name(4))
    assert all(again.local(name, "weight", 0, 1).equal(value) for name, value in weights.items())
