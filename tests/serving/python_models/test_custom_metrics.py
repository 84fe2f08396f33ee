"""Metrics that Python models make: on the port of the metrics, in all instances, and after what goes wrong."""

import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from testing.live_server import live_server
from testing.waiting import until
from tests.helpers.python_models import TEXTS, config_of, executes, write
from tests.helpers.served import Served, serving

pytestmark = pytest.mark.long

EXECUTES = """
    def initialize(self, args):
        self.kept = {}
        self.name = args["model_name"]
        family = pb_utils.MetricFamily("requests_seen", "Requests, \\\\ and\\nmore", pb_utils.MetricFamily.COUNTER)
        self.seen = family.Metric({"model": self.name, "a": 'q"'})
        self.family = family

    def finalize(self):
        family = pb_utils.MetricFamily("made_by_finalize", "Late", pb_utils.MetricFamily.GAUGE)
        gauge = family.Metric()
        gauge.set(2)
        print("finalized with", gauge.value())
""" + executes('"kept": self.kept, "seen": self.seen')
MODELS = {"one": 1, "three": 3}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    for name, count in MODELS.items():
        write(repository, name, EXECUTES, config_of(*TEXTS, more=f"instance_group {{ count: {count} }}"))
    flags = ["--model-control-mode=explicit", "--load-model=*"]
    flags.append("--front-ends=2")
    with serving(repository, *flags, cwd=repository.parent) as served:
        yield served


def ask(served: Served, code: str, name: str = "one") -> str:
    """What a model answers that executes this."""
    return served.executed(name, code)


def text_of(served: Served) -> str:
    """The metrics, as one of the front ends tells them."""
    with urllib.request.urlopen(served.server.metrics_url, timeout=10) as answer:
        content: bytes = answer.read()
    return content.decode()


def samples(served: Served, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a family, by name and values of labels; the same from any front end.

    The parser ends the names of counters with `_total`.
    """
    found = []
    for _ in range(4):
        families = [each for each in text_string_to_metric_families(text_of(served)) if each.name == name]
        ours = [one for each in families for one in each.samples]
        found.append({(one.name.removesuffix("_total"), *one.labels.values()): one.value for one in ours})
    assert all(each == found[0] for each in found)
    return found[0]


def test_a_counter_is_one_for_all_instances_and_models(served: Served) -> None:
    make = "shared = kept.setdefault('shared', pb.MetricFamily('shared', 'By all', pb.MetricFamily.COUNTER));"
    code = f"{make} metric = shared.Metric({{'b': '1', 'a': '2'}}); metric.increment(1.5)"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: ask(served, code, ("one", "three")[number % 2]), range(60)))
    assert samples(served, "shared") == {("shared", "2", "1"): 90.0}
    text = text_of(served)
    assert '# HELP shared By all\n# TYPE shared counter\nshared{a="2",b="1"} 90.0\n' in text
    assert ask(served, f"{make} found = shared.Metric({{'a': '2', 'b': '1'}}).value()", "three") == "90.0"


def test_threads_and_instances_lose_no_increment(served: Served) -> None:
    code = """
import threading
family = kept.setdefault("family", pb.MetricFamily("raced", "Raced", pb.MetricFamily.COUNTER))
metric = family.Metric()
threads = [threading.Thread(target=lambda: [metric.increment(1) for _ in range(2000)]) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: ask(served, code, name), ["one", "three", "three", "three"]))
    assert samples(served, "raced") == {("raced",): 4 * 3 * 2000}


def test_gauges_and_histograms(served: Served) -> None:
    ask(
        served,
        "kept['g'] = pb.MetricFamily(name='level', description='Level', kind=pb.GAUGE);"
        "g = kept['g'].Metric(); g.set(5); g.increment(-7.5); assert g.value() == -2.5;"
        "kept['h'] = pb.MetricFamily('sizes', 'Sizes', pb.MetricFamily.HISTOGRAM);"
        "h = kept['h'].Metric(labels={'of': 'x'}, buckets=[1, 2.5, 10]);"
        "[h.observe(value) for value in (0.5, 1, 2, 11, 3)]",
    )
    assert samples(served, "level") == {("level",): -2.5}
    assert samples(served, "sizes") == {
        ("sizes_bucket", "x", "1.0"): 2,
        ("sizes_bucket", "x", "2.5"): 3,
        ("sizes_bucket", "x", "10.0"): 4,
        ("sizes_bucket", "x", "+Inf"): 5,
        ("sizes_count", "x"): 5,
        ("sizes_sum", "x"): 17.5,
    }
    ask(served, "b = kept['b'] = pb.MetricFamily('bare', '', pb.HISTOGRAM); b.Metric(buckets=[1]).observe(2)")
    assert samples(served, "bare")["bare_bucket", "+Inf"] == 1


def test_texts_are_escaped(served: Served) -> None:
    assert 'requests_seen{a="q\\"",model="one"} ' in text_of(served)
    assert "# HELP requests_seen Requests, \\\\ and\\nmore\n" in text_of(served)


COUNTER = "f = pb.MetricFamily('known', 'K', pb.COUNTER); f"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (f"{COUNTER}.Metric().increment(-1)", "monotonically by non-negative values"),
        (f"{COUNTER}.Metric().increment(float('nan'))", "monotonically by non-negative values"),
        (f"{COUNTER}.Metric().set(1)", "TRITONSERVER_METRIC_KIND_COUNTER does not support Set"),
        (f"{COUNTER}.Metric().observe(1)", "TRITONSERVER_METRIC_KIND_COUNTER does not support Observe"),
        (
            "f = pb.MetricFamily('h', '', pb.HISTOGRAM); f.Metric(buckets=[1]).value()",
            "HISTOGRAM does not support Value",
        ),
        ("pb.MetricFamily('h', '', pb.HISTOGRAM).Metric()", "Missing required buckets"),
        ("pb.MetricFamily('h', '', pb.HISTOGRAM).Metric(buckets=[2, 1])", "ascending order"),
        ("pb.MetricFamily('h', '', pb.HISTOGRAM).Metric(buckets=[1, float('inf')])", "finite numbers"),
        ("pb.MetricFamily('h', '', pb.HISTOGRAM).Metric(buckets=list(range(257)))", "at most 256"),
        ("pb.MetricFamily('h', '', pb.HISTOGRAM).Metric({'le': '1'}, [1])", "no name of a label"),
        (f"{COUNTER}.Metric(buckets=[1])", "Unexpected buckets found"),
        (f"{COUNTER}.Metric(['a'])", "Labels must be a dictionary"),
        (f"{COUNTER}.Metric({{'a': 1}})", "must be texts"),
        (f"{COUNTER}.Metric({{'a-b': '1'}})", "'a-b' is no name of a label"),
        (f"{COUNTER}.Metric({{'__a': '1'}})", "'__a' is no name of a label"),
        (f"{COUNTER}.Metric({{'a': 'x' * 20_000}})", "have more than 16368 bytes"),
        (f"{COUNTER}.Metric({{'a': '\\udc80'}})", "surrogates not allowed"),
        ("pb.MetricFamily('requests_seen', '', pb.GAUGE)", "is a counter already, so it cannot be a gauge"),
        ("pb.MetricFamily('requests-seen', '', pb.GAUGE)", "is no name of a metric"),
        ("pb.MetricFamily('', '', pb.GAUGE)", "is no name of a metric"),
        ("pb.MetricFamily('a\\n', '', pb.GAUGE)", "is no name of a metric"),
        ("pb.MetricFamily('nv_inference_count', '', pb.COUNTER)", "names that begin with nv_ or gangway_"),
        ("pb.MetricFamily('gangway_cores', '', pb.COUNTER)", "names that begin with nv_ or gangway_"),
        ("pb.MetricFamily('a', 'x' * 5000, pb.COUNTER)", "more than 4000 characters"),
        ("pb.MetricFamily('a', b'', pb.COUNTER)", "not JSON serializable"),
        ("pb.MetricFamily('a', '', 3)", "there is no kind 3"),
        (
            "a = pb.MetricFamily('t_sum', '', pb.COUNTER); pb.MetricFamily('t', '', pb.HISTOGRAM)",
            "samples of the same name as 't_sum'",
        ),
    ],
)
def test_what_is_refused(served: Served, code: str, why: str) -> None:
    with pytest.raises(InferenceServerException, match=why):
        ask(served, code)
    assert "Error" not in ask(served, "seen.increment(0)")


def test_a_deleted_family_takes_its_metrics_along(served: Served) -> None:
    ask(
        served,
        "f = kept['f'] = pb.MetricFamily('passing', '', pb.COUNTER); kept['m'] = f.Metric(); kept['m'].increment(3)",
    )
    assert samples(served, "passing") == {("passing",): 3}
    ask(served, "kept['second'] = pb.MetricFamily('passing', 'other', pb.COUNTER); kept['second'].Metric()")
    ask(served, "del kept['f']")
    with pytest.raises(InferenceServerException, match="'MetricFamily' has been deleted"):
        ask(served, "kept['m'].increment(1)")
    assert samples(served, "passing") == {("passing",): 3}, "the second family has it, too"
    ask(served, "kept.clear()")
    until(lambda: "passing" not in text_of(served))
    ask(served, "kept['f'] = pb.MetricFamily('passing', '', pb.GAUGE); kept['f'].Metric()")
    assert samples(served, "passing") == {("passing",): 0}
    ask(served, "kept.clear()")


@pytest.mark.long
def test_counters_go_on_when_an_instance_is_killed(served: Served) -> None:
    ask(served, "seen.increment(1000)")
    before = samples(served, "requests_seen")["requests_seen", 'q"', "one"]
    (pid,) = served.instances("one")
    os.kill(pid, signal.SIGKILL)
    until(lambda: served.instances("one") not in ([], [pid]))
    assert samples(served, "requests_seen")["requests_seen", 'q"', "one"] == before
    until(lambda: _counts(served))
    assert samples(served, "requests_seen")["requests_seen", 'q"', "one"] == before + 1


def _counts(served: Served) -> bool:
    try:
        ask(served, "seen.increment(1)")
    except InferenceServerException:
        return False  # it is being started
    return True


@pytest.mark.long
def test_a_killed_process_leaves_no_lock_behind(served: Served) -> None:
    lock = (
        "import fcntl, os; from gangway.python_backend.supervisor_link import linked;"
        "fcntl.lockf(linked().values_fd, fcntl.LOCK_EX); os.kill(os.getpid(), 9)"
    )
    (pid,) = served.instances("one")
    with pytest.raises(InferenceServerException):
        ask(served, lock)
    ask(served, "seen.increment(1)", "three")
    until(lambda: served.instances("one") not in ([], [pid]))
    until(lambda: _counts(served))


@pytest.mark.long
def test_metrics_go_with_their_model(served: Served) -> None:
    code = "kept['f'] = pb.MetricFamily('leaving', '', pb.COUNTER); kept['f'].Metric({'m': 'MODEL'}).increment(4)"
    for name in MODELS:
        ask(served, code.replace("MODEL", name), name)
    served.client.unload_model("one")
    until(lambda: 'leaving{m="one"}' not in text_of(served))
    assert samples(served, "leaving") == {("leaving", "three"): 4}
    until(lambda: "finalized with 2.0" in served.log())
    assert "made_by_finalize" not in text_of(served)
    served.client.load_model("one")
    ask(served, code.replace("MODEL", "one"))
    assert samples(served, "leaving") == {("leaving", "one"): 4, ("leaving", "three"): 4}


@pytest.mark.long
def test_a_model_with_very_many_metrics_disturbs_nobody(served: Served) -> None:
    code = """
family = kept["many"] = pb.MetricFamily("many", "", pb.COUNTER)
made = 0
try:
    for number in range(1_000_000):
        family.Metric({"number": str(number)})
        made += 1
except pb.TritonModelException as error:
    found = f"{made}: {error}"
"""
    made, _, why = ask(served, code).partition(": ")
    assert 900 < int(made) < 1000
    assert "the model has 1000 metrics, more cannot be" in why
    assert len(samples(served, "many")) == int(made)
    assert ask(served, "f = pb.MetricFamily('few', '', pb.COUNTER); found = f.Metric().value()", "three") == "0.0"
    families = "kept['f'] = [pb.MetricFamily(f'f{n}', '', pb.COUNTER) for n in range(1_000_000)]"
    with pytest.raises(InferenceServerException, match="the model has 1000 families"):
        ask(served, families)
    ask(served, "kept.clear()")
    until(lambda: "many{" not in text_of(served))


def test_a_server_without_metrics_has_models_that_count(tmp_path: Path) -> None:
    write(tmp_path / "models", "one", EXECUTES, config_of(*TEXTS))
    flags = [f"--cache-dir={tmp_path / 'cache'}", "--allow-metrics=false"]
    with live_server(tmp_path / "models", flags) as server, triton.InferenceServerClient(server.url) as client:
        served = Served(server, client, tmp_path / "models")
        assert ask(served, "seen.increment(2); found = seen.value()") == "2.0"
