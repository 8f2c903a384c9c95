"""A pytest plugin (-p workers --workers N): processes that are forked from this one run the tests, a file at a time.

What tests import and the collection take a quarter of a minute. They are done once, before the forks. Ranks and
commands are forked from a server that has its imports, test modules included, from this process too.
"""

import contextlib
import os
import sys
import traceback
from collections import deque
from itertools import groupby
from multiprocessing import Pipe, connection

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # A process that had looked for a GPU could not be forked.

import forked
import interpreted


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=3, help="the number of processes; 0: this one runs the tests")


def pytest_configure(config: pytest.Config) -> None:
    whole = config.args_source is config.ArgsSource.TESTPATHS
    if whole and config.option.workers and not config.option.collectonly:
        interpreted.start()


def pytest_unconfigure() -> None:
    interpreted.stop()


class Worker:
    """A fork of this process that runs the tests it is told to run.

    Attributes:
        left: the places of the tests that it was told to run and has not ended. The first one is running.
    """

    def __init__(self, session: pytest.Session, number: int) -> None:
        self.left = range(0)
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                Child(session, theirs).work(number)
            except BaseException:  # noqa: BLE001 - whatever it is, the parent raises it
                theirs.send(("broken", traceback.format_exc()))
            finally:
                os._exit(0)
        theirs.close()

    def run(self, places: range) -> None:
        """Let the process run these tests, or end if there are none."""
        self.left = places
        self.pipe.send(places)

    def kill(self) -> str:
        """End the process and what it has started; return how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, 9)
        return f"exit code {os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])}"


class Child:
    """A pytest plugin: run the tests that the parent names, and tell it how they end."""

    def __init__(self, session: pytest.Session, pipe: connection.Connection) -> None:
        self._session, self._config, self._pipe = session, session.config, pipe

    def work(self, number: int) -> None:
        """Be the process from the fork to the end."""
        os.setpgid(0, 0)  # An interrupt is for the parent, which ends this process.
        capture = self._config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # Its files are the parent's.
        nothing = os.open(os.devnull, os.O_WRONLY)  # What the reporter writes is written by the parent's.
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        folders = self._config._tmp_path_factory
        folders._basetemp = folders.getbasetemp() / f"worker-{number}"
        folders._basetemp.mkdir()
        self._config.pluginmanager.register(self)
        while places := self._pipe.recv():
            items = [self._session.items[place] for place in places]
            # Behind the last test of a file, fixtures of the session stay.
            for place, item, following in zip(places, items, [*items[1:], self._session], strict=True):
                self._pipe.send(("begun", place))
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._pipe.send(("ended", None))
        self._session._setupstate.teardown_exact(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Deal out the tests, and tell the other plugins how they fare."""
    option, hook = session.config.option, session.config.hook
    if option.collectonly or session.testsfailed:
        return None  # pytest's own loop is called.
    session.config._tmp_path_factory.getbasetemp()  # All processes have theirs in it.
    with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        forked.serve()
    if not option.workers:
        return None
    places = enumerate(item.path for item in session.items)
    together = ([place for place, _ in group] for _, group in groupby(places, key=lambda each: each[1]))
    files = deque(range(group[0], group[-1] + 1) for group in together)
    workers: dict[connection.Connection, Worker] = {}
    started = 0
    try:
        while files or workers:
            while files and len(workers) < option.workers:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                worker, started = Worker(session, started), started + 1
                workers[worker.pipe] = worker
                worker.run(files.popleft())
            for pipe in connection.wait(list(workers)):
                worker = workers[pipe]
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    ending = workers.pop(pipe).kill()
                    if worker.left:
                        item = session.items[worker.left[0]]
                        text = f"the process has died: {ending}"
                        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
                        hook.pytest_runtest_logreport(report=report)
                        files.extendleft(filter(None, [worker.left[1:]]))
                    continue
                if kind == "report":
                    report = hook.pytest_report_from_serializable(config=session.config, data=value)
                    hook.pytest_runtest_logreport(report=report)
                elif kind == "begun":
                    worker.left = range(value, worker.left.stop)
                elif kind == "ended":
                    worker.run(files.popleft() if files else range(0))
                else:
                    raise RuntimeError(value)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    finally:
        for worker in workers.values():
            worker.kill()
    return True
