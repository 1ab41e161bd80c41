"""Hypothesis profiles: the default one always tries the same examples, ``HYPOTHESIS_PROFILE=deep`` many new ones.
And what no test may leave behind."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gopt.cli import render_progress
from hypothesis import HealthCheck, settings
from products import some_cases

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, suppress_health_check=QUIET)
settings.register_profile("deep", deadline=None, max_examples=400, suppress_health_check=QUIET)
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it: no terminal is here
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A job in the background ignores these, and so would the commands that tests start and stop by them.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

TESTS = Path(__file__).parent
GENERATORS: list[np.random.Generator] = []

COMPILED = "GOPT_TESTS_COMPILED"
"""Names a folder of compiled modules, which this process and all that it starts share."""


def pytest_configure(config: pytest.Config) -> None:
    config.option.cases = config.option.cases or _chosen_cases(config)  # xdist hands options to its workers
    _compile_once(config)


def _compile_once(config: pytest.Config) -> None:
    """All modules would be compiled again by each command, and all tests by each run, where writing them beside the
    sources is switched off."""
    if not sys.dont_write_bytecode and COMPILED not in os.environ:
        return
    if COMPILED not in os.environ:
        cache = getattr(config, "cache", None)
        os.environ[COMPILED] = str(cache.mkdir("compiled")) if cache else tempfile.mkdtemp(prefix="gopt-compiled-")
        if cache is None:
            config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(COMPILED), ignore_errors=True))
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = os.environ[COMPILED]
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ[COMPILED]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", choices=("some", "rest", "all"),
        help="cases of each test: some, evenly spread, as by default in the whole suite; the rest; or all, as where "
        "files, words or marks are named",
    )  # fmt: skip


def _chosen_cases(config: pytest.Config) -> str:
    """Who names files, cases or marks wants all of them."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    return "some" if whole and "not slow" in config.option.markexpr else "all"


@pytest.hookimpl(trylast=True)  # once marks have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.option.cases
    if chosen == "all":
        return
    some = {item.nodeid for item in some_cases(items)}
    dropped = [item for item in items if (item.nodeid in some) != (chosen == "some")]
    config.hook.pytest_deselected(items=dropped)
    left_out = {item.nodeid for item in dropped}
    items[:] = [item for item in items if item.nodeid not in left_out]


def _is_of_tests(file: str | None) -> bool:
    return file is not None and Path(file).is_relative_to(TESTS)


def pytest_collection_finish() -> None:
    """All tests and modules stay until the end: a collection of garbage that looks at them each time took 0.3 s, and
    there is one behind each file of tests."""
    ours = [module for module in list(sys.modules.values()) if _is_of_tests(vars(module).get("__file__"))]
    values = (value for module in ours for value in vars(module).values())
    GENERATORS.extend({value for value in values if isinstance(value, np.random.Generator)})
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def draws_do_not_depend_on_the_tests_before():
    """A comparison of drawn numbers failed for one order of the tests among all that xdist makes."""
    for generator in GENERATORS:
        generator.bit_generator.state = np.random.PCG64(generator.bit_generator.seed_seq).state


@pytest.fixture(autouse=True, scope="session")
def no_phase_is_long():
    """A line for a phase of ten seconds would make what a command says depend on the machine."""
    real, render_progress.EVERY = render_progress.EVERY, math.inf
    yield
    render_progress.EVERY = real


@pytest.fixture(autouse=True, scope="session")
def disks_are_not_waited_for():
    """What tests write need not outlast the machine: a sync took 5 ms, and a folder of ranks needs a dozen."""
    real, os.fsync = os.fsync, lambda number: os.fstat(number) and None
    yield
    os.fsync = real


NUMBERS = frozenset({
    "analysis", "artifact", "browser", "documents", "hostile", "ir", "lower", "numeric", "offline", "passes", "runtime",
    "spmd", "system", "tensor_parallel",
})  # fmt: skip
"""Folders whose tests ask what ranks compute or what their files have. Proofs of such steps are elsewhere: in
``verification``, of drawn ones in ``laws`` and ``corpus``, of commands in ``cli`` and ``docs``."""


@pytest.fixture(autouse=True, scope="module")
def ranks_are_not_proven(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks of such a test are written as with ``--no-prove``."""
    if request.path.relative_to(TESTS).parts[0] not in NUMBERS:
        yield
        return
    from gopt.verbs import folders, shard

    real = shard.prove_files
    shard.prove_files = folders.prove_files = None
    yield
    shard.prove_files = folders.prove_files = real


@pytest.fixture
def unchecked():
    """Files of folders are read as the test has left them, without a look at their digests."""
    import gopt

    with gopt.unchecked():
        yield


SPARE = 12
"""Threads that a file of tests may leave: those of ranks that were made to hang, and the libraries' own."""


@pytest.fixture(autouse=True, scope="module")
def threads_end():
    """Thousands of idle threads once made each test a hundred times slower, and no test failed."""
    before = threading.active_count()
    yield
    gc.collect()
    end = time.monotonic() + 120
    while threading.active_count() > before + SPARE and time.monotonic() < end:
        time.sleep(0.05)
    left = [thread.name for thread in threading.enumerate()]
    assert len(left) <= before + SPARE, f"threads are left behind: {sorted(left)}"
