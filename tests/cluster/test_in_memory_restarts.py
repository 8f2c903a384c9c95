"""Ranks that begin again continue from copies in memory, with real processes, to the bits of a run that was left
alone. Single ranks that die, and a host that is lost, are in test_spare_hosts.py."""

import json
import os
import shutil
from pathlib import Path

from forked import PATIENCE, Command
from held import file_of, hold, release
from kept import copied, events_of, kill, restarted
from runs import BIN, check_same, kill_all, log_of, wait_for, write_config
from sagetrain.checkpoint import on_disk
from sagetrain.storage.range_reader import fetch
from sagetrain.storage.url_path import UrlPath

# Each rank is alone on a host of its own, whose memory is a folder.
SCRIPT = """
import os
from pathlib import Path
from sagetrain.checkpoint import slots

os.environ["LOCAL_WORLD_SIZE"] = "1"
slots.ROOT = Path(os.environ["HOSTS"], f"host-{os.environ['RANK']}")
from sagetrain.__main__ import program
program()
"""


def start(config: Path) -> Command:
    script = config.with_name("script.py")
    script.write_text(SCRIPT)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HOSTS": str(config.parent / "memory"),
           "HELD": str(file_of(config)), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}  # fmt: skip
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", str(script), "train", str(config)]
    return Command(words, env, config.with_suffix(".log"), config.parent)


def test_ranks_hosts_and_a_whole_job_that_die(tmp_path, corpus, pair) -> None:
    store = UrlPath(f"file://{tmp_path}/store/run/checkpoints")
    training = {"restarts": 5, "run_url": f"{store.parent}"}
    sections = {"training": training, "checkpoint": {"every_tokens": 10**6, "in_memory_every": 1}}
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2, **sections)
    metrics = tmp_path / "run" / "metrics.jsonl"

    def step() -> int:
        rows = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(row)["step"] for row in rows if row.endswith("}")), default=0)

    hold(config)
    process, at, kept = start(config), [], 0
    for number, victims in enumerate([(0, 1), ()], 1):
        before = step()
        wait_for(process, config, lambda: step() > before + 5 and copied(tmp_path / "memory") > kept)  # noqa: B023
        at.append(step())
        if victims:
            kill(*victims)(process)
            wait_for(process, config, restarted(config, number))
            kept = events_of(config)[0]["from_step"]
    kill_all(process)
    release(config)
    shutil.rmtree(tmp_path / "memory" / "host-0")
    assert start(config).wait(PATIENCE) == 0, log_of(config)[-3000:]
    events = events_of(config)
    print([event["text"] for event in events])
    assert [event["from_memory"] for event in events] == [True] * 2
    # What is trained while a copy is made is taken again: how many steps that is depends on the host.
    first, second = (event["from_step"] for event in events)
    assert 0 < first < second <= at[1] + 1, (first, second, at)
    newest, copy = on_disk.published(store)[-1], tmp_path / "run/checkpoints"
    fetch(newest, copy / on_disk.folder_name(on_disk.step_of(newest)))
    (copy / "latest").write_text(on_disk.folder_name(on_disk.step_of(newest)))
    check_same(tmp_path / "run", pair)
    assert not list((tmp_path / "memory").glob("*/*")), "nothing is left"
