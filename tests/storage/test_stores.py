"""Stores keep their promises: files are whole or absent, one of several writers wins, and faults of a server pass."""

import itertools
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import sagetrain
from bucket import Bucket, served
from google_server import GONE, PAGE, TOKENS
from runs import check_same, finish, kill_all, log_of, when, write_config
from sagetrain.checkpoint import on_disk
from sagetrain.cluster.run_copy import here
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.errors import CheckpointError, ConfigError, no_run
from sagetrain.config.load import load_config
from sagetrain.config.rules import data as rules
from sagetrain.costs.hardware import H200
from sagetrain.inference.load import load_run, open_run, with_data
from sagetrain.inference.windows import text_of
from sagetrain.interop.exporting import check_free
from sagetrain.planning.plan import make_plan
from sagetrain.report.read import read_runs
from sagetrain.storage import bucket as buckets
from sagetrain.storage import lease
from sagetrain.storage.gs import GS
from sagetrain.storage.lease import Lease, check_rights
from sagetrain.storage.range_reader import fetch, send_folder
from sagetrain.storage.s3 import S3
from sagetrain.storage.url_path import UrlPath, store_at
from started_from import configured

KINDS = {"s3": S3, "gs": GS}


@pytest.fixture(scope="module")
def servers() -> Callable[[str], Bucket]:
    """The servers, each of which starts when it is asked for first."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        @cache
        def started(kind: str) -> Bucket:
            made = stack.enter_context(served(kind))
            for name, value in made.environment.items():
                patch.setenv(name, value)
            return made

        yield started


@pytest.fixture(params=KINDS)
def bucket(request, servers) -> Bucket:
    return servers(request.param)


@pytest.fixture(params=["file", *KINDS])
def folder(request, servers, tmp_path) -> UrlPath:
    """A folder without files, in each kind of store."""
    if request.param == "file":
        return UrlPath(f"file://{tmp_path}/a/folder")
    return UrlPath(f"{servers(request.param).url}/{tmp_path.name}/run")


def test_a_store_puts_swaps_reads_and_deletes(folder: UrlPath) -> None:
    store = store_at(folder)
    assert store.names() == [] and not folder.exists()
    store.put("b/one", b"0123456789")
    store.put("a", b"")
    store.put("b/one", b"abcdefghij")
    assert store.sizes() == {"a": 0, "b/one": 10} and store.names("b") == ["b/one"]
    assert (store.read("a"), store.read("b/one"), store.read("b/one", 2, 5)) == (b"", b"abcdefghij", b"cde")
    with pytest.raises(OSError, match="before 11"):
        store.read("b/one", 5, 11)
    with pytest.raises(FileNotFoundError):
        store.read("c")
    with pytest.raises(FileExistsError):
        store.put("a", b"another", absent=True)
    data, tag = store.tagged("b/one")
    store.swap("b/one", b"mine", tag)
    with pytest.raises(FileExistsError):
        store.swap("b/one", b"theirs", tag)
    with pytest.raises(FileNotFoundError):
        store.swap("c", b"", tag)
    assert (data, store.read("b/one")) == (b"abcdefghij", b"mine")
    assert (folder / "b" / "one").is_file() and (folder / "b").exists() and not (folder / "b").is_file()
    assert (folder / "b" / "one").read_text() == "mine" and (folder / "b").parent == folder
    store.delete(["a", "b/one", "c"])
    assert store.names() == []
    names = [f"page/{number:02d}" for number in range(2 * PAGE + 1)]
    for name in names:
        store.put(name, b"")
    assert store.names() == names


def test_one_of_several_writers_wins(folder: UrlPath) -> None:
    def first(number: int) -> bool:
        try:
            store_at(folder).put("lock", b"%d" % number, absent=True)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        won = [number for number, is_first in enumerate(pool.map(first, range(6))) if is_first]
    assert [store_at(folder).read("lock")] == [b"%d" % number for number in won]


def test_a_second_run_is_refused(folder: UrlPath, monkeypatch) -> None:
    """The second run has a slow clock. It waits for a renewal that a busy host may be late with."""
    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: time.monotonic() / 100, sleep=time.sleep))
    assert check_rights(folder) == ""
    first, second = (Lease(folder, run, beat=0.2) for run in ("a", "b"))
    first.claim(print)
    try:
        with pytest.raises(CheckpointError, match=f"{folder} is in use by another run"):
            second.claim(print)
        first.check()
    finally:
        first.release()
    assert store_at(folder).names() == []


def blocks_of(data: bytes) -> list[memoryview]:
    """Cut data into blocks of odd lengths."""
    return [memoryview(data)[low : low + 77_777] for low in range(0, len(data), 77_777)]


@pytest.mark.parametrize(("kind", "share"), [
    ("s3", {"500": 0.25}), ("s3", {"503": 0.25}), ("s3", {"slow": 0.3, "cut": 0.4}), ("s3", {"expired": 3}),
    ("gs", {"500": 0.2, "cut": 0.2}), ("gs", {"expired": 3}),
], ids=str)  # fmt: skip
def test_faults_of_a_server_pass(servers, tmp_path, monkeypatch, kind: str, share: dict[str, float]) -> None:
    """Whatever a server does, what was written is whole, and this writer's own first try is no other writer."""
    monkeypatch.setattr(buckets, "_PART", 5 << 20)
    bucket = servers(kind)
    store, data = store_at(UrlPath(f"{bucket.url}/{tmp_path.name}")), random.Random(1).randbytes(11 << 20)
    bucket.faults(**share)
    try:
        store.write("large", blocks_of(data), len(data))
        for number in range(2):
            store.put(f"small{number}", b"%d" % number, absent=True)
            with pytest.raises(FileExistsError):
                store.put(f"small{number}", b"another", absent=True)
        _, tag = store.tagged("small0")
        store.swap("small0", b"new", tag)
        with pytest.raises(FileExistsError):
            store.swap("small0", b"newer", tag)
        read = b"".join(
            store.read("large", low, min(low + (1 << 20), len(data))) for low in range(0, len(data), 1 << 20)
        )
    finally:
        given = bucket.faults()
    assert read == data and store.read("small0") == b"new"
    assert all(given.get(kind) for kind in share), given


def test_answers_of_an_upload_that_are_lost(servers, tmp_path, monkeypatch) -> None:
    """Google has what it did not confirm, so it is asked how far it came. The end of the upload is among what is
    lost."""
    monkeypatch.setattr(buckets, "_PART", 1 << 18)
    google, data = servers("gs"), random.Random(1).randbytes(5 << 17)
    store = store_at(UrlPath(f"{google.url}/{tmp_path.name}"))

    def blocks():
        for low in range(0, len(data), 1 << 18):
            google.faults(lost=1)
            yield memoryview(data)[low : low + (1 << 18)]

    store.write("large", blocks(), len(data))
    assert google.faults() == {"lost": 1} and store.read("large") == data


@pytest.mark.parametrize(("lost_at", "carried_out"), [(1, True), (4, False), (4, True)])
@pytest.mark.parametrize(("kind", "part_size"), [("gs", 1 << 18), ("s3", 5 << 20)])
def test_an_upload_that_is_gone_counts_if_its_file_is_there(
    servers, tmp_path, monkeypatch, kind, part_size, lost_at, carried_out
) -> None:
    """An older file of the same size is another file. The fifth call is the last one."""
    monkeypatch.setattr(buckets, "_PART", part_size)
    size = {"gs": 5, "s3": 3}[kind] * part_size
    old, new = (random.Random(seed).randbytes(size) for seed in (1, 2))
    store = store_at(UrlPath(f"{servers(kind).url}/{tmp_path.name}"))
    store.write("large", blocks_of(old), size)
    wait, calls = KINDS[kind]._wait, itertools.count()
    counted = {"_request", "create_multipart_upload", "upload_part", "complete_multipart_upload"}

    def losing(self, *what: str, **how):
        if not counted.intersection(map(str, what)):
            return wait(self, *what, **how)
        lost = (call := next(calls)) >= lost_at
        answer = wait(self, *what, **how) if not lost or (carried_out and call == lost_at) else None
        if lost:
            raise FileNotFoundError("no such upload")
        return answer

    monkeypatch.setattr(KINDS[kind], "_wait", losing)
    done = lost_at == 4 and carried_out
    with nullcontext() if done else pytest.raises(FileNotFoundError, match=r"large: .*no such upload"):
        store.write("large", blocks_of(new), size)
    assert store.read("large") == (new if done else old)


def test_what_does_not_pass_is_said(bucket: Bucket, tmp_path) -> None:
    url = f"{bucket.url}/{tmp_path.name}"
    store = store_at(UrlPath(url), patience=0.5)
    with pytest.raises(PermissionError, match=f"{bucket.denied}/a: .*(AccessDenied|storage.objects.create access)"):
        store_at(UrlPath(bucket.denied)).put("a", b"")
    with pytest.raises(FileNotFoundError, match=f"{bucket.kind}://there-is-none/a: no such file or bucket"):
        store_at(UrlPath(f"{bucket.kind}://there-is-none")).put("a", b"")
    for fault, kind in {"expired": PermissionError, "500": OSError}.items():
        bucket.faults(**{fault: 1000})
        try:
            with pytest.raises(kind, match=f"{url}/a: .*tried for 0 s"):
                store.put("a", b"")
        finally:
            bucket.faults()


def test_a_bucket_that_is_busy_at_first_has_answered(bucket: Bucket, tmp_path, monkeypatch) -> None:
    """Many ranks begin at once, and the server asks them to slow down."""
    monkeypatch.setattr(buckets, "_ANSWERED", set())
    monkeypatch.setattr(buckets, "_FIRST_PATIENCE", 0.1)
    bucket.faults(**{"503": 2})
    store_at(UrlPath(f"{bucket.url}/{tmp_path.name}")).put("a", b"")
    assert bucket.faults() == {"503": 2}


def test_a_package_that_lacks_is_named(bucket: Bucket, monkeypatch) -> None:
    KINDS[bucket.kind].connect.cache_clear()
    monkeypatch.setitem(sys.modules, {"s3": "s3fs", "gs": "gcsfs.core"}[bucket.kind], None)
    with pytest.raises(ConfigError, match=rf"{bucket.kind}:// needs .* pip install 'sagetrain\[{bucket.kind}\]'"):
        store_at(UrlPath(bucket.url)).put("a", b"")


def test_a_first_call_has_time_for_its_data(bucket: Bucket, monkeypatch) -> None:
    waits, kind = [], KINDS[bucket.kind]
    monkeypatch.setattr("fsspec.asyn.sync", lambda *_, timeout, **how: waits.append(timeout) or b"abc")
    for number, act in enumerate([lambda to: to.put("a", bytes(32 << 20)), lambda to: to.read("a", 0, 3), kind.sizes]):
        with suppress(AttributeError):  # This is no page of names.
            act(kind(f"new-{number}"))
    first = buckets._FIRST_ANSWER
    assert waits == pytest.approx([first + 32, first, first], abs=1e-3)


def test_credentials_of_google(servers, tmp_path, monkeypatch) -> None:
    """An error says where credentials come from if there are none, if their file cannot be read, or if their account
    is gone."""
    google, key = servers("gs"), tmp_path / "key.json"
    store = store_at(UrlPath(f"{google.url}/{tmp_path.name}"), patience=0.5)
    key.write_text(Path(google.environment["GOOGLE_APPLICATION_CREDENTIALS"]).read_text().replace(TOKENS, GONE))
    (half := tmp_path / "half.json").write_text('{"type": "service_account"}')
    cases = [
        (key, "invalid_grant: account not found"), (tmp_path / "none", f"File {tmp_path}/none was not found"),
        (half, rf"Failed to load .* from {half}: .*missing fields .*client_email"), ("", "Anonymous caller"),
    ]  # fmt: skip
    for path, text in cases:
        monkeypatch.setattr(buckets, "_SILENT", {})
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        GS.connect.cache_clear()
        with pytest.raises(PermissionError, match=f"{google.url}/{tmp_path.name}/a: {text}.*tried for 0 s.*GOOGLE_APP"):
            store.put("a", b"")
    GS.connect.cache_clear()


@pytest.mark.parametrize(("kind", "listens"), [("s3", False), ("s3", True), ("gs", False)])
def test_a_bucket_that_never_answers_is_said_soon(
    tmp_path, corpus, monkeypatch, capsys, kind: str, listens: bool
) -> None:
    """The endpoint refuses connections, or takes them and is silent. A plan waits for it once."""
    monkeypatch.setattr(buckets, "_FIRST_PATIENCE", 1.0)
    monkeypatch.setattr(buckets, "_REMEMBERED", 1e9)  # A plan takes longer than 10 s on a busy host.
    monkeypatch.setattr(buckets, "_FIRST_ANSWER", 0.4 if listens else 60.0)  # A refusal may be late on a busy host.
    monkeypatch.setenv("SAGETRAIN_CACHE", str(tmp_path / "cache"))
    sections = {"evaluation": {"samples_every_tokens": 10_000, "samples_prompts": ["one"]}}
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        endpoint, silent = {
            "s3": ("AWS_ENDPOINT_URL", "Could not connect"),
            "gs": ("STORAGE_EMULATOR_HOST", "Connect call failed"),
        }[kind]
        monkeypatch.setenv(endpoint, f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "key")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        for key, url in (
            ("init_from", f"{kind}://away-{int(listens)}/run"),
            ("run_url", f"{kind}://far-{int(listens)}/run"),
        ):
            KINDS[kind].connect.cache_clear()
            config = write_config(tmp_path / "a.yaml", corpus, tmp_path / "run", **sections)
            found = make_plan(config, [f"training.{key}={url}"], 1, H200).findings
            (refused,) = [each for each in found if each.rule == "refused_by_train"]
            assert refused.key == f"training.{key}" and endpoint in refused.message, refused.message
            assert ("no answer in time" if listens else silent) in refused.message, refused.message
            assert capsys.readouterr().err.count(f"waiting for {url}") == 1
        with pytest.raises(ConfigError, match=f"token files of data: {kind}://away.*{endpoint}"):
            make_plan(config, [f"data.train.0.path={kind}://away-{int(listens)}/data/train"], 1, H200)
    KINDS[kind].connect.cache_clear()


# -- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_killed_while_it_saves_goes_on_to_the_bit(bucket: Bucket, tmp_path, monkeypatch, corpus, alone) -> None:
    """Data and checkpoints are in the bucket, and the server fails all the while. The checkpoint, copied to a disk, is
    one of the undisturbed run, whose data was on a disk."""
    monkeypatch.setenv("SAGETRAIN_CACHE", str(tmp_path / "cache"))
    here = UrlPath(f"{bucket.url}/{tmp_path.name}")
    for file in corpus.iterdir():
        if file.is_file():
            store_at(here / "corpus").put(file.name, file.read_bytes())
    data = {name: [{"path": f"{here}/corpus/{name}"}] for name in ("train", "valid")}
    training = {"run_url": f"{here}/run"}
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", data=data, training=training)
    root = here / "run/checkpoints"
    store = store_at(root)

    def saving() -> bool:
        time.sleep(0.1)
        names = store.names("step-")
        published = {store.read(name).decode().strip() for name in names if name.endswith(".published")}
        return bool(published) and any("/shard-" in each and each.partition("/")[0] not in published for each in names)

    bucket.faults(hold=1, slow=0.1)  # The second checkpoint is never whole.
    try:
        assert when("sagetrain", config, saving, kill_all) != 0
        # The next host has nothing of the run. It would wait to see that the owner is gone (test_in_store.py).
        shutil.rmtree(tmp_path / "run")
        store_at(root.parent).delete(["owner.json"])
        bucket.faults(slow=0.05, cut=0.05, expired=2, **{"500": 0.05, "503": 0.05})
        finish("sagetrain", config)
    finally:
        given = bucket.faults()
    assert "resumed from step-000000" in log_of(config) and sum(given.values()) > 2
    there = on_disk.published(root)
    assert len(there) == 2 and not (tmp_path / "run/checkpoints").exists()
    assert {name.partition("/")[0] for name in store.names("step-") if "/" in name} == {path.name for path in there}
    copied = store_at(root.parent).names()
    assert "owner.json" not in copied and {"tokenizer.model", "log.txt", "config.yaml"} <= {*copied}
    assert (root.parent / "metrics.jsonl").read_bytes() == (tmp_path / "run/metrics.jsonl").read_bytes()
    run = open_run(tmp_path / "run", print)
    assert run.state.step == 40 and run.reader.folder == there[-1]
    assert with_data(load_run(tmp_path / "run", print), tmp_path / "run", None, print).cfg.data == run.cfg.data
    copy = tmp_path / "run/checkpoints"
    fetch(there[-1], copy / "step-00000040")
    (copy / "latest").write_text("step-00000040\n")
    check_same(tmp_path / "run", alone)
    assert on_disk.problems(copy / "step-00000040") == []


def test_a_run_is_read_and_exported_by_its_url(servers, tmp_path, monkeypatch, corpus, alone) -> None:
    """The run in the bucket is the undisturbed one. What is exported there and imported again has its weights, and a
    new run begins with them."""
    monkeypatch.setenv("SAGETRAIN_CACHE", str(tmp_path / "cache"))
    url, hf = (f"{servers('s3').url}/{tmp_path.name}/{name}" for name in ("run", "hf"))
    root, there = UrlPath(url), store_at(UrlPath(url))
    config = (alone / "config.yaml").read_text()
    there.put("config.yaml", config.replace("run_url: null", f"run_url: {url}").encode())
    for name in ("tokenizer.model", "metrics.jsonl", "events.jsonl"):
        there.put(name, (alone / name).read_bytes())
    attempt = root / "checkpoints/step-00000040-0badcafe"
    send_folder(alone / "checkpoints/step-00000040", attempt, last="manifest.json")
    there.put("checkpoints/step-00000040.published", b"step-00000040-0badcafe\n")
    run = sagetrain.load_run(url)
    done = run.export(hf, dtype="float32")
    assert (run.run.step, done.step) == (40, 40) and "config.json" in store_at(UrlPath(hf)).names()
    with pytest.raises(ConfigError, match="hf exists and is not empty"):
        run.export(hf)
    training = {"init_from": url, "total_tokens": 512}
    config = configured(tmp_path / "run.yaml", corpus, tmp_path / "run", training=training)
    finish("sagetrain", config)
    assert f"weights of {attempt} (" in log_of(config)
    settings = [f"training.run_dir={tmp_path}/other", f"training.init_from={url}/checkpoints"]
    (finding,) = [each for each in make_plan(config, settings, 1, H200).findings if each.key == "training.init_from"]
    assert finding.level == "error" and "is no checkpoint, and no run folder that has one" in finding.message
    sagetrain.import_folder(hf, tmp_path / "again")
    again = sagetrain.load_run(tmp_path / "again").run.model.state_dict()
    assert all(again[name].equal(value) for name, value in run.run.model.state_dict().items())
    assert [each.name for each in read_runs([here(Path(url))])] == ["run"]
    with pytest.raises(ConfigError, match=r"hf has no config.yaml of a run"):
        here(Path(hf))
    with pytest.raises(ConfigError, match=r"az://bucket/run is none of s3://BUCKET/FOLDER"):
        here(Path("az://bucket/run"))


def test_a_store_without_rights_is_refused_by_plan_and_start(bucket: Bucket, tmp_path, corpus) -> None:
    url = f"{bucket.denied}/run"
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", training={"run_url": url})
    (finding,) = [each for each in make_plan(config, [], 1, H200).findings if each.key == "training.run_url"]
    words, right = f"training.run_url {url}: {url}/.probe-", {"s3": "s3:PutObject", "gs": "Storage Object User"}
    assert finding.level == "error" and words in finding.message and right[bucket.kind] in finding.message
    folder = RunFolder(tmp_path / "run", url)
    with pytest.raises(CheckpointError, match=words):
        folder.claim("token")
    folder.release()


def test_a_url_that_cannot_be_used_is_refused_by_its_key(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    for kind in KINDS:
        found = rules.findings(load_config("quickstart", [f"training.run_url={kind}://bucket/run"]), True)
        (lacks,) = [each for each in found if each.rule == "url_installed"]
        assert lacks.fix.startswith(f"pip install 'sagetrain[{kind}]'")
    (tmp_path / "checkpoints/step-00000007").mkdir(parents=True)
    cfg = load_config("quickstart", ["training.run_url=s3://bucket/run", f"training.run_dir={tmp_path}"])
    found = {each.rule: each for each in rules.findings(cfg, True) if each.key == "training.run_url"}
    assert "checkpoints/step-00000007 on a disk" in found["run_url_begins_anew"].message
    for url in ("az://bucket/run", "s3://b", "s3://b_c/a", "s3://bucket/a/../b", "s3://bucket/a b", "file://a", "/a"):
        with pytest.raises(
            ConfigError, match=r"training.run_url.* is none of s3://BUCKET/FOLDER, gs://BUCKET/FOLDER and file:///"
        ):
            load_config("quickstart", [f"training.run_url={url}"])
    with pytest.raises(ConfigError, match=r"(?s)data.train.0.path.* is none of s3://BUCKET/FOLDER.*mount them"):
        load_config("quickstart", ["data.train.0.path=az://bucket/data/train"])
    cfg = load_config("quickstart", ["training.init_from=s3://bucket/run", f"training.run_dir={tmp_path}"])
    assert [each.rule for each in rules.findings(cfg, True) if each.key == "training.init_from"] == ["url_installed"]
    own = ["training.init_from=s3://bucket/run/checkpoints/step-00000001", "training.run_url=s3://bucket/run"]
    assert "init_from_itself" in [each.rule for each in rules.findings(load_config("quickstart", own), True)]
    for key in ("training.run_dir", "data.tokenizer"):
        with pytest.raises(ConfigError, match=rf"{key}.* is a URL, which this key does not take"):
            load_config("quickstart", [f"{key}=s3://bucket/a"])
    assert no_run(Path("s3://bucket/run")).startswith("s3://bucket/run is a URL, which is not taken here")
    assert no_run(Path("runs/a:/b")).startswith("there is no folder")
    with pytest.raises(ConfigError, match="s3://bucket/hf is a URL"):
        check_free(Path("s3://bucket/hf"))
    with pytest.raises(ConfigError, match=r"gs://bucket/text.jsonl: no token file"):
        text_of("gs://bucket/text.jsonl", None, 512, "text", ())
