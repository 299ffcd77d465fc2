"""What every test run promises, whatever it runs: nothing is passed over in silence.

- A run in which no test passed fails, also when every test was skipped or deselected.
- `--require-gpu` fails where there is no GPU; without it, GPU tests are skipped by name.
- `--no-torch` runs only what imports no torch, and proves it by making the import fail.
"""

import os
import signal
import sys

import hypothesis
import pytest

# No deadline: a loaded machine is no failure. The whole test has one.
hypothesis.settings.register_profile(
    "project", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("project")

# Read when ray is first imported, wherever that happens. Without the first, a Ray command run earlier
# on the machine decides whether this one must authenticate.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for _name in (
    "NO_PROXY",
    "no_proxy",
):  # the servers of the tests are on this machine, and no proxy's business
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "127.0.0.1", "127.0.0.2", "localhost")))


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="fail GPU tests where there is no GPU")
    parser.addoption("--no-torch", action="store_true", help="run only the tests that import no torch")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a job in the background: what is started here would inherit that, and some tests are about Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--require-gpu"):
        config.pluginmanager.register(FailuresAtOnce(config))
    if config.getoption("--no-torch"):
        sys.modules["torch"] = None  # importing it raises now
    if config.getoption("--require-gpu") and not has_gpu():
        raise pytest.UsageError("no CUDA device, and --require-gpu was given")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """For --dist loadscope: one worker has all tests of the real app, which share one Ray; the others go anywhere."""
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerForTheApp(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "the real app" if nodeid.startswith("tests/e2e/") else nodeid

    return OneWorkerForTheApp(config, log) if config.getvalue("dist") == "loadscope" else None


class FailuresAtOnce:
    """GPU runs are cut short now and then: what failed by then is on the screen, not in a summary to come."""

    def __init__(self, config):
        self._config = config

    def pytest_runtest_logreport(self, report):
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None and not hasattr(self._config, "workerinput"):
            reporter.ensure_newline()
            reporter.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
            reporter.write_line(report.longreprtext[-4000:])


def has_gpu():
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if (
        report.failed
        and collector.config.getoption("--no-torch")
        and "import of torch halted" in str(report.longrepr)
    ):
        report.outcome, report.result = "passed", []
    return report


def pytest_collection_modifyitems(config, items):
    if config.getoption("--no-torch"):  # replicas of the real app run the real model
        kept = [item for item in items if "e2e" not in item.keywords]
        config.hook.pytest_deselected(items=[item for item in items if "e2e" in item.keywords])
        items[:] = kept


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and not has_gpu():
        pytest.skip("needs a CUDA device (make test-gpu)")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus != pytest.ExitCode.OK or reporter is None or session.config.option.collectonly:
        return
    if not reporter.stats.get("passed"):
        reporter.write_line("ERROR: not one test passed", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
